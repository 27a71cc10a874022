"""Lines of JSON, each an object: read strictly, and what is wrong with one said in a line."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pkmlm.data.sources import Stream
from pkmlm.data.text import bad_utf8, has_surrogate
from pkmlm.errors import UserError

LINE_LIMIT = 128 << 20  # bytes of one line, which must be read whole


def json_documents(stream: Stream, field: str) -> Iterator[tuple[str, bool]]:
    """The documents of a file of JSON lines, null as an empty one; lines of white space are skipped."""
    offset = 0
    for number, line in enumerate(lines(stream), 1):
        where = stream.source.line(number)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise bad_utf8(stream, offset + error.start, error) from None
        offset += len(line) + 1
        text = text.removeprefix("\ufeff") if number == 1 and not stream.source.start else text
        if text.strip():
            yield text_of(json_object(text, where), field, where), True


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text in an object: where a data set has none it has null."""
    if field not in row:
        keys = ", ".join(map(repr, list(row)[:8])) or "no keys"
        raise UserError(f"{where}: no key {field!r} (found {keys})", "name the key that holds the text with --field")
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {kind(text)} (expected a string or null)")
    if has_surrogate(text):
        raise UserError(f"{where}: {field!r} has a lone surrogate, which is not Unicode text")
    return text


def lines(stream: Stream) -> Iterator[bytes]:
    """The lines of a stream, without their newlines."""
    held: list[bytes] = []
    size = number = 0
    for block in stream.blocks():
        first, *others = block.split(b"\n")
        held.append(first)
        size += len(first)
        if size > LINE_LIMIT:
            raise UserError(
                f"{stream.source.line(number + 1)}: line over {LINE_LIMIT:,} bytes",
                "cut the document into several",
            )
        for line in others:
            yield b"".join(held)
            number += 1
            held, size = [line], len(line)
    yield b"".join(held)


def json_object(line: str, where: str) -> dict[str, Any]:
    """The object in a line of JSON.

    Args:
        where: what errors call the line.

    Raises:
        UserError: it is not JSON or no object, or an object in it has a key twice: nobody knows which value is meant.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((key, times),) = Counter(key for key, _ in pairs).most_common(1)
            raise UserError(f"{where}: the key {key[:40]!r} stands there {times} times (expected once)")
        return found

    try:
        value = json.loads(line, object_pairs_hook=members)
    except json.JSONDecodeError as error:
        rest = line[error.pos : error.pos + 60].strip()
        found = shown(rest) if rest else "the end of the line"
        raise UserError(f"{where}: not valid JSON from character {error.pos + 1} on: found {found}") from None
    except RecursionError:
        raise UserError(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError:  # Python's int() refuses more than 4,300 digits
        raise UserError(f"{where}: a number of too many digits") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: found {kind(value)} (expected an object)")
    return value


def kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value as it stands in the file, cut short."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
