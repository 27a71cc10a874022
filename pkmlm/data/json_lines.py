"""Lines of JSON, each an object: read strictly, and what is wrong with one said in a line."""

import json
from collections import Counter
from typing import Any

from pkmlm.errors import UserError


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
