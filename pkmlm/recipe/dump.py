"""A recipe as text: YAML that reads back equal, its values by dotted key, and the list of all keys."""

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pkmlm.recipe.schema import Recipe, leaves

PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*|[0-9]+\+|auto:[0-9]+\+?", re.ASCII)
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # to other YAML readers


class Key(NamedTuple):
    """One key of a recipe, as `pkmlm recipe keys` lists it."""

    name: str
    type: str
    default: str
    help: str


def list_keys() -> list[Key]:
    """Every key of a recipe with its type, default and help, in the order of the schema."""
    return [
        Key(name, type_text(kind), scalar_text(field.default), field.description or "")
        for name, field, kind in leaves(Recipe)
    ]


def type_text(kind: Any) -> str:
    """A type as a short text: `int`, `float or null`, `none | product-key`, `list of str`."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("null" if option is NoneType else type_text(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return f"list of {type_text(first)}" if rest == [...] else f"list of {1 + len(rest)} {type_text(first)}s"
    if get_origin(kind) is Literal:
        return " | ".join(scalar_text(choice) for choice in get_args(kind))
    return {int: "int", float: "float", bool: "bool", str: "text"}[kind]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every dotted key and its value."""
    return {name: attrgetter(name)(recipe) for name, _, _ in leaves(Recipe)}


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
    return quoted_text(value)


def quoted_text(text: str) -> str:
    """A text as a double-quoted scalar of YAML."""

    def escaped(c: str) -> str:
        if c in '"\\':
            return f"\\{c}"
        if c.isprintable():
            return c
        return f"\\x{ord(c):02x}" if c < "\x80" else f"\\U{ord(c):08x}"

    return '"' + "".join(map(escaped, text)) + '"'
