"""The rows of a zero-shot task, from a file of JSON lines (`--task-data`).

They are put through all of the task's functions before a model is loaded, so that a bad row is reported with its file
and line.
"""

import contextlib
import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from jinja2 import Environment, TemplateError, meta
from lm_eval.api.task import ConfigurableTask

from pkmlm.data.text import json_object
from pkmlm.errors import UserError, read_errors
from pkmlm.evaluate.task_file import LOCAL
from pkmlm.files import read_bytes

LABELS = {"copa": (0, 1)}  # of stock tasks whose function treats any other label as the last

SCRIPTS = ("EleutherAI/logiqa",)  # data sets on the hub that `datasets` 4 and newer do not run

Json = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """A file of rows.

    Attributes:
        lines: the number of each row's line.
    """

    file: Path
    sha256: str
    rows: list[Json]
    lines: list[int]


def how_to_write(config: Json, file: Path) -> str:
    """A hint on how to write the rows of a task: a shell command for each row, or Python that fetches them all."""
    if config.get("dataset_path") in SCRIPTS:
        return f"write it for --task-data {file.parent}; `pkmlm help evaluation` lists its fields"
    if config.get("dataset_path") not in (None, *LOCAL):
        names = [config.get("dataset_path"), config.get("dataset_name")]
        split = config.get("test_split") or config.get("validation_split")
        source = ", ".join(json.dumps(name) for name in names if name) + f", split={json.dumps(split)}"
        fetch = f"load_dataset({source}).to_json({json.dumps(str(file))}, force_ascii=False)"
        where = f"on a machine with network access, write it for --task-data {file.parent}"
        return f"{where}: from datasets import load_dataset; {fetch}"
    fields: list[str] = []
    for text in (config.get(key) for key in ("doc_to_text", "doc_to_choice", "doc_to_target")):
        if isinstance(text, str) and text.isidentifier():
            fields.append(text)
        elif isinstance(text, str):
            with contextlib.suppress(TemplateError):
                fields += sorted(meta.find_undeclared_variables(Environment().parse(text)))
    row = json.dumps(dict.fromkeys(fields, "..."))
    where = f"write it for --task-data {file.parent}, one row per line, with values of your own"
    return f"{where}: echo {shlex.quote(row)} >> {shlex.quote(str(file))}"


def read_rows(file: Path) -> Rows:
    """The rows of a file of JSON lines; blank lines are skipped, and a missing field is null.

    Raises:
        UserError: the file cannot be read or holds no row; a line is not a JSON object; a field is of another type than
            in the lines before.
    """
    with read_errors(file):
        data = read_bytes(file)
    content = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows: list[Json] = []
    lines = [number for number, line in enumerate(content, 1) if line.strip()]
    for number in lines:
        where = f"{file}:{number}"
        try:
            rows.append(json_object(content[number - 1].decode(), where))
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason})") from None
    if not rows:
        raise UserError(f"{file} holds no rows (expected one JSON object on each line)")
    if not any(rows):
        raise UserError(f"{file}:{lines[0]}: no row has a field")
    try:
        data_set(rows)
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's among them
        count, found = first_failure(lambda count: data_set(rows, count), len(rows), error)
        what = "its fields have other types than in the rows before it" if count > 1 else "a field cannot be read"
        raise UserError(f"{file}:{lines[count - 1]}: {what}: {one_line(found)}") from None
    return Rows(file, hashlib.sha256(data).hexdigest(), rows, lines)


def data_set(rows: Sequence[Json], count: int | None = None) -> datasets.Dataset:
    """The first `count` rows (None: all) as a data set with the fields of all rows; `from_list` alone would take only
    those of the first row.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in rows[:count]])


def first_failure(attempt: Callable[[int], object], most: int, error: Exception) -> tuple[int, Exception]:
    """The smallest n for which attempt(n) fails, and its error. It must fail for every larger n up to `most`, too."""
    works = 0
    while most - works > 1:
        middle = (works + most) // 2
        try:
            attempt(middle)
            works = middle
        except Exception as found:
            most, error = middle, found
    return most, error


def bad_row(name: str, own: Path | None, rows: Rows, count: int, error: Exception) -> UserError:
    """The error for row number `count` of a file, which the task cannot use."""
    where, why = f"{rows.file}:{rows.lines[count - 1]}", one_line(error)
    if own is not None:
        return UserError(f"{own} cannot be used with {where}: {why}")
    fields = ", ".join(rows.rows[count - 1]) or "none"
    return UserError(f"{where}: {name} cannot use this row: {why} (its fields: {fields[:200]})")


def check_examples(name: str, config: Json, from_file: bool, folder: Path | None) -> None:
    """Refuse few-shot examples from a split that is empty, or from the questions themselves: lm-eval leaves out the
    question that is asked, with its answer, only if the definition names the test split for the examples.

    Args:
        from_file: the rows come from a file, which becomes the scored split; all other splits are empty.
    """
    given = config.get("fewshot_config") or {}
    named = given.get("split") or config.get("fewshot_split")
    if given.get("samples") and named is None:
        return
    training, validation, test = (config.get(f"{split}_split") for split in ("training", "validation", "test"))
    scored = test or validation
    place = f"{folder or 'DIR'}/{name}"
    files = f"{place}.train.jsonl" if from_file else f"{place}.train.jsonl beside all rows in {place}.jsonl"
    hint = f"give examples, one JSON object per line, in {files} (--task-data), or ask for none: --num-fewshot 0"
    if (named or training or validation or test) == scored:
        if named is None or named != test:
            raise UserError(f"--num-fewshot: no examples for {name} but its own questions", hint)
    elif from_file:
        raise UserError(f"--num-fewshot: no examples for {name}", hint)


def check_rows(name: str, own: Path | None, task: ConfigurableTask, rows: Rows | None, examples: Rows | None) -> None:
    """Put each row through the task's functions, and made-up scores through its metrics.

    Raises:
        UserError: for a row, or for all rows together, these fail or return what cannot be scored.
    """
    values: dict[str, list[Any]] = defaultdict(list)
    checks = [(rows, task.eval_docs, task.config.num_fewshot or 0)]
    if examples is not None:
        checks.append((examples, task.fewshot_docs(), 0))
    for source, documents, shots in checks:
        for place, document in enumerate(documents):
            try:
                metrics = check_document(task, document, shots, stock=own is None)
            except Exception as error:
                if source is not None and len(documents) == len(source.rows):
                    raise bad_row(name, own, source, place + 1, error) from None
                which = f"document {place + 1} of {source.file if source else 'its data'}"
                raise UserError(f"{own or name} cannot be used with {which}: {one_line(error)}") from None
            for metric, value in metrics.items():
                values[metric].append(value)
    try:
        for metric, found in values.items():
            task.aggregation()[metric](found)
    except Exception as error:
        raise UserError(f"--tasks: {own or name}: lm-eval cannot aggregate {metric}: {one_line(error)}") from None


def check_document(task: ConfigurableTask, document: Json, shots: int, stock: bool) -> Json:
    """Call every function of a task that scoring a document needs; return the metrics of made-up scores.

    Args:
        shots: few-shot examples before the question.
        stock: the definition is lm-eval's own; its functions may take a null for something else.

    Raises:
        Exception: whatever the task's functions raise; ValueError: what they return cannot be scored.
    """

    def requests(document: Json, shots: int) -> list[Any]:
        context = task.fewshot_context(document, shots, gen_prefix=task.doc_to_prefix(document))
        found = task.construct_requests(document, context, metadata=(task.task_name, 0, 1))
        return found if isinstance(found, list) else [found]

    text = task.config.doc_to_text
    if isinstance(text, str) and text.isidentifier() and text not in document:
        raise ValueError(f"no field {text!r}")  # lm-eval would use the name itself as the question
    question = task.doc_to_text(document)
    if not task.multiple_input and not isinstance(question, str):
        raise ValueError(f"the question is {str(question)[:60]!r} (expected a text)")
    asked = requests(document, shots)
    texts = [text for request in asked for text in request.args]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise ValueError(f"{str(wrong[0])[:60]!r} is not a text")
    if None in document.values() and (stock or any("None" in text for text in texts)):
        # A template prints null as the word None; without the field, it fails.
        requests({key: value for key, value in document.items() if value is not None}, 0)
    if task.OUTPUT_TYPE == "multiple_choice":
        if stock and task.task_name in LABELS and document["label"] not in LABELS[task.task_name]:
            raise ValueError(f"the label is {document['label']!r} (expected one of {LABELS[task.task_name]})")
        choices = task.doc_to_choice(document)
        if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise ValueError(f"the choices are {str(choices)[:200]} (expected two or more texts, none blank)")
        right = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        for answer in right if isinstance(right, list) else [right]:
            if answer not in choices and not (isinstance(answer, int) and 0 <= answer < len(choices)):
                raise ValueError(f"the answer is {answer!r} (expected one of {len(choices)} choices)")
            answer = answer if isinstance(answer, str) else choices[answer]
            if [choice.strip() for choice in choices].count(answer.strip()) > 1:
                raise ValueError(f"the answer {answer.strip()!r} is among the choices twice")
    score = -1.0 if task.OUTPUT_TYPE == "loglikelihood_rolling" else (-1.0, False)
    metrics: Json = task.process_results(document, [score] * len(asked))
    return metrics


def one_line(error: Exception) -> str:
    """The first line of an error's message, with its class, without which it often makes no sense."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if type(error) is ValueError else f"{type(error).__name__}: {line}"
