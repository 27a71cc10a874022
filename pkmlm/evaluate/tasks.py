"""Load zero-shot tasks: definitions that lm-evaluation-harness ships or a user wrote, with rows from a file of JSON
lines (`--task-data`) or, for its own tasks, from the hub.

lm-eval builds the tasks. Before a model is loaded, each row of a file is put through the task's functions, so that one
that does not fit is reported with its line.
"""

import contextlib
import difflib
import functools
import hashlib
import io
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import lm_eval.utils
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from pkmlm.data.text import json_object
from pkmlm.errors import UserError, read_errors
from pkmlm.evaluate.task_file import SUITES, read_task_file
from pkmlm.files import read_bytes

KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
FEWSHOT_SEED = 1234  # lm-eval's own
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
    data: datasets.Dataset
    lines: list[int]


@dataclass(frozen=True)
class ZeroShotTask:
    """A task that is ready to be scored.

    Attributes:
        rows: those of a file; None: they come from the hub.
        own: the user's file that defines it; None: it ships with lm-eval.
    """

    name: str
    task: ConfigurableTask
    rows: Rows | None
    own: Path | None


def load_tasks(names: str, folder: Path | None, num_fewshot: int | None) -> list[ZeroShotTask]:
    """The tasks of a list such as "piqa,wsc,mine.yaml", each once, with their rows; no model is needed.

    Args:
        folder: where TASK.jsonl holds the rows of TASK, and TASK.train.jsonl its few-shot examples.
        num_fewshot: examples before each question; None: as many as the definition says.

    Raises:
        UserError: no such task or file; a task not scored by log-likelihoods; rows that cannot be read or used.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    asked = list(dict.fromkeys(each for name in asked for each in SUITES.get(name, (name,))))
    if not asked:
        raise UserError("--tasks names no task", "for example --tasks piqa,wsc or --tasks memoryformer")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-data {folder} is not a folder (expected one with TASK.jsonl in it)")
    found: dict[str, ZeroShotTask] = {}
    with contained():
        files = {name: Path(name) for name in asked if name.endswith((".yaml", ".yml"))}
        manager = task_manager([name for name in asked if name not in files])
        for name in asked:
            own = files.get(name)
            config = stock_config(name, manager) if own is None else read_task_file(own)
            if num_fewshot is not None:
                config = {**config, "num_fewshot": num_fewshot}
            task = load_task(config, own, manager, folder)
            if task.name in found:
                raise UserError(f"--tasks has two tasks named {task.name!r}", "rename your own")
            found[task.name] = task
    return list(found.values())


def task_manager(names: Sequence[str]) -> TaskManager:
    """lm-eval's index of its tasks: of the folders where these tasks should be or, if one is not found there, of all
    13,000 tasks, which takes ten seconds.
    """
    root = Path(lm_eval.tasks.__file__).parent
    inside = [name for name in names if "/" not in name]  # a path may lead to a folder of somebody else's
    folders = sorted({root / part for name in inside for part in (name, name.split("_")[0], "super_glue")})
    manager = TaskManager(include_path=[path for path in folders if path.is_dir()], include_defaults=False)
    return manager if set(names) <= set(manager.all_tasks) else TaskManager()


def stock_config(name: str, manager: TaskManager) -> Json:
    """The definition of one of lm-eval's own tasks, with the names of its functions."""
    if name in (*manager.all_groups, *manager.all_tags):
        raise UserError(f"--tasks: {name!r} is a group of tasks", "give the names of its tasks")
    if name not in manager.all_subtasks:
        near = difflib.get_close_matches(name, [*SUITES, *manager.all_subtasks])
        hint = f"did you mean {', '.join(near)}?" if near else "for example memoryformer, piqa, arc_easy or hellaswag"
        raise UserError(f"--tasks: lm-eval has no task {name!r}", hint)
    config = manager.task_index[name].cfg
    if config is None or "class" in config:
        raise UserError(f"--tasks: {name} is a program, not a definition; it runs only with lm-eval's own command")
    return config


def load_task(config: Json, own: Path | None, manager: TaskManager, folder: Path | None) -> ZeroShotTask:
    """A task from its definition, with its rows."""
    name, shots = config.get("task"), config.get("num_fewshot") or 0
    output = config.get("output_type", "generate_until")
    if not isinstance(name, str):
        raise UserError(f"{own}: no key 'task' with the task's name (expected an lm-eval task)")
    where = own or f"--tasks: {name}"
    if output not in KINDS:
        raise UserError(f"{where}: output_type is {output} (expected {', '.join(KINDS)})")
    scored = "validation_split" if config.get("test_split") is None else "test_split"
    needed = ["doc_to_text", "doc_to_target", *(["doc_to_choice"] if output == "multiple_choice" else [])]
    if missing := [key for key in needed if own and key not in config]:
        raise UserError(f"{own}: no key {missing[0]!r}, which output_type {output} needs")
    if not isinstance(config.get(scored), str):
        raise UserError(f"{where}: no test_split or validation_split, so nothing to score (expected a name)")
    if type(shots) is not int or shots < 0:
        raise UserError(f"{where}: num_fewshot is {shots!r} (expected a number of examples)")
    file = (folder or Path("DIR")) / f"{name}.jsonl"
    with read_errors(file):
        rows = read_rows(file) if folder is not None and file.is_file() else None
    if rows is None and (own is not None or folder is not None):
        raise UserError(f"--task-data: no rows for {name} (expected {file})", how_to_write(config, scored, file))
    examples = None
    changes: Json = {"num_fewshot": config.get("num_fewshot")}
    if rows is not None:
        split, others = config[scored], rows.data.select([])
        if (train := file.with_suffix(".train.jsonl")).is_file():
            examples, split = read_rows(train), "rows"
            others = examples.data
            changes |= {scored: split, "fewshot_split": "examples"}
        splits = defaultdict(lambda: others, {split: rows.data})
        changes |= {"custom_dataset": lambda **_: splits, "dataset_kwargs": None}
    definition = {"group": "pkmlm", "task": [{"task": name, **changes}]} if own is None else {**config, **changes}
    try:
        task = manager.load([definition])["tasks"][name]
    except Exception as error:  # the definition's functions and templates can raise anything
        source, hint = (rows.file, "") if rows else ("its rows from the hub", how_to_write(config, scored, file))
        raise UserError(f"{where} cannot be used with {source}: {one_line(error)}", hint) from None
    totals = task.aggregation()
    if unknown := [metric for metric, total in totals.items() if total is None]:
        raise UserError(f"{where}: lm-eval cannot sum up {unknown[0]}", "give it an aggregation, such as mean")
    totals.update({metric: functools.partial(bounded, total) for metric, total in totals.items()})
    if shots:
        check_examples(task, file)
    task.set_fewshot_seed(FEWSHOT_SEED)
    if examples is not None:
        check_documents(task, task.fewshot_docs(), examples, 0, own)
    if rows is not None:
        check_documents(task, task.eval_docs, rows, shots, own)
    task.set_fewshot_seed(FEWSHOT_SEED)
    return ZeroShotTask(name, task, rows, own)


def how_to_write(config: Json, scored: str, file: Path) -> str:
    """A hint on how to write the rows of a task."""
    path, name = config.get("dataset_path"), config.get("dataset_name")
    if "/" not in str(path) or path in SCRIPTS:  # not on the hub
        return f"for --task-data {file.parent}, write one JSON object per line: see `pkmlm help evaluation`"
    source = ", ".join(json.dumps(part) for part in (path, name) if part)
    target = f"{json.dumps(str(file))}, force_ascii=False"
    fetch = f"load_dataset({source}, split={json.dumps(config[scored])}).to_json({target})"
    return f"for --task-data {file.parent}, where there is a network: from datasets import load_dataset; {fetch}"


def read_rows(file: Path) -> Rows:
    """The rows of a file of JSON lines; blank lines are skipped, and a missing field is null.

    Raises:
        UserError: the file cannot be read or holds no row; a line is not a JSON object; a field has different types.
    """
    with read_errors(file):
        content = read_bytes(file)
    rows: dict[int, Json] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                rows[number] = json_object(line.decode(), f"{file}:{number}")
            except UnicodeDecodeError as error:
                raise UserError(f"{file}:{number}: not UTF-8 ({error.reason})") from None
    names = dict.fromkeys(name for row in rows.values() for name in row)  # `from_list` takes those of the first row
    if not names:
        raise UserError(f"{file} holds no rows (expected one JSON object on each line)")
    try:
        data = datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in rows.values()])
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's among them
        raise UserError(f"{file}: the rows are not of one type: {one_line(error)}") from None
    return Rows(file, hashlib.sha256(content).hexdigest(), data, list(rows))


def check_examples(task: ConfigurableTask, file: Path) -> None:
    """Refuse few-shot examples that are too few, or are the questions themselves: lm-eval leaves out the question that
    is asked, with its answer, only if the definition names the test split for the examples.
    """
    config, named = task.config, task.fewshot_cfg.split
    splits = [config.training_split, config.validation_split, config.test_split]
    source = named if named or task.fewshot_cfg.samples else next(split for split in splits if split is not None)
    scored = config.validation_split if config.test_split is None else config.test_split
    found = 0 if source == scored and named != config.test_split else len(task.fewshot_docs())
    if found < config.num_fewshot:
        hint = f"write them to {file.with_suffix('.train.jsonl')}, one JSON object per line, or ask for --num-fewshot 0"
        needed = f"{config.num_fewshot} few-shot example{'s' * (config.num_fewshot > 1)}"
        message = f"{task.task_name} needs {needed} (found {found} besides its own questions)"
        raise UserError(message, hint)


def check_documents(
    task: ConfigurableTask, documents: Sequence[Json], rows: Rows, shots: int, own: Path | None
) -> None:
    """Put documents, which were made of these rows, through the task's functions.

    Raises:
        UserError: a function fails for a document, or lm-eval would score it wrongly.
    """
    for place, document in enumerate(documents):
        try:
            check_document(task, document, shots, stock=own is None)
        except Exception as error:
            which = f"{rows.file}:{rows.lines[place]}"
            if len(documents) != len(rows.lines):  # a function of the task has left some out
                which = f"{rows.file}: row {place + 1} of {len(documents)}"
            raise UserError(f"{which}: {own or task.task_name} cannot use it: {one_line(error)}") from None


def check_document(task: ConfigurableTask, document: Json, shots: int, stock: bool) -> None:
    """Make a document's requests as lm-eval does, and refuse what it would score without an error.

    Args:
        shots: few-shot examples before the question.
        stock: the definition is lm-eval's own.

    Raises:
        Exception: whatever the task's functions raise; ValueError: what they return cannot be scored.
    """

    def texts(document: Json, shots: int) -> list[Any]:
        context = task.fewshot_context(document, shots, gen_prefix=task.doc_to_prefix(document))
        found = task.construct_requests(document, context, metadata=(task.task_name, 0, 1))
        return [text for request in (found if isinstance(found, list) else [found]) for text in request.args]

    for field in (task.config.doc_to_text, task.config.doc_to_target):
        if isinstance(field, str) and field.isidentifier() and field not in task.features:
            raise ValueError(f"no field {field!r}")  # lm-eval would use the name itself as the text
    asked = texts(document, shots)
    if wrong := [text for text in asked if not isinstance(text, str)]:
        raise ValueError(f"{str(wrong[0])[:60]!r} is not a text")
    if None in document.values() and (stock or any("None" in text for text in asked)):
        # A template prints null as the word None, and a function may take it for something else. Without the field,
        # both fail.
        texts({key: value for key, value in document.items() if value is not None}, 0)
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    choices = task.doc_to_choice(document)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise ValueError(f"the choices are {str(choices)[:200]} (expected a list of texts, none empty)")
    right = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    for answer in right if isinstance(right, list) else [right]:
        if answer not in choices and not (isinstance(answer, int) and 0 <= answer < len(choices)):
            raise ValueError(f"the answer is {answer!r} (expected one of {len(choices)} choices)")


def one_line(error: Exception) -> str:
    """The first line of an error's message, with its class, without which it often makes no sense."""
    line, kind = str(error).strip().partition("\n")[0], type(error).__name__
    return line if line and type(error) is ValueError else f"{kind}: {line}" if line else kind


def bounded(total: Callable[[Any], float], items: Any) -> float:
    """The total of a metric; infinite if lm-eval divides by zero bytes or its exp overflows."""
    try:
        return total(items)
    except (OverflowError, ZeroDivisionError):
        return math.inf


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates that reach nothing but their row; each is compiled once."""

    @functools.cache  # noqa: B019 (it lives as long as the tasks are scored)
    def from_string(self, source: str) -> Template:  # type: ignore[override]
        """The compiled template."""
        return super().from_string(source)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Keep lm-eval from writing to the terminal (log, bars, what its tasks print), and make it fill in templates
    in a sandbox: in its own environment, which it gives no other way to replace, they can call any Python function.
    """
    before, disabled = lm_eval.utils.env, logging.root.manager.disable
    lm_eval.utils.env = Sandbox(
        loader=before.loader, undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
    )
    lm_eval.utils.env.filters.update(before.filters)
    logging.disable()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        lm_eval.utils.env = before
