"""Zero-shot tasks on a run: lm-evaluation-harness builds the requests and counts, the adapter scores."""

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import datasets
import lm_eval.utils
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from pkmlm import __version__
from pkmlm.errors import UserError
from pkmlm.evaluate.adapter import PkmLM
from pkmlm.evaluate.hub import asked_once
from pkmlm.evaluate.load import LoadedRun
from pkmlm.evaluate.task_rows import FIELDS, read_rows
from pkmlm.evaluate.tasks import HINT, TaskSource

FEWSHOT_SEED = 1234  # the harness's own
SHOTS = "few-shot examples"  # a split that no definition names
LOGGERS = ("lm_eval", "datasets", "huggingface_hub")
Facts = dict[str, Any]


def run_tasks(
    run: LoadedRun,
    sources: Sequence[TaskSource],
    tasks: dict[str, ConfigurableTask],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    advance: Callable[[int, int], Any] = lambda done, total: None,
) -> tuple[dict[str, Facts], list[Facts]]:
    """Score tasks.

    Args:
        tasks: what `build_tasks` made of the sources.
        limit: only the first so many documents of each.
        batch_size: questions a forward; None: by their length.
        advance: called with the tokens scored so far and in all.

    Returns:
        per task the facts of `task_facts`; and the samples of all tasks: one dict for each document, with what was
        asked, the log-likelihoods and the metrics.

    Raises:
        UserError: scores that are not finite (exit code 1); a template that cannot be filled in; a task of one's own
            that the harness cannot score.
    """
    model = PkmLM(run, batch_size=batch_size, advance=advance)
    try:
        with quiet(), sandboxed():
            found = evaluate(model, {"tasks": tasks}, limit=limit, bootstrap_iters=0)
    except TemplateError as error:
        raise UserError(f"--tasks: a template cannot be filled in: {first_line(error)}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a user's definition that passed the checks
        own = ", ".join(str(source.own) for source in sources if source.own is not None)
        if not own:
            raise
        raise UserError(f"--tasks {own}: lm-eval cannot score it: {kind_and_line(error)}") from error
    assert found is not None  # lm_eval returns None on ranks above 0; the adapter's is always 0
    facts, samples = {}, []
    for source in sources:
        name = source.name
        facts[name] = task_facts(tasks[name], found["results"][name], found["samples"][name])
        facts[name] |= {
            "requests": model.requests[name],
            "truncated": model.truncated[name],
            "num_fewshot": tasks[name].config.num_fewshot or 0,
            "version": found["versions"][name],
            "data": None if source.file is None else {"file": source.file.name, "sha256": source.sha256},
        }
        samples += [{"task": name, **sample} for sample in found["samples"][name]]
    return facts, samples


def settings(run: LoadedRun) -> Facts:
    """Under what results were measured: versions, and how the model ran."""
    return {
        "versions": {"pkmlm": __version__, **{name: version(name) for name in ("lm_eval", "datasets", "torch")}},
        "dtype": str(next(run.model.parameters()).dtype).removeprefix("torch."),
        "device": str(run.device),
        "context": run.model.context,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the harness from writing on the terminal: its log, its bars, what its tasks print."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def sandboxed() -> Iterator[None]:
    """Let the harness fill in templates where they reach nothing but their row: in its own environment, a template can
    call any function of Python.
    """
    before = lm_eval.utils.env
    inside = ImmutableSandboxedEnvironment(
        loader=before.loader, undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
    )
    inside.filters.update(before.filters)
    lm_eval.utils.env = inside
    try:
        yield
    finally:
        lm_eval.utils.env = before


def build_tasks(sources: Sequence[TaskSource], fewshot: int | None) -> dict[str, ConfigurableTask]:
    """The harness's tasks by name, with their rows; no model is needed.

    Args:
        fewshot: examples before each question; None: as defined.

    Raises:
        UserError: rows that cannot be had or used.
    """
    with quiet(), sandboxed(), asked_once(any(source.hub for source in sources)) as offline:
        return {source.name: build(source, fewshot, offline) for source in sources}


def build(source: TaskSource, fewshot: int | None, offline: bool) -> ConfigurableTask:
    """The harness's task over its rows.

    Raises:
        UserError: the rows cannot be had, or the task cannot use them.
    """
    config = dict(source.config)
    if source.file is not None:
        rows = data_set(source.file, source.name)
        scored, others = source.splits
        splits = {name: rows.select([]) for name in others} | {scored: rows}
        if source.shots is not None:
            splits[SHOTS] = data_set(source.shots, source.name)
            config["fewshot_config"] = {**(config.get("fewshot_config") or {}), "split": SHOTS}
        config["custom_dataset"] = lambda **_: splits
    try:
        task = ConfigurableTask(config=config)
        if fewshot is not None:
            task.set_config("num_fewshot", fewshot)
        if source.shots is not None and (task.config.num_fewshot or 0) > len(splits[SHOTS]):
            message = f"--num-fewshot {task.config.num_fewshot}: {source.shots} has {len(splits[SHOTS]):,} examples"
            raise UserError(message, "ask for fewer")
        task.set_fewshot_seed(FEWSHOT_SEED)
        totals = task.aggregation()
        totals.update({name: bounded(total) for name, total in totals.items()})
        if source.own is not None or (not source.hub and source.name not in FIELDS):
            check_documents(task)
            task.set_fewshot_seed(FEWSHOT_SEED)
    except UserError:
        raise
    except Exception as error:  # a definition's functions and templates can raise anything
        raise cannot_build(source, error, offline) from None
    return task


def bounded(total: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What sums up a metric, infinite where the harness divides by no bytes, or takes exp of more than floats hold."""

    def total_or_infinity(items: Any) -> Any:
        try:
            return total(items)
        except (OverflowError, ZeroDivisionError):
            return math.inf

    return total_or_infinity


def data_set(file: Path, task: str) -> datasets.Dataset:
    """The rows of a task's file, as the harness takes them."""
    rows = read_rows(file, task)
    try:
        return datasets.Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's among them: a column of several kinds
        raise UserError(f"{file}: {first_line(error)}") from None


class UnusableRow(ValueError):
    """A row that a definition cannot use; the message says which, and why."""


def check_documents(task: ConfigurableTask) -> None:
    """Ask for each document what scoring will ask for: a row that the definition cannot use raises here."""
    for place, document in enumerate(task.eval_docs, 1):
        try:
            task.fewshot_context(document, task.config.num_fewshot or 0)
            target = task.doc_to_target(document)
            if task.OUTPUT_TYPE == "multiple_choice":
                choices = task.doc_to_choice(document)
                right = target if isinstance(target, list) else [target]
                if not task.multiple_input and not all(
                    each in choices or each in range(len(choices)) for each in right
                ):
                    raise UserError(f"the answer is {target!r} (expected one of {len(choices)} choices)")
        except UserError as error:
            raise UnusableRow(f"row {place}: {error.message}") from None
        except Exception as error:  # of the definition's templates
            raise UnusableRow(f"row {place}: {kind_and_line(error)}") from None


def cannot_build(source: TaskSource, error: Exception, offline: bool) -> UserError:
    """What to say when a task cannot be built."""
    where = source.file or f"--tasks {source.name}"
    # Templates are first tried on the first row; other errors are those of files and splits.
    trial = "when the first one is tried: " if isinstance(error, TemplateError) else ""
    plain = isinstance(error, UnusableRow | OSError)
    why = trial + (first_line(error) if plain else kind_and_line(error))
    if source.own is not None and not source.hub:
        rows = f"the rows of {source.file}" if source.file else "its rows"
        return UserError(f"{source.own} cannot be used with {rows}: {why}")
    if not source.hub:
        return UserError(f"{where}: {source.name} cannot use these rows: {why}")
    if "scripts are no longer supported" in str(error):
        reason = "its copy there is a script, which datasets >= 4 does not run"
    elif offline:
        reason = "it does not answer, and no copy is on this machine"
    else:
        reason = kind_and_line(error)
    return UserError(f"--tasks: no rows of {source.name} from the hub: {reason}", HINT.format(source.name))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def kind_and_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def task_facts(task: ConfigurableTask, results: Facts, samples: Sequence[Facts]) -> Facts:
    """What is reported of a task.

    Keys: n (documents), acc, acc_norm (shares of right answers: of the choice with the largest log p, or with the
    largest log p by character), their standard errors (of a mean over documents), chance (of a random choice), always
    (acc of giving the same answer to all, where all have the same choices), metrics (all others of the task that are
    finite). None where the task has no such thing.
    """
    metrics = {
        key.removesuffix(",none"): value
        for key, value in results.items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float) and math.isfinite(value)
    }
    counts = [len(sample["arguments"]) // (1 + ("acc_mutual_info" in sample["metrics"])) for sample in samples]
    choosing = task.OUTPUT_TYPE == "multiple_choice"
    return {
        "n": len({sample["doc_id"] for sample in samples}),
        "acc": metrics.pop("acc", None),
        "acc_stderr": standard_error([sample.get("acc") for sample in samples]),
        "acc_norm": metrics.pop("acc_norm", None),
        "acc_norm_stderr": standard_error([sample.get("acc_norm") for sample in samples]),
        "chance": fmean(1 / count for count in counts) if choosing else None,
        "always": always(task.config.doc_to_choice, samples) if choosing else None,
        "metrics": metrics,
    }


def standard_error(values: Sequence[Any]) -> float | None:
    """Of the mean of numbers; None for fewer than two, or for what is not numbers."""
    if len(values) < 2 or not all(isinstance(value, int | float) for value in values):
        return None
    return stdev(values) / math.sqrt(len(values))


def always(choices: Any, samples: Sequence[Facts]) -> dict[str, float] | None:
    """For each of a task's fixed choices, the share of documents whose answer it is; None where choices differ."""
    if not isinstance(choices, list):
        return None
    right = [sample["target"] for sample in samples]
    return {choice: fmean(each in (place, choice) for each in right) for place, choice in enumerate(choices)}
