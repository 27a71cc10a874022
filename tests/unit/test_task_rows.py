"""Rows of zero-shot tasks: good ones pass, and each kind of bad one is told with file, line and field."""

import json
from pathlib import Path

import pytest

from pkmlm.errors import UserError
from pkmlm.evaluate.task_rows import FIELDS, read_rows
from tests.task_rows import ROWS


@pytest.mark.parametrize("task", ROWS)
def test_good_rows_pass(task, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(map(json.dumps, ROWS[task])).encode() + b"\r\n")
    assert read_rows(path, task) == ROWS[task]


def test_every_field_is_needed(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert FIELDS.keys() == ROWS.keys()
    for task, fields in FIELDS.items():
        for field in fields:
            row = {key: value for key, value in ROWS[task][0].items() if key != field}
            path.write_text(json.dumps(row))
            with pytest.raises(UserError, match=f"rows.jsonl:1: no field '{field}', which {task} needs"):
                read_rows(path, task)


CHOICES = {"text": ["a", "b"], "label": ["A", "B"]}
BAD = [  # task, what is changed in its first row, what is said of it
    ("piqa", {"label": "0"}, 'label is "0" (expected 0 or 1)'),
    ("piqa", {"label": 2}, "label is 2 (expected 0 or 1)"),
    ("piqa", {"label": -1}, "label is -1"),
    ("piqa", {"label": True}, "label is true"),
    ("piqa", {"label": 1.0}, "label is 1.0"),
    ("piqa", {"label": None}, "label is null"),
    ("piqa", {"sol1": " "}, 'sol1 is " " (expected a string that is not blank)'),
    ("piqa", {"sol2": ["b"]}, 'sol2 is ["b"]'),
    ("piqa", {"goal": 7}, "goal is 7 (expected a string)"),
    ("piqa", {"goal": "\ud800"}, "goal is"),
    ("winogrande", {"sentence": "No gap here."}, "expected a string with one _"),
    ("winogrande", {"sentence": "Two _ gaps _ here."}, "expected a string with one _"),
    ("winogrande", {"answer": 1}, 'answer is 1 (expected "1" or "2")'),
    ("winogrande", {"answer": "3"}, 'answer is "3"'),
    ("wsc", {"span2_index": 99}, "span2_index is 99 (expected the place of a word of the text)"),
    ("wsc", {"span2_index": "6"}, 'span2_index is "6"'),
    ("wsc", {"label": "yes"}, 'label is "yes"'),
    ("wsc273", {"pronoun_loc": 44}, "pronoun_loc is 44 (expected where the pronoun begins in the text)"),
    ("wsc273", {"options": ["The box"]}, "options is"),
    ("wsc273", {"options": "The box"}, "options is"),
    ("arc_easy", {"answerKey": "E"}, 'answerKey is "E" (expected one of the labels of its choices)'),
    ("arc_easy", {"answerKey": 0}, "answerKey is 0"),
    ("arc_easy", {"answerKey": "A "}, 'answerKey is "A "'),
    ("openbookqa", {"answerKey": "A "}, 'answerKey is "A "'),
    ("arc_easy", {"choices": ["a", "b"]}, "choices is"),
    ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A"]}}, "choices is"),
    ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "choices is"),
    ("arc_challenge", {"choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}, "choices is"),
    ("arc_challenge", {"question": ""}, "question is"),
    ("logiqa", {"label": "e"}, 'label is "e" (expected "a" or "b" or "c" or "d")'),
    ("logiqa", {"options": ["a", "b", "c"]}, "expected a list of 4 strings"),
    ("logiqa", {"options": ["a", "b", "c", None]}, "expected a list of 4 strings"),
    ("openbookqa", {"choices": CHOICES, "answerKey": "C"}, 'answerKey is "C"'),
    ("copa", {"question": "why"}, 'question is "why" (expected "cause" or "effect")'),
    ("hellaswag", {"label": ""}, "label is"),
    (
        "piqa",
        {"sol1": "same", "sol2": " same"},
        'sol2 is " same" (expected a string that is not blank and differs from',
    ),
    ("winogrande", {"option1": "it", "option2": "it"}, 'option2 is "it"'),
    ("copa", {"choice1": "Same.", "choice2": "Same."}, 'choice2 is "Same."'),
    ("copa", {"premise": " . "}, 'premise is " . " (expected a sentence)'),
    ("wsc273", {"options": ["The box", "The box"]}, "options is"),
    ("wsc273", {"options": ["The box", " "]}, "options is"),
    ("logiqa", {"options": ["a", "b", "c", " "]}, "none blank and no two the same"),
    ("logiqa", {"options": ["a", "b", "c", "a"]}, "none blank and no two the same"),
    ("logiqa", {"context": " ", "question": ""}, 'question is "" (expected a string, and not blank where context is)'),
    ("arc_easy", {"choices": {"text": ["a", ""], "label": ["A", "B"]}}, "none blank and no two the same"),
    ("openbookqa", {"choices": {"text": ["a", "a"], "label": ["A", "B"]}}, "none blank and no two the same"),
    ("piqa", {"unused": {"deep": ["\udc00"]}}, "'unused' holds half a surrogate pair"),
    ("lambada_openai", {"text": "alone"}, "expected two words or more"),
]


@pytest.mark.parametrize(("task", "change", "said"), BAD)
def test_a_bad_row_is_told_with_its_line(task, change, said, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[task][0])
    path.write_text(f"{good}\n\n{json.dumps({**ROWS[task][0], **change})}\n{good}\n")
    with pytest.raises(UserError) as error:
        read_rows(path, task)
    assert error.value.message.startswith(f"{path}:3: ")
    assert said in error.value.message
    assert "\n" not in error.value.message
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"goal": "a"', ":1: not valid JSON from character 13 on: found the end of the line"),
        (b'{"goal": "a"}}', ':1: not valid JSON from character 14 on: found "}"'),
        (b'{"label": 0, "label": 1}', ":1: the key 'label' stands there 2 times (expected once)"),
        (b'{"deep": [{"a": 1, "a": 1}]}', ":1: the key 'a' stands there 2 times"),
        (b"\n[1, 2]", ":2: found a list (expected an object)"),
        (b"3", ":1: found a number"),
        (b"\xff", ":1: not UTF-8"),
        (b"[" * 100_000, ":1: not valid JSON"),
        (b"{}", ":1: no field 'goal', which piqa needs (found no fields)"),
        (b"", " holds no rows"),
        (b"\n \n", " holds no rows"),
    ],
)
def test_a_broken_file_is_told(content, said, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_rows(path, "piqa")
    assert error.value.message.startswith(f"{path}{said}")
    assert "\n" not in error.value.message
    assert "line 1" not in error.value.message  # of Python's json, which knows one line only


def test_the_rows_of_another_task_are_known(tmp_path):
    path = tmp_path / "piqa.jsonl"
    path.write_text(json.dumps(ROWS["copa"][0]))
    with pytest.raises(UserError) as error:
        read_rows(path, "piqa")
    assert error.value.hint == "these look like rows of copa"


def test_a_file_that_is_none(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read"):
        read_rows(tmp_path, "piqa")


def test_a_column_holds_one_kind(tmp_path):
    path = tmp_path / "piqa.jsonl"
    rows = [{**ROWS["piqa"][0], "id": place} for place in (1, None, "3")]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r':3: id is "3" \(expected a number, as in the lines before\)'):
        read_rows(path, "piqa")


def test_rows_of_an_unknown_task_are_alike(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"a": 1, "b": 2}\n{"a": 1}\n')
    with pytest.raises(UserError, match=":2: no field 'b', which mine needs"):
        read_rows(path, "mine")
