"""What a run keeps besides its checkpoints: writing and reading of its results.

run.json                          how the run was started and how it ended
metrics.jsonl                     one event per line
eval/NAME-step-N[-stride-S].json  what `eval --json` prints of a perplexity; NAME is that of a split or a text
eval/tasks-NAMES[-shots-K]-step-N[-limit-L].json    likewise, of zero-shot tasks
usage/NAME-step-N.json, .npz      an entry of `usage-report --format json`, and its arrays
steps.json                        how long steps take, timed in turn with those of other runs: `StepTimes`

Names of files are for people. A result holds the digest of the checkpoint that it was measured on ("checkpoint"), and
is shown only while the run has that checkpoint: what was measured on weights that training has replaced is not.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from pkmlm.console import warn
from pkmlm.errors import UserError
from pkmlm.files import (
    MAKE_AGAIN,
    TEMPORARY,
    check_json,
    make_folder,
    open_file,
    read_json,
    remove_file,
    write_json,
    writing,
)

EVAL, USAGE = "eval", "usage"  # folders of a run
STEPS = "steps.json"
NAME_CHARACTERS = 60  # of the name of a text or of tasks in a file's name

Number = Annotated[float, Field(allow_inf_nan=False)]


class Event(TypedDict):
    """What every line of metrics.jsonl holds."""

    event: str
    step: int


class Measured(TypedDict):
    """What every file of RUN/eval and RUN/usage holds, among other keys."""

    step: int
    checkpoint: str


class Timed(TypedDict):
    """How fast the model of a sweep's point scores text."""

    point: dict[str, str]
    recipe: str
    timed_on: dict[str, str]
    tokens_per_second: list[Number]


class StepTimes(TypedDict):
    """Seconds of the steps of several recipes (by their sha256), timed in turn, and what else the machine did."""

    timed_on: dict[str, str]
    busy_cores: Number
    steps: dict[str, list[Number]]


# Names.


def perplexity_file(name: str, step: int, stride: int | None) -> str:
    """The file of a perplexity in RUN/eval.

    Args:
        name: of the split or the text.
        stride: None: the model's context.
    """
    return f"{file_part(name)}-step-{step}" + (f"-stride-{stride}" if stride else "") + ".json"


def tasks_file(record: dict[str, Any]) -> str:
    """The file of a record of zero-shot tasks in RUN/eval."""
    shots = max(facts["num_fewshot"] for facts in record["tasks"].values())
    few = f"-shots-{shots}" if shots else ""
    limit = record["harness"]["limit"]
    end = f"-limit-{limit}" if limit else ""
    return f"tasks-{file_part('-'.join(record['tasks']))}{few}-step-{record['step']}{end}.json"


def file_part(name: str) -> str:
    """A name without blanks and characters that are special in a shell, of a length that a file name can have: what is
    longer ends in a digest of the whole.
    """
    part = re.sub(r"[^\w.-]+", "_", name)
    if len(part) <= NAME_CHARACTERS:
        return part
    return f"{part[:NAME_CHARACTERS]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def usage_stem(run: Path, name: str, step: int) -> Path:
    """The path of the two files of a usage report, without their endings."""
    return run / USAGE / f"{file_part(name)}-step-{step}"


# Reading and writing.


def read_results(folder: Path, checkpoints: set[str]) -> list[dict[str, Any]]:
    """The results in a folder that were measured on one of these checkpoints, from the highest step down, and of one
    step the newest first. Damaged files are left out with a warning; another process may be writing others.

    Args:
        folder: RUN/eval or RUN/usage.
        checkpoints: digests, see `RunDirectory.digests`.
    """
    found = []
    for file in folder.glob("*.json"):
        if file.name.startswith(TEMPORARY):
            continue
        try:
            written = file.stat().st_mtime_ns
            record = read_json(file, "the results", schema=Measured)
        except OSError:  # it has gone, to be measured again
            continue
        except UserError as error:
            if file.exists():
                warn(f"{error.message}; it is left out")
            continue
        if record["checkpoint"] in checkpoints:
            found.append((record["step"], written, file.name, record))
    return [record for *_, record in sorted(found, key=itemgetter(0, 1, 2), reverse=True)]


def write_evaluation(run: Path, file: str, record: dict[str, Any]) -> None:
    """Write RUN/eval/`file`."""
    make_folder(run / EVAL)
    write_json(run / EVAL / file, record)


def perplexities(evaluations: Iterable[dict[str, Any]], split: str, context: int) -> list[dict[str, Any]]:
    """Those of the evaluations that scored a split, with a stride of the model's context."""
    return [
        found
        for found in evaluations
        if found["perplexity"] and found["perplexity"]["split"] == split and found["stride"] == context
    ]


def task_scores(evaluations: Iterable[dict[str, Any]]) -> tuple[int | None, dict[str, Any]]:
    """The highest step with complete evaluations of tasks, and each task's scores there with the fewest examples before
    a question; (None, {}) where there is none.
    """
    complete = [found for found in evaluations if found["tasks"] and not found["harness"]["limit"]]
    for step, same_step in groupby(complete, key=itemgetter("step")):
        tasks: dict[str, Any] = {}
        for found in same_step:
            for name, scores in found["tasks"].items():
                known = tasks.setdefault(name, scores)
                if scores["num_fewshot"] < known["num_fewshot"]:
                    tasks[name] = scores
        return step, tasks
    return None, {}


def partial_tasks(evaluations: Iterable[dict[str, Any]]) -> set[str]:
    """The tasks that were evaluated only with `--limit`."""
    partial: set[str] = set()
    complete: set[str] = set()
    for found in evaluations:
        if found["tasks"]:
            (partial if found["harness"]["limit"] else complete).update(found["tasks"])
    return partial - complete


def perplexity(nats: float) -> float | None:
    """exp of a mean loss; None where that is more than a float, and so JSON, can hold."""
    return math.exp(nats) if nats < math.log(sys.float_info.max) else None


def average_accuracy(tasks: Iterable[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """The mean of tasks' "acc", and of their "chance".

    (None, None) where some tasks have answers to choose from and others a text to continue: right answers by chance are
    so common among the former, and so rare among the latter, that their mean says nothing.
    """
    scored = [task for task in tasks if task.get("acc") is not None]
    chances = [task.get("chance") for task in scored]
    known = [chance for chance in chances if chance is not None]
    if not scored or len(known) not in (0, len(scored)):
        return None, None
    return fmean(task["acc"] for task in scored), fmean(known) if known else None


def write_usage(stem: Path, entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write a usage report: first its arrays, then its json file."""
    file, arrays_file = (stem.with_name(f"{stem.name}.{ending}") for ending in ("json", "npz"))
    remove_file(file)  # it belongs to the arrays that are replaced now
    write_arrays(arrays_file, arrays)
    write_json(file, entry)


def read_usage(
    stem: Path, checkpoint: str, source: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What `write_usage` wrote; None where there is nothing, or it was measured on another checkpoint or source, or
    (with a warning) is damaged.
    """
    file, arrays_file = (stem.with_name(f"{stem.name}.{ending}") for ending in ("json", "npz"))
    try:
        written = file.stat().st_mtime_ns
        entry: dict[str, Any] = read_json(file, "the usage report", exit_code=1, schema=Measured)
        if (entry["checkpoint"], entry.get("source")) != (checkpoint, source):
            return None
        arrays = read_arrays(arrays_file)
        # A process that has replaced the arrays since has first deleted the json file.
        return (entry, arrays) if file.stat().st_mtime_ns == written else None
    except OSError:  # there is none, or it has gone
        return None
    except UserError as error:
        if file.exists():
            warn(f"{error.message}; it is measured again")
        return None


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays by name to a compressed .npz file, whose folder is made if it is missing."""
    make_folder(path.parent)
    with writing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; each is stored with a checksum.

    Raises:
        UserError: (exit code 1) the file is missing or damaged.
    """
    try:
        with open_file(path) as stored, np.load(stored, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # zip, zlib, the headers' parser and the allocator: each has its own errors
        why = f"{type(error).__name__}: {error}"
        if "allow_pickle" in why:  # numpy's advice on what is neither .npy nor .npz
            why = "not an .npz file"
        raise UserError(f"{path} is missing or damaged: {why}", MAKE_AGAIN, exit_code=1) from None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl that are events; others are skipped."""
    if not path.exists():
        return
    with open_file(path, "r", encoding="utf-8", errors="replace") as file:
        for text in file:
            with suppress(ValueError, RecursionError, TypeError):  # torn by a kill, or not an event
                yield check_json(json.loads(text), Event)


def validations(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The validations in a log on as many tokens as the last one: `eval.tokens` may change at a resume, and losses and
    usage before that are of another text.
    """
    found = [event for event in events if event["event"] == "valid"]
    return [event for event in found if event.get("tokens") == found[-1].get("tokens")]
