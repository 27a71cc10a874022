"""A recipe from its file: YAML, inheritance (`base:`) and overrides (`-s key=value`) into dataclasses.

Every error names the file, line and column (or the override) and the dotted key.
"""

import difflib
import math
import os
import re
import types
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pkmlm.errors import UserError
from pkmlm.recipe.check import check_recipe
from pkmlm.recipe.nodes import LARGEST, Node, decoded, parse, shorten
from pkmlm.recipe.schema import Recipe

WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*|[0-9]+\+|auto:[0-9]+\+?", re.ASCII)
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # for other YAML readers' sake


class Key(NamedTuple):
    """One key of a recipe, as `pkmlm recipe keys` lists it."""

    name: str
    type: str
    default: str
    help: str


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


def read_tree(path: Path, inheritors: tuple[Path, ...], asked_at: str = "") -> Node:
    """The tree of a file on top of its base's."""
    prefix = f"{asked_at}: base: " if asked_at else ""
    try:
        whole = path.resolve()
        if path.exists() and not path.is_file():
            raise UserError(f"{prefix}{path} is not a file (expected a recipe)")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise UserError(f"{prefix}no such recipe: {path}", near_files(path)) from None
    except (OSError, ValueError, RuntimeError) as error:  # pathlib: RuntimeError for a circle of links
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
    above = path.parent / base.value
    return merge(read_tree(Path(os.path.normpath(above)), (*inheritors, whole), base.place), own)


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


def bind(node: Node, kind: Any, name: str, places: dict[str, str]) -> Any:
    """The value of type `kind` that a node stands for; `places` collects where each key was given."""
    if name:
        places[name] = node.place
    if kind is Node:
        return node
    if is_dataclass(kind):
        return bind_section(node, kind, name, places)
    if get_origin(kind) is dict:
        return bind_mapping(node, get_args(kind)[1], name, places)
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (option for option in get_args(kind) if option is not type(None))
        return None if node.is_null else bind(node, inner, name, places)
    if get_origin(kind) is tuple:
        return bind_list(node, get_args(kind), name, places)
    if not isinstance(node.value, str):
        raise wrong(node, name, described(kind))
    return bind_scalar(node, node.value, kind, name)


def bind_section(node: Node, kind: Any, name: str, places: dict[str, str]) -> Any:
    """A dataclass of the schema from a mapping of its keys."""
    hints = get_type_hints(kind)
    entries = {} if node.value == "" and not node.quoted else node.value
    if not isinstance(entries, dict):
        raise wrong(node, name, f"keys such as {', '.join(list(hints)[:3])}")
    values = {}
    for key, child in entries.items():
        dotted = f"{name}.{key}" if name else key
        if key not in hints:
            raise unknown(child.place, dotted, list(hints), name)
        values[key] = bind(child, hints[key], dotted, places)
    return kind(**values)


def bind_mapping(node: Node, kind: Any, name: str, places: dict[str, str]) -> dict[str, Any]:
    """Names, each with a value of one type."""
    if not isinstance(node.value, dict):
        raise wrong(node, name, "a mapping")
    return {key: bind(child, kind, f"{name}.{key}", places) for key, child in node.value.items()}


def bind_list(node: Node, kinds: tuple[Any, ...], name: str, places: dict[str, str]) -> tuple[Any, ...]:
    """A tuple of one type and any length (one value alone will do), or of stated types."""
    items = node.value if isinstance(node.value, list) else [node]
    if kinds[-1] is Ellipsis:
        if (isinstance(node.value, dict) and not is_dataclass(kinds[0])) or node.is_null:
            raise wrong(node, name, "a list")
        kinds = (kinds[0],) * len(items)
    elif not isinstance(node.value, list) or len(items) != len(kinds):
        raise wrong(node, name, f"a list of {len(kinds)}")
    values = []
    for item, kind in zip(items, kinds, strict=True):
        values.append(bind(item, kind, name, places))
    places[name] = node.place
    return tuple(values)


def bind_scalar(node: Node, text: str, kind: Any, name: str) -> Any:
    """A whole number, a finite number, true or false, a text, or one of several choices."""
    if get_origin(kind) is Literal:
        return bind_choice(node, text, get_args(kind), name)
    if kind is str:
        if node.is_null:
            raise wrong(node, name, 'text; the word itself is written "null"' if text == "null" else "text")
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError(
                f"{node.place}: {name}: the text holds a character that no file can hold (NUL or a surrogate)"
            )
        return text
    if kind is bool:
        if node.quoted or text not in ("true", "false"):
            raise wrong(node, name, described(bool))
        return text == "true"
    if node.quoted or not (WHOLE if kind is int else NUMBER).fullmatch(text):
        raise wrong(node, name, described(kind))
    if len(text) > 40:
        raise wrong(node, name, "a number of fewer digits")
    number = kind(text)
    if not math.isfinite(number):
        raise wrong(node, name, "a number that is not beyond 64-bit floating point")
    return number


def bind_choice(node: Node, text: str, choices: tuple[str, ...], name: str) -> str:
    """One of some words."""
    if text in choices:
        return text
    near = difflib.get_close_matches(text.lower().replace("_", "-"), choices, n=1)
    raise wrong(node, name, alternatives(list(choices)), f"did you mean {near[0]}?" if near else "")


def wrong(node: Node, name: str, expected: str, hint: str = "") -> UserError:
    return UserError(f"{node.place}: {name}: found {node.shown()} (expected {expected})", hint)


def described(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return alternatives(list(get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def alternatives(words: list[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def unknown(place: str, dotted: str, siblings: list[str], section: str) -> UserError:
    """The error for a key that is not there: with the key of that name elsewhere, or the nearest one."""
    names = [key.name for key in keys()]
    leaf = dotted.rpartition(".")[2]
    plain = leaf.lower().replace("_", "").replace("-", "")
    found = [name for name in names if name.rpartition(".")[2].replace("_", "") == plain]
    if not found:
        near = difflib.get_close_matches(leaf, siblings, n=1)
        found = [f"{section}.{near[0]}" if section else near[0]] if near else []
    if not found:
        near = difflib.get_close_matches(leaf, [name.rpartition(".")[2] for name in names], 1, 0.8)
        found = [name for name in names if near and name.rpartition(".")[2] == near[0]]
    meant = f" (did you mean {' or '.join(found[:3])}?)" if found else ""
    return UserError(
        f"{place}: unknown key {shorten(dotted)}{meant}",
        f"keys {f'of {section}' if section else 'of a recipe'}: {', '.join(siblings)}",
    )


def keys() -> list[Key]:
    """Every key of a recipe with its type, default and help, in the order of the schema."""

    def walk(kind: Any, prefix: str) -> Iterable[Key]:
        hints = get_type_hints(kind)
        for field in fields(kind):
            if is_dataclass(hints[field.name]):
                yield from walk(hints[field.name], f"{prefix}{field.name}.")
            else:
                assert field.default is not MISSING
                name = f"{prefix}{field.name}"
                yield Key(name, type_text(hints[field.name]), scalar_text(field.default), field.metadata["help"])

    return list(walk(Recipe, ""))


def type_text(kind: Any) -> str:
    """A type as a short text: `int`, `float or null`, `none | product-key`, `list of str`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if option is type(None) else type_text(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        return (
            f"list of {type_text(inner[0])}"
            if inner[-1] is Ellipsis
            else f"list of {len(inner)} {type_text(inner[0])}s"
        )
    if get_origin(kind) is Literal:
        return " | ".join(scalar_text(choice) for choice in get_args(kind))
    return {int: "int", float: "float", bool: "bool", str: "text"}[kind]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every dotted key and its value."""

    def walk(section: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        for field in fields(section):
            value = getattr(section, field.name)
            if is_dataclass(value):
                yield from walk(value, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}", value

    return dict(walk(recipe, ""))


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML; reading it back gives an equal recipe."""

    def walk(section: Any, indent: str) -> Iterable[str]:
        for field in fields(section):
            value = getattr(section, field.name)
            if is_dataclass(value):
                yield f"{indent}{field.name}:"
                yield from walk(value, indent + "  ")
            else:
                yield f"{indent}{field.name}: {scalar_text(value)}"

    return "\n".join(walk(recipe, "")) + "\n"


def scalar_text(value: Any) -> str:
    """A value as YAML: numbers in their shortest exact form, texts quoted where YAML could misread them."""
    if isinstance(value, tuple):
        items = [str(item) if str(item).isdecimal() else scalar_text(item) for item in value]  # layers: [5]
        return f"[{', '.join(items)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))  # other YAML readers take 1e-08 for a text
    if PLAIN_TEXT.fullmatch(value) and value.lower() not in NOT_TEXT:
        return str(value)
    return '"' + "".join(escaped(c) for c in value) + '"'


def escaped(c: str) -> str:
    """A character as a double-quoted string of YAML has it."""
    if c in '"\\':
        return f"\\{c}"
    if c.isprintable():
        return c
    return f"\\x{ord(c):02x}" if c < "\x80" else f"\\U{ord(c):08x}"
