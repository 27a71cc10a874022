"""A tree of YAML as values of stated types: dataclasses, mappings, lists and scalars."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pkmlm.errors import UserError
from pkmlm.recipe.nodes import Node, shorten
from pkmlm.recipe.schema import Recipe, leaves

WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")


def bind(node: Node, kind: Any, name: str, places: dict[str, str]) -> Any:
    """The value of type `kind` that a node stands for.

    Args:
        name: the dotted key that it is for; "" where `kind` is a whole recipe or grid.
        places: gets the place where each key was given, and each item of a list, as `key.0`.

    Raises:
        UserError: the node is none; names its place and the dotted key.
    """
    return Binder(kind, places).value(node, kind, name)


class Binder:
    """What binds the nodes of one tree, which is of type `root`; `places` as in `bind`."""

    def __init__(self, root: Any, places: dict[str, str]):
        self.root, self.places = root, places

    def value(self, node: Node, kind: Any, name: str) -> Any:
        if name:
            self.places[name] = node.place
        if kind is Node:
            return node
        if is_dataclass(kind):
            return self.section(node, kind, name)
        if get_origin(kind) is dict:
            return self.mapping(node, get_args(kind)[1], name)
        if get_origin(kind) in (Union, UnionType):
            (inner,) = (option for option in get_args(kind) if option is not NoneType)
            return None if node.is_null else self.value(node, inner, name)
        if get_origin(kind) is tuple:
            return self.items(node, get_args(kind), name)
        if not isinstance(node.value, str):
            raise wrong(node, name, described(kind))
        return scalar(node, node.value, kind, name)

    def section(self, node: Node, kind: Any, name: str) -> Any:
        """A dataclass from a mapping of its keys."""
        hints = get_type_hints(kind)
        entries = {} if node.value == "" and not node.quoted else node.value
        if not isinstance(entries, dict):
            raise wrong(node, name, f"keys such as {', '.join(list(hints)[:3])}")
        values = {}
        for key, child in entries.items():
            dotted = f"{name}.{key}" if name else key
            if key not in hints:
                raise self.unknown(child, dotted, list(hints), name)
            values[key] = self.value(child, hints[key], dotted)
        return kind(**values)

    def mapping(self, node: Node, kind: Any, name: str) -> dict[str, Any]:
        """Names, each with a value of one type."""
        if not isinstance(node.value, dict):
            raise wrong(node, name, "a mapping")
        return {key: self.value(child, kind, f"{name}.{key}") for key, child in node.value.items()}

    def items(self, node: Node, kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        """A tuple of one type and any length (one value alone will do), or of stated types."""
        items = node.value if isinstance(node.value, list) else [node]
        if kinds[-1] is Ellipsis:
            if (isinstance(node.value, dict) and not is_dataclass(kinds[0])) or node.is_null:
                raise wrong(node, name, "a list")
            kinds = (kinds[0],) * len(items)
        elif not isinstance(node.value, list) or len(items) != len(kinds):
            raise wrong(node, name, f"a list of {len(kinds)}")
        values = tuple(self.value(item, kind, name) for item, kind in zip(items, kinds, strict=True))
        self.places[name] = node.place  # of the list, not of its last item
        self.places |= {f"{name}.{number}": item.place for number, item in enumerate(items)}
        return values

    def unknown(self, node: Node, dotted: str, siblings: list[str], section: str) -> UserError:
        """The error for a key that is not there: with the key of that name elsewhere, or the nearest one."""
        names = [name for name, _, _ in leaves(self.root)]
        if any(f"{name}.".startswith(f"{dotted}.") for name in names):
            return self.flat(node, dotted, section)
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
            f"{node.place}: unknown key {shorten(dotted)}{meant}",
            f"keys of {section or 'a ' + self.root.__name__.lower()}: {', '.join(siblings)}",
        )

    def flat(self, node: Node, dotted: str, section: str) -> UserError:
        """The error for a key that has dots, as -s takes it, where a file nests sections."""
        plain = isinstance(node.value, str) and not node.quoted
        value = nested = (plain and shorten(str(node.value))) or "..."
        for part in reversed(dotted.removeprefix(f"{section}.").split(".")):
            nested = f"{{{part}: {nested}}}"
        other = f", or give -s {dotted}={value} on the command line" * (self.root is Recipe)
        message = f"{node.place}: {dotted}: found a key with dots (expected it nested)"
        return UserError(message, f"write {nested[1:-1]}{other}")


def scalar(node: Node, text: str, kind: Any, name: str) -> Any:
    """A whole number, a finite number, true or false, a text, or one of several choices."""
    if get_origin(kind) is Literal:
        return choice(node, text, get_args(kind), name)
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


def choice(node: Node, text: str, choices: tuple[str, ...], name: str) -> str:
    """One of some words."""
    if text in choices:
        return text
    near = difflib.get_close_matches(text.lower().replace("_", "-"), choices, n=1)
    raise wrong(node, name, alternatives(choices), f"did you mean {near[0]}?" if near else "")


def wrong(node: Node, name: str, expected: str, hint: str = "") -> UserError:
    return UserError(f"{node.place}: {name}: found {node.shown()} (expected {expected})", hint)


def described(kind: Any) -> str:
    """A type in words."""
    if get_origin(kind) is Literal:
        return alternatives(get_args(kind))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def alternatives(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
