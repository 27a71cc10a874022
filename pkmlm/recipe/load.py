"""A recipe from its file: YAML, inheritance (`base:`) and overrides (`-s key=value`) into dataclasses.

Every error names the file, line and column (or the override) and the dotted key.
"""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from pkmlm.errors import UserError
from pkmlm.recipe.bind import bind
from pkmlm.recipe.check import check_recipe
from pkmlm.recipe.nodes import LARGEST, Node, decoded, parse, shorten
from pkmlm.recipe.schema import Recipe


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read, inherit, override and check a recipe.

    Args:
        path: a YAML file. `base: other.yaml` in it, relative to its folder, is read first; mappings are
            merged, all else is replaced.
        overrides: `key=value` with a dotted key; the value is a scalar or a list ([3, 5]); the last wins.

    Raises:
        UserError: anything that is not a recipe; see `pkmlm.recipe.check` for what must hold between keys.
    """
    tree = read_tree(Path(path), ())
    for override in overrides:
        tree = merge(tree, parse_override(override))
    places: dict[str, str] = {}
    recipe: Recipe = bind(tree, Recipe, "", places)
    return check_recipe(recipe, places)


def read_tree(path: Path, inheritors: tuple[str, ...], asked_at: str = "") -> Node:
    """The tree of a file on top of its base's."""
    prefix = f"{asked_at}: base: " if asked_at else ""
    try:
        whole, plain = os.path.realpath(path), Path(os.path.normpath(path))
        path = plain if os.path.realpath(plain) == whole else path  # a link before ".." makes them two files
        if path.exists() and not path.is_file():
            raise UserError(f"{prefix}{path} is not a file (expected a recipe)")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise UserError(f"{prefix}no such recipe: {path}", near_files(path)) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{prefix}cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if whole in inheritors:
        raise UserError(f"{prefix}{path} inherits from itself", "recipes inherit in one line, not in a circle")
    tree = parse(decoded(data, str(path)), str(path))
    if not isinstance(tree.value, dict):
        raise UserError(f"{tree.place}: found {tree.shown()} (expected keys such as name: and model:)")
    base = tree.value.get("base")
    if base is None:
        return tree
    own = Node({key: value for key, value in tree.value.items() if key != "base"}, tree.place)
    if not isinstance(base.value, str) or base.is_null:
        raise UserError(f"{base.place}: base: found {base.shown()} (expected one file name)")
    return merge(read_tree(path.parent / base.value, (*inheritors, whole), base.place), own)


def near_files(path: Path) -> str:
    """A hint that names the recipe whose file name is nearest, if there is one."""
    try:
        names = {entry.stem: entry for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")}
    except OSError:
        return ""
    near = difflib.get_close_matches(path.stem, names, n=1)
    return f"did you mean {names[near[0]]}?" if near else ""


def parse_override(text: str) -> Node:
    """`a.b=value` as a tree with one leaf."""
    name, equals, value = text.partition("=")
    place = f"-s {shorten(text)}"
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"{place}: not of the form key=value", "for example -s model.memory.topk=16")
    value = value.strip()
    node = relocate(parse(value, place), place) if value[:1] in tuple("[{'\"") else Node(value, place)
    for part in reversed(parts):
        node = Node({part: node}, place)
    return node


def relocate(node: Node, place: str) -> Node:
    """The same tree, all of it from one place (a line and a column mean nothing within an override)."""
    value = node.value
    if isinstance(value, dict):
        value = {key: relocate(child, place) for key, child in value.items()}
    elif isinstance(value, list):
        value = [relocate(child, place) for child in value]
    return Node(value, place, node.quoted)


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings key by key, everything else replaced."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    entries = dict(base.value)
    for key, node in over.value.items():
        entries[key] = merge(entries[key], node) if key in entries else node
    return Node(entries, over.place)
