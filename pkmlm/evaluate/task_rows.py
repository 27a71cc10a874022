"""The rows of a zero-shot task: what each field must hold, checked before anything is scored.

The fields are those of the data sets that the harness's own task definitions read.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pkmlm.data.text import has_surrogate, json_object, kind, shown
from pkmlm.errors import UserError, read_errors

SUITES = {"memoryformer": ("piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "logiqa")}  # its table 1
Row = dict[str, Any]


class Field(NamedTuple):
    """What a field must hold, in words and as a test; the test also sees the whole row."""

    expected: str
    holds: Callable[[Any, Row], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str) and not has_surrogate(value)


def are_texts(value: Any, count: int | None = None) -> bool:
    return isinstance(value, list) and all(map(is_text, value)) and count in (None, len(value))


def are_answers(value: Any, count: int | None = None) -> bool:
    """Strings of which none is blank and no two are the same: with two alike, no model could be right or wrong."""
    return (
        are_texts(value, count) and all(stripped := [text.strip() for text in value]) and len({*stripped}) == len(value)
    )


def are_choices(value: Any, row: Row) -> bool:
    """Whether it is what arc has: texts, and as many labels, no two the same."""
    if not isinstance(value, dict) or not value.keys() >= {"text", "label"}:
        return False
    texts, labels = value["text"], value["label"]
    return are_answers(texts) and are_texts(labels, len(texts)) and len(texts) >= 2 and len({*labels}) == len(labels)


def one_of(*values: str | int) -> Field:
    """A field that is one of some values."""
    expected = " or ".join(json.dumps(value) for value in values)
    return Field(expected, lambda found, row: any(type(found) is type(value) and found == value for value in values))


def answers(count: int) -> Field:
    """A field that is a list of `count` answers."""
    expected = f"a list of {count} strings, none blank and no two the same"
    return Field(expected, lambda found, row: are_answers(found, count))


def other_than(name: str) -> Field:
    """A field that is an answer other than that of another field."""
    expected = f"a string that is not blank and differs from {name}"
    return Field(expected, lambda found, row: are_answers([row.get(name), found]))


def names_a_choice(found: Any, row: Row) -> bool:
    return is_text(found) and are_choices(row.get("choices"), row) and found in row["choices"]["label"]


def starts_the_pronoun(found: Any, row: Row) -> bool:
    """Whether it is the place in the row's text at which its pronoun stands."""
    text, pronoun = row.get("text"), row.get("pronoun")
    known = isinstance(text, str) and isinstance(pronoun, str) and is_index(found, row)
    return known and text.startswith(pronoun, found)  # type: ignore[union-attr]


def is_index(found: Any, row: Row) -> bool:
    return type(found) is int and found >= 0


TEXT = Field("a string", lambda found, row: is_text(found))
FULL_TEXT = Field("a string that is not blank", lambda found, row: is_text(found) and bool(found.strip()))
LABEL = one_of(0, 1)
CHOICES = Field('{"text": [strings], "label": [as many]}, two or more, none blank and no two the same', are_choices)
ANSWER = Field("one of the labels of its choices", names_a_choice)
WORD = Field("the place of a word of the text", lambda found, row: is_index(found, row) and found < words(row))
ARC = {"question": FULL_TEXT, "choices": CHOICES, "answerKey": ANSWER}


def words(row: Row) -> int:
    """How many words the row's text has."""
    text = row.get("text")
    return len(text.split()) if isinstance(text, str) else 0


FIELDS: dict[str, dict[str, Field]] = {
    "piqa": {"goal": TEXT, "sol1": FULL_TEXT, "sol2": other_than("sol1"), "label": LABEL},
    "winogrande": {
        "sentence": Field("a string with one _", lambda found, row: is_text(found) and found.count("_") == 1),
        "option1": FULL_TEXT,
        "option2": other_than("option1"),
        "answer": one_of("1", "2"),
    },
    "wsc": {
        "text": FULL_TEXT,
        "span1_text": FULL_TEXT,
        "span2_text": FULL_TEXT,
        "span2_index": WORD,
        "label": LABEL,
    },
    "wsc273": {
        "text": FULL_TEXT,
        "pronoun": FULL_TEXT,
        "pronoun_loc": Field("where the pronoun begins in the text", starts_the_pronoun),
        "options": answers(2),
        "label": LABEL,
    },
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "logiqa": {
        "context": TEXT,
        "question": Field(
            "a string, and not blank where context is",
            lambda found, row: is_text(found) and bool((row["context"] + found).strip()),
        ),
        "options": answers(4),
        "label": one_of("a", "b", "c", "d"),
    },
    "openbookqa": {
        "question_stem": FULL_TEXT,
        "choices": CHOICES,
        "answerKey": ANSWER._replace(holds=lambda found, row: is_text(found) and names_a_choice(found.lstrip(), row)),
    },
    "copa": {
        "premise": Field("a sentence", lambda found, row: is_text(found) and any(map(str.isalnum, found))),
        "choice1": FULL_TEXT,
        "choice2": other_than("choice1"),
        "question": one_of("cause", "effect"),
        "label": LABEL,
    },
    "boolq": {"passage": TEXT, "question": FULL_TEXT, "label": LABEL},
    "sciq": {
        **dict.fromkeys(("question", "distractor1", "distractor2", "distractor3", "correct_answer"), FULL_TEXT),
        "support": TEXT,
    },
    "hellaswag": {
        **dict.fromkeys(("activity_label", "ctx_a", "ctx_b"), TEXT),
        "endings": Field("a list of 4 strings", lambda found, row: are_texts(found, 4)),
        "label": one_of("0", "1", "2", "3"),
    },
    "lambada_openai": {"text": Field("two words or more", lambda found, row: is_text(found) and words(row) > 1)},
    "wikitext": {"page": TEXT},
}


def read_rows(path: Path, task: str) -> list[Row]:
    """The rows of a file of JSON lines; blank lines are passed over.

    Raises:
        UserError: the file cannot be read or holds no row; a line is not a JSON object, lacks a field of the task, or
            has a field that does not hold what the task needs, or another kind of value than the lines before.
    """
    with read_errors(path):
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows: list[Row] = []
    kinds: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                rows.append(json_object(line.decode(), where))
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 ({error.reason})") from None
            check_fields(rows[-1], FIELDS.get(task) or dict.fromkeys(rows[0], None), task, where)
            check_columns(rows[-1], kinds, where)
    if not rows:
        raise UserError(f"{path} holds no rows (expected one JSON object on each line)")
    return rows


def check_fields(row: Row, fields: Mapping[str, Field | None], task: str, where: str) -> None:
    """Refuse a row that lacks a field or has one that does not hold what it should (None: anything)."""
    for name, field in fields.items():
        if name not in row:
            found = ", ".join(map(repr, list(row)[:8])) or "no fields"
            others = [other for other, needed in FIELDS.items() if needed.keys() <= row.keys()]
            hint = f"these look like rows of {' or '.join(others)}" if others else ""
            raise UserError(f"{where}: no field {name!r}, which {task} needs (found {found})", hint)
        if field is not None and not field.holds(row[name], row):
            raise UserError(f"{where}: {name} is {shown(row[name])} (expected {field.expected})")


def check_columns(row: Row, kinds: dict[str, str], where: str) -> None:
    """Refuse what no column can hold, needed or not: half a character, and another kind of value than before."""
    for name, value in row.items():
        if has_surrogate(json.dumps([name, value], ensure_ascii=False)):
            raise UserError(f"{where}: {name!a} holds half a surrogate pair (expected whole characters)")
        if value is not None and kinds.setdefault(name, kind(value)) != kind(value):
            raise UserError(f"{where}: {name} is {shown(value)} (expected {kinds[name]}, as in the lines before)")
