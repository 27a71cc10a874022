"""Zero-shot tasks before they are scored: definitions, which lm-evaluation-harness ships or a user wrote, and rows.

The rows of a task come from a file of JSON lines (`--task-data`), or from where its definition says. Rows of a file are
put through all of the task's functions before a model is loaded, so that a bad one is named by its file and line.
"""

import contextlib
import difflib
import functools
import io
import json
import logging
import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import lm_eval.utils
from jinja2 import Environment, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from pkmlm.data.text import json_object
from pkmlm.errors import UserError, read_errors
from pkmlm.evaluate.task_file import LOCAL, SUITES, read_task_file
from pkmlm.runs.files import read_bytes, sha256_of

KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
FEWSHOT_SEED = 1234  # lm-eval's own
LABELS = {"copa": (0, 1)}  # of stock tasks whose function takes any other label for the last
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


@dataclass(frozen=True)
class ZeroShotTask:
    """A task that is ready to be scored.

    Attributes:
        rows: None: they come from where the definition says.
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
        UserError: no such task or file; a task that is not of log-likelihoods; rows that cannot be had or used.
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
            config = stock_definition(name, manager) if own is None else read_task_file(own)
            task = load_task(config, own, manager, folder, num_fewshot)
            if task.name in found:
                raise UserError(f"--tasks has two tasks named {task.name!r}", "rename the one of your own")
            found[task.name] = task
    return list(found.values())


def task_manager(names: Sequence[str]) -> TaskManager:
    """lm-eval's index of its tasks: of the folders where these tasks should be, or, where one is not among them, of all
    13,000, which takes ten seconds.
    """
    root = Path(lm_eval.tasks.__file__).parent
    folders = sorted({root / part for name in names for part in (name, name.split("_")[0], "super_glue")})
    manager = TaskManager(include_path=[path for path in folders if path.is_dir()], include_defaults=False)
    return manager if set(names) <= set(manager.all_tasks) else TaskManager()


def stock_definition(name: str, manager: TaskManager) -> Json:
    """The definition of one of lm-eval's own tasks, with its functions."""
    entry = manager.task_index.get(name)
    if name in (*manager.all_groups, *manager.all_tags):
        raise UserError(f"--tasks: {name!r} is a group of tasks", "name the tasks themselves")
    if entry is None or entry.yaml_path is None:
        known = [*SUITES, *manager.all_subtasks]
        near = difflib.get_close_matches(name, known)
        hint = f"did you mean {', '.join(near)}?" if near else "for example memoryformer, piqa, arc_easy or hellaswag"
        raise UserError(f"--tasks: lm-eval has no task {name!r}", hint)
    if "class" in (entry.cfg or {}):
        raise UserError(f"--tasks: {name} is a program, not a definition; it runs with lm-eval's own command only")
    try:
        definition: Json = load_yaml(entry.yaml_path)
    except Exception as error:  # from the Python that it names: a package that this needs is missing, say
        raise UserError(f"--tasks: {name} cannot be loaded: {one_line(error)}") from None
    return definition


def load_task(
    config: Json, own: Path | None, manager: TaskManager, folder: Path | None, num_fewshot: int | None
) -> ZeroShotTask:
    """A task from its definition, with its rows."""
    name = config.get("task")
    if not isinstance(name, str):
        raise UserError(f"{own}: no key 'task' with the task's name (expected an lm-eval task)")
    kind = config.get("output_type", "generate_until")  # lm-eval's default
    if kind not in KINDS:
        raise UserError(f"--tasks: {name} is a task of {kind} (expected {', '.join(KINDS)})")
    named = [config.get(f"{split}_split") for split in ("test", "validation", "training", "fewshot")]
    if not any(named[:2]):
        raise UserError(f"{own or name}: neither test_split nor validation_split: nothing to score")
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        needed = key != "doc_to_choice" or kind == "multiple_choice"
        if own is not None and needed and key not in config:
            raise UserError(f"{own}: no key {key!r}, which a task of {kind} needs")
    config = {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}
    if num_fewshot is not None:
        config["num_fewshot"] = num_fewshot
    made = config.get("custom_dataset") is not None  # by a function of lm-eval
    on_hub = not made and config.get("dataset_path") not in (None, *LOCAL)
    file = (folder or Path("DIR")) / f"{name}.jsonl"
    rows = examples = None
    with read_errors(file):
        given = folder is not None and file.is_file()
    if given:
        rows = read_rows(file)
        examples = read_rows(shots) if (shots := file.with_suffix(".train.jsonl")).is_file() else None
    else:
        names_files = made or {"data_files", "data_dir"} & (config.get("dataset_kwargs") or {}).keys()
        missing = folder is not None if on_hub else not names_files
        if missing:
            raise UserError(f"--task-data: no rows of {name} (expected {file})", how_to_write(config, file))
    shots_asked = config.get("num_fewshot") or 0
    if examples is None and shots_asked:
        check_examples(name, config, rows is not None, folder)
    if examples is not None:
        if shots_asked > len(examples.rows):
            message = f"--num-fewshot {shots_asked}: {examples.file} has {len(examples.rows):,} examples"
            raise UserError(message, "ask for fewer")
        shots_split = " ".join(filter(None, named)) + " examples"  # longer than any that is named
        config["fewshot_config"] = {**(config.get("fewshot_config") or {}), "split": shots_split}

    def build(count: int) -> ConfigurableTask:
        """The task with so many of the rows."""
        if rows is None:
            return manager.load([config])["tasks"][name]
        scored, *others = dict.fromkeys(filter(None, named))
        data = datasets.Dataset.from_list(rows.rows[:count])
        splits = {split: data.select([]) for split in others} | {scored: data}
        if examples is not None:
            splits[shots_split] = datasets.Dataset.from_list(examples.rows)
        return manager.load([{**config, "custom_dataset": lambda **_: splits}])["tasks"][name]

    try:
        task = build(0 if rows is None else len(rows.rows))
    except Exception as error:  # the definition's functions and templates can raise anything
        if rows is not None:
            raise bad_row(name, own, rows, *first_failure(build, len(rows.rows), error)) from None
        if own is not None and not on_hub:
            raise UserError(f"{own} cannot be used with its rows: {one_line(error)}") from None
        raise UserError(
            f"--tasks: no rows of {name} from the hub: {one_line(error)}", how_to_write(config, file)
        ) from None
    totals = task.aggregation()
    totals.update({metric: functools.partial(bounded, total) for metric, total in totals.items()})
    task.set_fewshot_seed(FEWSHOT_SEED)
    if rows is not None or own is not None:
        check_rows(name, own, task, rows, examples)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return ZeroShotTask(name, task, rows, own)


def how_to_write(config: Json, file: Path) -> str:
    """The lines that write the rows of a task: one for each row, or two of Python that fetch them."""
    if config.get("dataset_path") not in (None, *LOCAL):
        names = [config.get("dataset_path"), config.get("dataset_name")]
        split = config.get("test_split") or config.get("validation_split")
        source = ", ".join(json.dumps(name) for name in names if name) + f", split={json.dumps(split)}"
        fetch = f"load_dataset({source}).to_json({json.dumps(str(file))}, force_ascii=False)"
        where = f"where there is a network, write it for --task-data {file.parent}"
        return f"{where}: from datasets import load_dataset; {fetch}"
    fields: list[str] = []
    for text in (config.get(key) for key in ("doc_to_text", "doc_to_choice", "doc_to_target")):
        if isinstance(text, str) and text.isidentifier():
            fields.append(text)
        elif isinstance(text, str):
            with contextlib.suppress(TemplateError):
                fields += sorted(meta.find_undeclared_variables(Environment().parse(text)))
    row = json.dumps(dict.fromkeys(fields, "..."))
    where = f"write it for --task-data {file.parent}, a row a line, with values of your own"
    return f"{where}: echo {shlex.quote(row)} >> {shlex.quote(str(file))}"


def read_rows(file: Path) -> Rows:
    """The rows of a file of JSON lines; blank lines are passed over.

    Raises:
        UserError: the file cannot be read or holds no row; a line is not a JSON object; a field is of another type than
            in the lines before. A field that is missing is null.
    """
    with read_errors(file):
        content = read_bytes(file).removeprefix(b"\xef\xbb\xbf").split(b"\n")
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
    try:
        datasets.Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's among them
        count, found = first_failure(lambda count: datasets.Dataset.from_list(rows[:count]), len(rows), error)
        message = f"{file}:{lines[count - 1]}: no table holds this row with those before it: {one_line(found)}"
        raise UserError(message) from None
    return Rows(file, sha256_of(file), rows, lines)


def first_failure(attempt: Callable[[int], object], most: int, error: Exception) -> tuple[int, Exception]:
    """The smallest n for which attempt(n) fails, and how; it fails for all larger ones, `most` among them."""
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
    """That the task cannot use the row number `count` of a file."""
    where, why = f"{rows.file}:{rows.lines[count - 1]}", one_line(error)
    if own is not None:
        return UserError(f"{own} cannot be used with {where}: {why}")
    fields = ", ".join(rows.rows[count - 1]) or "none"
    return UserError(f"{where}: {name} cannot use this row: {why} (its fields: {fields[:200]})")


def check_examples(name: str, config: Json, from_file: bool, folder: Path | None) -> None:
    """Refuse few-shot examples that a definition takes from where there are none, or from its own questions: unless it
    says so by naming the test split, lm-eval does not leave out the one that is asked, with its answer.

    Args:
        from_file: the rows are those of a file, which is the split that is scored; all others are empty.
    """
    given = config.get("fewshot_config") or {}
    named = given.get("split") or config.get("fewshot_split")
    if given.get("samples") and named is None:
        return
    training, validation, test = (config.get(f"{split}_split") for split in ("training", "validation", "test"))
    scored = test or validation
    file = f"{folder or 'DIR'}/{name}.train.jsonl"
    hint = f"give examples, one JSON object a line, in {file} (--task-data), or none: --num-fewshot 0"
    if (named or training or validation or test) == scored:
        if named is None or named != test:
            raise UserError(f"--num-fewshot: no examples for {name} but its own questions", hint)
    elif from_file:
        raise UserError(f"--num-fewshot: no examples for {name}", hint)


def check_rows(name: str, own: Path | None, task: ConfigurableTask, rows: Rows | None, examples: Rows | None) -> None:
    """Put each row through the task's functions, and made-up scores through its metrics.

    Raises:
        UserError: for a row, or for all of them together, these fail or give what cannot be scored.
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
        raise UserError(f"--tasks: {own or name}: lm-eval cannot sum up {metric}: {one_line(error)}") from None


def check_document(task: ConfigurableTask, document: Json, shots: int, stock: bool) -> Json:
    """Ask a task for all that scoring a document needs; the metrics of made-up scores.

    Args:
        shots: few-shot examples before the question.
        stock: lm-eval's own definition, whose functions may take a null for something else.

    Raises:
        Exception: whatever the task's functions raise; ValueError: what they give cannot be scored.
    """

    def requests(document: Json, shots: int) -> list[Any]:
        context = task.fewshot_context(document, shots, gen_prefix=task.doc_to_prefix(document))
        found = task.construct_requests(document, context, metadata=(task.task_name, 0, 1))
        return found if isinstance(found, list) else [found]

    text = task.config.doc_to_text
    if isinstance(text, str) and text.isidentifier() and text not in document:
        raise ValueError(f"no field {text!r}")  # lm-eval would ask for the word itself
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


def bounded(total: Callable[[Any], float], items: Any) -> float:
    """The total of a metric; infinite where lm-eval divides by no bytes, or takes exp of more than floats hold."""
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
    """Keep lm-eval from writing on the terminal (its log, its bars, what its tasks print), and let it fill in templates
    in a sandbox: in its own environment, they can call any function of Python.
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


def one_line(error: Exception) -> str:
    """The first line of an error's message, with its kind: alone it often makes no sense."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if type(error) is ValueError else f"{type(error).__name__}: {line}"
