"""Load zero-shot tasks: definitions that lm-evaluation-harness ships or a user wrote, with rows from a file
(`task_rows`) or from the source in the definition.
"""

import contextlib
import difflib
import functools
import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import lm_eval.utils
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from pkmlm.errors import UserError, read_errors
from pkmlm.evaluate.task_file import LOCAL, SUITES, read_task_file
from pkmlm.evaluate.task_rows import (
    Json,
    Rows,
    bad_row,
    check_examples,
    check_rows,
    data_set,
    first_failure,
    how_to_write,
    one_line,
    read_rows,
)

KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
FEWSHOT_SEED = 1234  # lm-eval's own


@dataclass(frozen=True)
class ZeroShotTask:
    """A task that is ready to be scored.

    Attributes:
        rows: those of a file; None: they come from the source in the definition.
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
            config = stock_definition(name, manager) if own is None else read_task_file(own)
            task = load_task(config, own, manager, folder, num_fewshot)
            if task.name in found:
                raise UserError(f"--tasks has two tasks named {task.name!r}", "rename your own")
            found[task.name] = task
    return list(found.values())


def task_manager(names: Sequence[str]) -> TaskManager:
    """lm-eval's index of its tasks: of the folders where these tasks should be or, if one is not found there, of all
    13,000 tasks, which takes ten seconds.
    """
    root = Path(lm_eval.tasks.__file__).parent
    folders = sorted({root / part for name in names for part in (name, name.split("_")[0], "super_glue")})
    manager = TaskManager(include_path=[path for path in folders if path.is_dir()], include_defaults=False)
    return manager if set(names) <= set(manager.all_tasks) else TaskManager()


def stock_definition(name: str, manager: TaskManager) -> Json:
    """The definition of one of lm-eval's own tasks, with its functions."""
    entry = manager.task_index.get(name)
    if name in (*manager.all_groups, *manager.all_tags):
        raise UserError(f"--tasks: {name!r} is a group of tasks", "give the names of its tasks")
    if entry is None or entry.yaml_path is None:
        known = [*SUITES, *manager.all_subtasks]
        near = difflib.get_close_matches(name, known)
        hint = f"did you mean {', '.join(near)}?" if near else "for example memoryformer, piqa, arc_easy or hellaswag"
        raise UserError(f"--tasks: lm-eval has no task {name!r}", hint)
    if "class" in (entry.cfg or {}):
        raise UserError(f"--tasks: {name} is a program, not a definition; it runs only with lm-eval's own command")
    try:
        definition: Json = load_yaml(entry.yaml_path)
    except Exception as error:  # from the Python that it names, which may need a missing package
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
        raise UserError(f"--tasks: {name} has output_type {kind} (expected {', '.join(KINDS)})")
    named = [config.get(f"{split}_split") for split in ("test", "validation", "training", "fewshot")]
    if not any(named[:2]):
        raise UserError(f"{own or name}: no test_split or validation_split, so nothing to score")
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        needed = key != "doc_to_choice" or kind == "multiple_choice"
        if own is not None and needed and key not in config:
            raise UserError(f"{own}: no key {key!r}, which output_type {kind} needs")
    config = {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}
    if num_fewshot is not None:
        config["num_fewshot"] = num_fewshot
    made = config.get("custom_dataset") is not None  # its rows are made by a function of lm-eval
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
            raise UserError(f"--task-data: no rows for {name} (expected {file})", how_to_write(config, file))
    shots_asked = config.get("num_fewshot") or 0
    if examples is None and shots_asked:
        check_examples(name, config, rows is not None, folder)
    if examples is not None:
        if shots_asked > len(examples.rows):
            message = f"--num-fewshot {shots_asked}: {examples.file} has only {len(examples.rows):,} examples"
            raise UserError(message, "ask for fewer")
        shots_split = " ".join(filter(None, named)) + " examples"  # longer than any split that is named
        config["fewshot_config"] = {**(config.get("fewshot_config") or {}), "split": shots_split}

    def build(count: int) -> ConfigurableTask:
        """The task with the first `count` rows."""
        if rows is None:
            return manager.load([config])["tasks"][name]
        scored, *others = dict.fromkeys(filter(None, named))
        data = data_set(rows.rows, count)
        splits = {split: data.select([]) for split in others} | {scored: data}
        if examples is not None:
            splits[shots_split] = data_set(examples.rows)
        return manager.load([{**config, "custom_dataset": lambda **_: splits}])["tasks"][name]

    try:
        task = build(0 if rows is None else len(rows.rows))
    except Exception as error:  # the definition's functions and templates can raise anything
        if rows is not None:
            raise bad_row(name, own, rows, *first_failure(build, len(rows.rows), error)) from None
        if own is not None and not on_hub:
            raise UserError(f"{own} cannot be used with its rows: {one_line(error)}") from None
        raise UserError(
            f"--tasks: cannot load the rows of {name} from the hub: {one_line(error)}", how_to_write(config, file)
        ) from None
    totals = task.aggregation()
    totals.update({metric: functools.partial(bounded, total) for metric, total in totals.items()})
    task.set_fewshot_seed(FEWSHOT_SEED)
    if rows is not None or own is not None:
        check_rows(name, own, task, rows, examples)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return ZeroShotTask(name, task, rows, own)


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
    in a sandbox: in its own environment, they can call any Python function.
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
