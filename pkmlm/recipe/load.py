"""Load a recipe: turn YAML, inheritance (`base:`) and overrides (`-s key=value`) into dataclasses.

Every error names the file, line and column (or the override) and the dotted key.
"""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ValidationError

from pkmlm.errors import UserError
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import SpecError
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.nodes import Node, parse, parse_override, shorten
from pkmlm.recipe.other_names import known_by
from pkmlm.recipe.schema import Memories, Recipe, expectation, key_names, type_text
from pkmlm.recipe.shipped import find_base, find_recipe, recipe_text

INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
MAX_DIGITS = 40
KEYS_HINT = "`pkmlm recipe keys` explains every key"
MEMORY_HINT = "give a new memory its kind; drop one of the base recipe with null"


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and those that it inherits, apply overrides, and check the result.

    Args:
        path: a YAML file, or the name of an installed recipe ("demo"). A `base: other.yaml` in it, relative to its
            folder, is read first; mappings are merged, everything else is replaced. A relative `data.dir`,
            `train.init_from` or `finetune.background` is looked for in the working directory, then in the folder of the
            file that names it.
        overrides: `key=value` with a dotted key; the value is a scalar or a list ([3, 5]); the last wins.

    Raises:
        UserError: the file is not a valid recipe, or `pkmlm.recipe.constraints` finds keys that do not fit together.
    """
    return recipe_of(read_tree(find_recipe(path)), overrides)


def recipe_of(tree: Node, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a tree with overrides, checked, as `load_recipe` returns it."""
    base, changes = tree, list(map(parse_override, overrides))
    for change in changes:
        tree = merge(tree, change)
    if not any("name" in change.value for change in changes):
        tree = named_as_twin(tree, base)
    places: dict[str, str] = {}
    recipe: Recipe = bind(tree, Recipe, "", places)
    for section, key in (("train", "init_from"), ("finetune", "background")):
        part = getattr(recipe, section)
        if path := getattr(part, key):
            found = found_path(path, places[f"{section}.{key}"])
            recipe = replace(recipe, **{section: replace(part, **{key: found})})
    if folders := tuple(found_path(folder, places["data.dir"]) for folder in recipe.data.folders):
        dir = folders[0] if isinstance(recipe.data.dir, str) else folders
        recipe = replace(recipe, data=replace(recipe.data, dir=dir))
    return check_recipe(recipe, places)


def found_path(path: str, place: str) -> str:
    """A path that a recipe names at `place`; next to that file, if it is only there."""
    path = os.path.expanduser(path)  # no shell does in a recipe or after -s
    if path and not os.path.exists(path) and not place.startswith("-s "):
        beside = os.path.join(os.path.dirname(place.rsplit(":", 2)[0]), path)
        if os.path.exists(beside):
            return beside
    return path


def read_tree(path: Path, inheritors: tuple[str, ...] = (), named_at: str = "") -> Node:
    """The tree of a file, merged onto that of its base.

    Args:
        inheritors: real paths of the files that inherit from this one.
        named_at: the place of the `base:` that names this one.
    """
    prefix = f"{named_at}: base: " if named_at else ""
    try:
        text = recipe_text(path)
    except UserError as error:
        raise UserError(f"{prefix}{error.message}", error.hint, error.exit_code) from None
    whole = os.path.realpath(path)
    if whole in inheritors:
        raise UserError(f"{prefix}{path} inherits from itself", "name another base, or none")
    tree = parse(text, str(path))
    if not isinstance(tree.value, dict):
        raise UserError(f"{tree.place}: found {tree.shown()} (expected keys such as name: and model:)")
    if "axes" in tree.value:
        raise UserError(f"{prefix}{path} is a grid (expected a recipe)", f"`pkmlm sweep {path}` runs its cells")
    base = tree.value.get("base")
    if base is None:
        return tree
    if not isinstance(base.value, str) or base.is_null:
        raise UserError(f"{base.place}: base: found {base.shown()} (expected one file name)")
    own = Node({key: value for key, value in tree.value.items() if key != "base"}, tree.place)
    above = read_tree(find_base(path, base.value), (*inheritors, whole), base.place)
    return merge(above, own) if "name" in own.value else named_as_twin(merge(above, own), above)


def named_as_twin(tree: Node, base: Node) -> Node:
    """A recipe that has its base's name: NAME-dense, if it has dropped all of its base's memories."""

    def has_memories(recipe: Node) -> bool:
        found = recipe
        for key in ("model", "memories"):
            found = found.value.get(key, Node("", "")) if isinstance(found.value, dict) else Node("", "")
        return isinstance(found.value, dict) and not all(memory.is_null for memory in found.value.values())

    assert isinstance(tree.value, dict)
    name = tree.value.get("name")
    if name is None or not isinstance(name.value, str) or name.is_null or not has_memories(base) or has_memories(tree):
        return tree
    twin = replace(name, value=f"{name.value[:94]}-dense")  # a name has at most 100 characters
    return Node({**tree.value, "name": twin}, tree.place)


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings are merged key by key, everything else is replaced. An empty value (`memory:`
    with all of its keys commented out) changes nothing.

    Raises:
        UserError: `over` has {} for a mapping of `base` that is not empty: whoever writes it wants to drop that.
    """
    if isinstance(base.value, dict) and over.value == "" and not over.quoted:
        return base
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        if base.drops and isinstance(over.value, dict):  # what was dropped as a whole may be dropped by name, too
            over = replace(over, value={key: replace(node, drops=True) for key, node in over.value.items()})
        return replace(over, drops=base.drops or isinstance(base.value, dict))
    entries = dict(base.value)
    for key, node in over.value.items():
        if node.value == {} and key in entries and isinstance(entries[key].value, dict) and entries[key].value:
            raise UserError(
                f"{node.place}: {key}: found {{}} (expected null, to drop what it holds, or keys to change)"
            )
        entries[key] = merge(entries[key], node) if key in entries else node
    return Node(entries, over.place)


def bind(node: Node, kind: Any, name: str, places: dict[str, str], known: Sequence[str] = ()) -> Any:
    """Convert a node to a value of a type.

    Args:
        kind: a pydantic dataclass, or the type of one of its fields.
        name: the dotted key; "" if `kind` is a complete recipe or grid.
        places: receives the place of every key, and of every item of a list as `key.0`.
        known: the dotted keys to choose from where one is unknown; empty: those of `kind`.

    Raises:
        UserError: the node is not such a value; names its place and the dotted key.
    """
    known = known or (key_names(kind) if is_dataclass(kind) else ())
    if name:
        places[name] = node.place
    if NoneType in get_args(kind):
        kind = kind_of_optional(node, kind, name)
    if kind is Node:
        return node
    if kind == Memories:
        return bind_memories(node, name, places)
    if is_dataclass(kind):
        return bind_section(node, kind, name, places, known)
    if node.is_null:
        return None
    if get_origin(kind) is tuple:
        return bind_list(node, get_args(kind), name, places, known)
    if get_origin(kind) is dict and isinstance(node.value, dict):
        (_, item) = get_args(kind)
        return {key: bind(child, item, f"{name}.{key}", places, known) for key, child in node.value.items()}
    return bind_scalar(node, kind, name)


def kind_of_optional(node: Node, kind: Any, name: str) -> Any:
    """The type of a key that may be null, for a node: of one text or a list of texts, the one that it is."""
    kind, *lists = (option for option in get_args(kind) if option is not NoneType)
    if not lists or node.is_null:
        return kind
    items = node.value if isinstance(node.value, list) else [node]
    if not items or not all(isinstance(item.value, str) and not item.is_null for item in items):
        raise wrong(node, name, f"{type_text(kind)} or {type_text(lists[0])}")
    return lists[0] if isinstance(node.value, list) else kind


def bind_list(
    node: Node, args: tuple[Any, ...], name: str, places: dict[str, str], known: Sequence[str]
) -> tuple[Any, ...]:
    """Convert a list to a tuple with items of types `args`; where any length will do, a text or a section stands for a
    list of one.
    """
    any_length = args[-1] is Ellipsis
    if any_length and not isinstance(node.value, list) and (is_dataclass(args[0]) or isinstance(node.value, str)):
        return (bind(node, args[0], f"{name}.0", places, known),)
    if not isinstance(node.value, list) or not (any_length or len(node.value) == len(args)):
        raise wrong(node, name, "a list" if any_length else f"a list of {len(args)}")
    kinds = [args[0]] * len(node.value) if any_length else args
    return tuple(
        bind(item, each, f"{name}.{number}", places, known)
        for number, (item, each) in enumerate(zip(node.value, kinds, strict=True))
    )


def bind_scalar(node: Node, kind: Any, name: str) -> Any:
    """Convert a scalar to a bool, a number or a text. What is not of its type is left for its section to refuse."""
    text = node.value
    if not isinstance(text, str):
        return text
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{node.place}: {name}: the text holds a character that no file can hold (NUL or a surrogate)")
    if node.quoted:
        return text
    if kind is bool and text in ("true", "false"):
        return text == "true"
    if (kind is int and INTEGER.fullmatch(text)) or (kind is float and NUMBER.fullmatch(text)):
        if len(text) > MAX_DIGITS:
            raise wrong(node, name, f"a number of at most {MAX_DIGITS} digits")
        return kind(text)
    return text


def bind_memories(node: Node, name: str, places: dict[str, str]) -> dict[str, Any]:
    """Convert a mapping of names to memories, each to the keys of its kind. What is null is none."""
    if node.is_null:
        return {}
    if not isinstance(node.value, dict):
        raise wrong(node, name, "names of memories, each with a kind and its keys")
    memories = {}
    for memory, child in node.value.items():
        dotted = f"{name}.{shorten(memory)}"
        if child.is_null:
            if not child.drops:
                known = [each for each, other in node.value.items() if not other.is_null]
                found = f"{child.place}: {dotted}: found {child.shown()}, but there is no such memory to drop"
                raise UserError(found, f"memories: {', '.join(map(shorten, known)) or 'none'}")
            continue
        if not isinstance(child.value, dict):
            raise wrong(child, dotted, "keys such as kind and layers")
        kind = child.value.get("kind")
        if kind is None:
            raise UserError(f"{child.place}: {dotted}: found no kind (expected kind: {', '.join(SPECS)})", MEMORY_HINT)
        if not isinstance(kind.value, str) or kind.value not in SPECS:
            raise wrong(kind, f"{dotted}.kind", ", ".join(SPECS))
        spec = SPECS[kind.value]
        memories[memory] = bind(child, spec, dotted, places, key_names(spec, f"{dotted}."))
    return memories


def bind_section(node: Node, kind: Any, name: str, places: dict[str, str], known: Sequence[str]) -> Any:
    """Convert a mapping to a dataclass that has its keys."""
    every = get_type_hints(kind)
    hints = {field.name: every[field.name] for field in fields(kind)}
    entries = {} if node.value == "" and not node.quoted else node.value
    if not isinstance(entries, dict):
        raise wrong(node, name, f"keys such as {', '.join(list(hints)[:3])}")
    values = {}
    for key, child in entries.items():
        dotted = f"{name}.{key}" if name else key
        if key not in hints:
            raise unknown_key(child, dotted, list(hints), name, known)
        values[key] = bind(child, hints[key], dotted, places, known)
    try:
        return kind(**values)
    except SpecError as error:
        at = next((entries[each] for each in (error.key, *error.others) if each in entries), node)
        as_written = at is not node and isinstance(at.value, str) and not error.others
        found = f"found {at.shown()}" if as_written else error.found
        raise UserError(f"{at.place}: {name}.{error.key}: {found} (expected {error.expected})", KEYS_HINT) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key, *items = map(str, first["loc"])
        at, dotted = entries[key], f"{name}.{key}" if name else key
        for item in items:
            if isinstance(at.value, dict):
                at, dotted = at.value[item], f"{dotted}.{item}"
            elif isinstance(at.value, list):
                at = at.value[int(item)]
        raise wrong(at, dotted, expectation(first)) from None


def unknown_key(node: Node, dotted: str, siblings: list[str], section: str, names: Sequence[str]) -> UserError:
    """The error for an unknown key; suggests keys that go by its name; for a section, and if there are none, the
    most similar one.
    """
    if any(f"{name}.".startswith(f"{dotted}.") for name in names):
        hint = "write a: {b: ...} for a.b: ..."
        return UserError(f"{node.place}: {dotted}: found a key with dots (expected it nested)", hint)
    leaf = dotted.rpartition(".")[2]
    plain = leaf.lower().replace("_", "").replace("-", "")
    near = [f"{section}.{name}" if section else name for name in difflib.get_close_matches(leaf, siblings, n=1)]
    named = known_by(plain, section, names)
    found = [*dict.fromkeys(named if named and section else near + named)]
    meant = f" (did you mean {' or '.join(found[:3])}?)" if found else ""
    return UserError(
        f"{node.place}: unknown key {shorten(dotted)}{meant}",
        f"keys of {section or 'the file'}: {', '.join(siblings)}",
    )


def wrong(node: Node, name: str, expected: str) -> UserError:
    """The error for a node that is not what its key expects."""
    of_a_recipe = name.partition(".")[0] in {section.name for section in fields(Recipe)}
    return UserError(
        f"{node.place}: {name}: found {node.shown()} (expected {expected})", KEYS_HINT if of_a_recipe else ""
    )
