"""Turn YAML text into a tree of nodes that know their file, line and column.

Recipes, grids and task files need mappings, lists and scalars only; anchors, tags and merge keys are refused. A scalar
keeps its raw text: the type of its key decides what `3e-4` or `no` means, not YAML's rules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from pkmlm.errors import UserError, printable, read_errors

MAX_DEPTH = 12  # levels of nesting; recipes have five
MAX_BYTES = 1 << 16  # bytes of a recipe file
HINT = "write key: value, indented with spaces; put quotes around a text that holds : or #"


@dataclass(frozen=True)
class Node:
    """A scalar's text, a list or a mapping, and its place: file:line:column, or the override.

    Attributes:
        drops: whether it stands in place of a mapping that a base had.
    """

    value: "str | list[Node] | dict[str, Node]"
    place: str
    quoted: bool = False
    drops: bool = False

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.value in ("", "~", "null")

    def shown(self) -> str:
        """The node as error messages show it: a scalar's text, or its kind."""
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return f"a list of {len(self.value)}"
        if self.quoted:
            return f'the text "{shorten(self.value)}"'
        return shorten(self.value) if self.value else "nothing"


def shorten(text: str) -> str:
    """A text in one line, of about 60 characters at most."""
    return printable(text if len(text) <= 60 else f"{text[:57]}...")


class PlainComposer(yaml.SafeLoader):
    """PyYAML's composer without anchors, aliases, tags and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if event.anchor is not None:  # also of an alias
            raise yaml.composer.ComposerError(None, None, "anchors and aliases (& and *) are refused", event.start_mark)
        if event.tag is not None:
            raise yaml.composer.ComposerError(None, None, "tags (!) are refused", event.start_mark)
        if self.depth >= MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def yaml_text(path: Path) -> str:
    """The text of a YAML file.

    Raises:
        UserError: it cannot be read, is not a regular file, has more than `MAX_BYTES` bytes, or is not UTF-8.
    """
    with read_errors(path):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file (expected YAML)")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES:,} bytes (expected a small file of YAML)")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}:{column}: byte {error.start} is not UTF-8 (expected YAML in UTF-8)") from None


@lru_cache(maxsize=256)
def parse(text: str, file: str, *, lines: bool = True) -> Node:
    """The tree of one YAML document. It must not be changed: it is cached, as `compare` reads each run's recipe several
    times.

    Args:
        file: the file of the text.
        lines: whether places have line and column, which mean nothing in an override.

    Raises:
        UserError: the text is not one document of the YAML that recipes use; names the place.
    """

    def place(mark: yaml.Mark | None) -> str:
        return f"{file}:{mark.line + 1}:{mark.column + 1}" if mark and lines else file

    composer = None
    try:
        composer = PlainComposer(text)
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be read"
        if problem.startswith("but found"):  # the second half of a sentence
            problem = f"{error.context}, {problem}"
        raise UserError(f"{place(mark)}: {problem}", HINT) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        code = f"U+{int(error.character):04X}"
        raise UserError(f"{file}:{line}:{column}: the character {code} is not allowed in YAML") from None
    except (ValueError, OverflowError):  # PyYAML lets chr() fail on "\UFFFFFFFF"
        raise UserError(f"{place(composer.get_mark() if composer else None)}: an escape is not valid") from None
    if root is None:
        raise UserError(f"{file}: empty (expected key: value)")
    return convert(root, place)


def convert(node: yaml.Node, place: Callable[[yaml.Mark], str]) -> Node:
    """A composed YAML node as a `Node`; refuses duplicate keys and keys that are not words."""
    where = place(node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        return Node(node.value, where, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        return Node([convert(item, place) for item in node.value], where)
    entries: dict[str, Node] = {}
    for key, value in node.value:
        at = place(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{at}: a key is a mapping or a list (expected a word)")
        if key.value == "<<":
            raise UserError(f"{at}: merge keys (<<) are refused", "write the keys out")
        if key.value in entries:
            raise UserError(f"{at}: {key.value} is given twice: first at {entries[key.value].place}")
        child = convert(value, place)
        entries[key.value] = Node(child.value, at, child.quoted)
    return Node(entries, where)


def parse_override(text: str) -> Node:
    """`a.b=value` as a tree with one leaf."""
    name, equals, value = text.partition("=")
    place = f"-s {shorten(text)}"
    parts = name.strip().split(".")
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        raise UserError(f"{place}: not of the form key=value", "for example -s optim.lr=3e-3")
    value = value.strip()
    node = parse(value, place, lines=False) if value[:1] in tuple("[{'\"") else Node(value, place)
    for part in reversed(parts):
        node = Node({part: node}, place)
    return node
