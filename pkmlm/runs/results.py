"""What a run keeps besides its checkpoints: names, schemas, writing and reading of all its results.

run.json                                    how the run was started and how it ended: `RunFacts`
checkpoints/step-N/state.json               how far training was: `CheckpointState`
metrics.jsonl                               one event per line: `Event` or `DriftEvent`
eval/NAME-step-N[-stride-S].json            a perplexity: `Evaluation`; NAME is that of a split or a text, see below
eval/tasks-NAMES[-shots-K]-step-N[-limit-L].json    zero-shot tasks: `Evaluation`
usage/NAME-step-N.json, .npz                an entry of `usage-report --format json`, and its arrays: `UsageReport`
steps.json                                  how long steps take, timed in turn with those of other runs: `StepTimes`
usage/drift-step-N.npz, kept-step-N.npz     what a "drift" event was computed from, and what a resume needs for the next

Files of eval/ and usage/ hold a digest of their content (that of a report's .npz is in its .json), so that what is read
back is what was written; files of older versions have no digest and are accepted as they are. If training goes back to
an earlier step, the results of later steps are renamed to end in ".old".

In the schemas, `NotRequired` keys may be missing or null: older runs lack some. Objects may have keys that are not
listed. `check_json` checks values against the schemas.
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
from typing_extensions import NotRequired, TypedDict

from pkmlm.console import warn
from pkmlm.errors import UserError
from pkmlm.files import (
    MAKE_AGAIN,
    MANIFEST,
    Damaged,
    Manifest,
    ManifestEntry,
    check_files,
    check_json,
    json_text,
    make_folder,
    open_file,
    read_json,
    read_manifest,
    rename,
    sha256_of,
    write_json,
    writing,
)

EVAL, USAGE = "eval", "usage"  # folders of a run
STATE = "state.json"
STEPS = "steps.json"
CHECKPOINT_VERSION = 1
NAME_BYTES = 100  # of the name of a text or of tasks
DIGEST = "digest"  # key in a file of results: digest of everything else in it
ARRAYS = "arrays"  # key in a usage report: sha256 of its .npz file
RESULT = re.compile(r".+-step-([0-9]{1,18})(?:-(?:stride|limit)-[0-9]+)?\.json")
OLD = ".old"  # ends the names of results whose weights have been replaced

Number = Annotated[float, Field(allow_inf_nan=False)]
MaybeNumber = Number | None
MaybeText = str | None


class RunFacts(TypedDict):
    """run.json."""

    id: NotRequired[MaybeText]
    status: NotRequired[MaybeText]
    exit_code: NotRequired[int | None]
    parameters: NotRequired[dict[str, Number] | None]
    tokenizer_sha256: NotRequired[MaybeText]
    data_sha256: NotRequired[MaybeText]
    data_dir: NotRequired[MaybeText]
    recipe_sha256: NotRequired[MaybeText]
    log: NotRequired[ManifestEntry | None]  # metrics.jsonl as it was when run.json was signed
    versions: NotRequired[dict[str, str] | None]
    device: NotRequired[MaybeText]
    precision: NotRequired[MaybeText]
    seconds: NotRequired[MaybeNumber]
    earlier: NotRequired[list[dict[str, Any]] | None]


class ValidationState(TypedDict):
    """What the validations of a run have shown, see `runs.checkpoint.Validations`."""

    step: int | None
    best_step: int | None
    best_loss: MaybeNumber
    worse: int
    due: bool
    tokens: NotRequired[int | None]


class CheckpointState(TypedDict):
    """state.json of a checkpoint, see `runs.checkpoint.Progress`."""

    step: int
    tokens: int
    skips: int
    scaler: NotRequired[dict[str, Number] | None]
    seconds: Number
    data: dict[str, str]
    run: NotRequired[MaybeText]
    recipe: NotRequired[dict[str, str] | None]
    validations: NotRequired[ValidationState | None]


class CheckpointManifest(Manifest):
    """manifest.json of a checkpoint."""

    step: int


class Scores(TypedDict):
    """A perplexity, in the three units."""

    token_ppl: NotRequired[MaybeNumber]
    word_ppl: NotRequired[MaybeNumber]
    bits_per_byte: NotRequired[MaybeNumber]


class UniformUsage(TypedDict):
    """The share of slots that as many random reads would use."""

    usage: Number


class ValidationReads(TypedDict):
    """How a validation read a memory."""

    layer: int
    name: str
    usage: Number
    kl: NotRequired[MaybeNumber]
    uniform: UniformUsage


class Event(Scores):
    """A line of metrics.jsonl."""

    event: str
    step: int
    loss: NotRequired[MaybeNumber]
    lr: NotRequired[MaybeNumber]
    grad_norm: NotRequired[MaybeNumber]
    tokens: NotRequired[MaybeNumber]
    tokens_per_second: NotRequired[MaybeNumber]
    usage: NotRequired[list[ValidationReads] | None]


class MemoryDrift(TypedDict):
    """How training has read and moved a memory since the record before."""

    layer: int
    name: str
    slots: int
    read: int
    died: int
    woke: int
    never: int
    moved: NotRequired[MaybeNumber]


class DriftEvent(TypedDict):
    """A line of metrics.jsonl whose "event" is "drift"."""

    event: str
    step: int
    since: int
    began: int
    memories: list[MemoryDrift]


class Rows(TypedDict):
    """The file that a task's rows were read from, or a text."""

    sha256: NotRequired[MaybeText]


class TaskScore(TypedDict):
    """The results of one task."""

    acc: NotRequired[MaybeNumber]
    chance: NotRequired[MaybeNumber]
    num_fewshot: NotRequired[MaybeNumber]
    data: NotRequired[Rows | None]


class Timed(TypedDict):
    """How fast the model of a sweep's point scores text."""

    point: dict[str, str]
    recipe: NotRequired[MaybeText]
    timed_on: NotRequired[dict[str, str] | None]
    tokens_per_second: list[Number]


class SweepTimings(TypedDict):
    """What results.json of a sweep says about speed: all models were timed in turn."""

    speed: NotRequired[list[Timed] | None]


class StepTimes(TypedDict):
    """Seconds of the steps of several recipes (by their sha256), timed in turn, and what else the machine did."""

    timed_on: dict[str, str]
    busy_cores: Number
    steps: dict[str, list[Number]]


class Sourced(TypedDict):
    """A file of RUN/eval or RUN/usage that says what it was measured on."""

    source: dict[str, Any]


class Evaluation(TypedDict):
    """A file of RUN/eval, which holds either "perplexity" or "tasks"."""

    perplexity: NotRequired[Scores | None]
    source: NotRequired[Rows | None]
    tasks: NotRequired[dict[str, TaskScore] | None]


class Measure(TypedDict):
    """Usage (a fraction) and KL (nats) of a memory's reads."""

    usage: MaybeNumber
    kl: MaybeNumber


class MassMeasure(Measure):
    """The same for reads weighted by their mass, and their Gini coefficient."""

    gini: MaybeNumber


class MemoryReport(TypedDict):
    """How a text read a memory."""

    layer: int
    name: str
    slots: Number
    mass: MassMeasure
    uniform: Measure
    uniform_mass: NotRequired[Measure | None]
    effective: NotRequired[MaybeNumber]
    top_weight: NotRequired[MaybeNumber]
    pool: NotRequired[list[int] | None]


class UsageReport(TypedDict):
    """A json file of RUN/usage."""

    memories: list[MemoryReport]


class NGramReport(TypedDict):
    """What a usage report says about the n-grams of one order that the memory of a layer has read."""

    layer: int
    order: int
    distinct: int
    rows: int
    tables: int
    alone: Number
    alone_expected: Number
    alone_in_any: Number
    alone_in_any_expected: Number


class KeptUsageReport(UsageReport, Sourced):
    """A usage report with all that is needed to show it again."""

    step: int
    split: str
    ngrams: NotRequired[list[NGramReport]]
    warnings: NotRequired[list[str] | None]


# Names.


def text_name(name: str, sha256: str, separator: str | None, field: str) -> str:
    """The name of the results of a text. Other texts may have the same name, so a digest of the text's bytes and of how
    they were read is appended.
    """
    return f"text-{file_part(name)}-{digest(json.dumps([sha256, separator, field]))}"


def split_name(folder: Path, split: str, sha256: str) -> str:
    """The name of the results of a split of tokens other than the recipe's (`--data`).

    It is the split's name, which `pkmlm compare` looks for, unless `folder` already holds results of other tokens under
    that name; then a digest is appended.

    Args:
        folder: RUN/eval or RUN/usage.
        sha256: of the tokens that are measured (`Corpus.sha256`), as the "source" of results has it.
    """
    kept = set()
    for file in folder.glob("*.json"):
        if file.name.startswith(f"{split}-step-"):
            with suppress(UserError):  # damaged, or written before results had a source
                kept.add(read_signed(file, "the results", Sourced)["source"].get("sha256"))
    kept -= {None}
    return split if not kept or sha256 in kept else f"{split}-{sha256[:8]}"


def perplexity_file(name: str, step: int, stride: int | None) -> str:
    """The file of a perplexity in RUN/eval.

    Args:
        name: of the split, or what `text_name` or `split_name` made of it.
        stride: None: the model's context.
    """
    return f"{name}-step-{step}" + (f"-stride-{stride}" if stride else "") + ".json"


def tasks_file(record: dict[str, Any]) -> str:
    """The file of a record of zero-shot tasks in RUN/eval; `pkmlm compare` reads those without a limit."""
    names = "-".join(record["tasks"])
    part = file_part(names)
    if part != names:
        part += f"-{digest(names)}"
    shots = max(facts["num_fewshot"] for facts in record["tasks"].values())
    few = f"-shots-{shots}" if shots else ""
    limit = record["harness"]["limit"]
    return f"tasks-{part}{few}-step-{record['step']}" + (f"-limit-{limit}" if limit else "") + ".json"


def file_part(name: str) -> str:
    """A name without blanks and characters that are special in a shell, cut to what a file name can hold."""
    return re.sub(r"[^\w.-]+", "_", name).encode(errors="ignore")[:NAME_BYTES].decode(errors="ignore")


def digest(text: str) -> str:
    """Eight characters that keep names distinct after parts of them have been cut or replaced."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]


def usage_stem(run: Path, name: str, step: int) -> Path:
    """The path of the two files of a usage report, without their endings."""
    return run / USAGE / f"{name}-step-{step}"


def drift_file(folder: Path, step: int) -> Path:
    """Where RUN/usage keeps what the drift record of a step was computed from."""
    return folder / f"drift-step-{step}.npz"


def drift_state_file(folder: Path, step: int | str) -> Path:
    """Where RUN/usage keeps what a resume from `step`, between two drift records, needs; "*" gives the pattern."""
    return folder / f"kept-step-{step}.npz"


# Reading and writing.


def damaged_hint(folder: Path) -> str:
    """The hint for a damaged checkpoint; it depends on whether there is an earlier one, which may be intact."""
    if any(other.name < folder.name for other in folder.parent.glob("step-*")):
        return "the checkpoint is damaged: `pkmlm train` goes back to the one before it"
    return "the checkpoint is damaged, and there is none before it: copy the run's folder again, or train it again"


def read_checkpoint_manifest(folder: Path) -> dict[str, ManifestEntry]:
    """What a checkpoint's manifest says of its files.

    Raises:
        Damaged: (exit code 1) it is missing, not what was written, or that of another step than the folder's.
        UserError: (1) it cannot be read; (2) the checkpoint is of another version.
    """
    manifest: CheckpointManifest = read_manifest(
        folder, "checkpoint", CHECKPOINT_VERSION, damaged_hint(folder), schema=CheckpointManifest
    )
    if folder.name != f"step-{manifest['step']:08d}":
        what = f"{folder / MANIFEST} belongs to step {str(manifest['step'])[:20]}"
        raise Damaged(what, damaged_hint(folder), exit_code=1)
    return manifest["files"]


def read_state(folder: Path) -> CheckpointState:
    """The state.json of a checkpoint, which its manifest must list. All code that reads a state calls this.

    Raises:
        Damaged: (exit code 1) it or the manifest is missing, or not what was written.
        UserError: (1) one cannot be read; (2) the checkpoint is of another version.
    """
    files = read_checkpoint_manifest(folder)
    if STATE not in files:
        raise Damaged(f"{folder / MANIFEST} does not list {STATE}", damaged_hint(folder), exit_code=1)
    check_files(folder, files, [STATE], damaged_hint(folder))
    path, what = folder / STATE, "the checkpoint's state"
    state: CheckpointState = read_json(path, what, damaged_hint(folder), exit_code=1, schema=CheckpointState)
    return state


class Altered(Damaged):
    """A file of results is not what was written."""

    def __init__(self, path: Path):
        super().__init__(f"{path} has been altered: its digest is missing or does not match", "measure again", 1)


def signed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the digest of its content."""
    return record | {DIGEST: content_digest(record)}


def content_digest(record: dict[str, Any]) -> str:
    """The sha256 of a record's content, however its JSON is laid out."""
    content = json.loads(json_text({key: value for key, value in record.items() if key != DIGEST}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_signed(path: Path, what: str, schema: Any, hint: str = MAKE_AGAIN) -> dict[str, Any]:
    """The content of a file that was `signed`, or that is of an older version and has no digest.

    Raises:
        Altered: the digest does not match the content.
        UserError: (exit code 1) the file is damaged or cannot be read.
    """
    record: dict[str, Any] = read_json(path, what, hint, exit_code=1, schema=schema)
    if DIGEST in record and record[DIGEST] != content_digest(record):
        raise Altered(path)
    record.pop(DIGEST, None)
    return record


def altered_results(run: Path) -> list[str]:
    """A warning for each file of results that is damaged or has been altered; the functions below leave these out."""
    warnings = []
    for folder, schema in ((EVAL, Evaluation), (USAGE, UsageReport)):
        for file in sorted((run / folder).glob("*.json")):
            try:
                read_signed(file, "the results", schema)
            except Damaged as error:
                warnings.append(f"{error.message}; it is left out")
            except UserError:
                pass  # reported where the file is needed
    return warnings


def set_aside_later(run: Path, step: int) -> list[str]:
    """Rename the results of steps after `step`, to which training goes back, and return a warning if there are any:
    otherwise they would be taken for results of the weights that training now saves at these steps.

    Raises:
        UserError: (exit code 1) the system refused to rename one.
    """
    later = []
    for folder in (run / EVAL, run / USAGE):
        for file in sorted(folder.glob("*.json")):
            named = RESULT.fullmatch(file.name)
            if named and int(named[1]) > step:
                later.append(file)
                for path in (file, file.with_suffix(".npz")):
                    if path.exists():
                        rename(path, path.with_name(f"{path.name}{OLD}"))
    if not later:
        return []
    names = ", ".join(str(file.relative_to(run)) for file in later)
    return [f"{names}: measured on weights that are now trained again; renamed to end in {OLD}"]


def write_evaluation(run: Path, file: str, record: dict[str, Any]) -> None:
    """Write RUN/eval/`file`.

    Raises:
        UserError: (exit code 1) the system refused a write.
    """
    make_folder(run / EVAL)
    write_json(run / EVAL / file, signed(record))


def read_evaluation(path: Path) -> dict[str, Any]:
    """A file of RUN/eval.

    Raises:
        Altered: it is not what was written.
        UserError: (exit code 1) it is damaged or cannot be read.
    """
    return read_signed(path, "the results", Evaluation)


def test_perplexity(run: Path) -> tuple[int | None, dict[str, Any]]:
    """The evaluation of the test split at the highest step, and this step; (None, {}) where there is none."""
    return next(_results(run / EVAL, "test", "perplexity"), (None, {}))


def test_usage(run: Path) -> tuple[int | None, dict[str, Any]]:
    """The usage report of the test split at the highest step, and this step; (None, {}) where there is none."""
    return next(_results(run / USAGE, "test", "memories"), (None, {}))


def task_scores(run: Path) -> tuple[int | None, dict[str, Any]]:
    """The highest step with complete evaluations of tasks, and each task's scores there with the fewest examples before
    a question; (None, {}) where there is none.
    """
    for step, found in groupby(_results(run / EVAL, ".+", "tasks"), key=itemgetter(0)):
        tasks: dict[str, Any] = {}
        for _, results in found:
            for name, scores in results["tasks"].items():
                known = tasks.setdefault(name, scores)
                if (scores.get("num_fewshot") or 0) < (known.get("num_fewshot") or 0):
                    tasks[name] = scores
        return step, tasks
    return None, {}


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


def partial_tasks(run: Path) -> set[str]:
    """The tasks that the run has evaluated only with `--limit`."""
    partial: set[str] = set()
    for file in (run / EVAL).glob("tasks-*-limit-*.json"):
        with suppress(Damaged):
            partial.update(read_evaluation(file).get("tasks") or ())
    for _, results in _results(run / EVAL, ".+", "tasks") if partial else ():
        partial -= results["tasks"].keys()
    return partial


def _results(folder: Path, names: str, holding: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, results) of each NAME-step-N.json whose NAME matches `names` and which holds the key `holding`, from the
    highest step down.
    """
    name = re.compile(rf"(?:{names})-step-([0-9]{{1,18}})\.json")
    steps = [(int(m[1]), file) for file in folder.glob("*.json") if (m := name.fullmatch(file.name))]
    schema = UsageReport if holding == "memories" else Evaluation
    for step, file in sorted(steps, key=lambda found: (-found[0], -found[1].stat().st_mtime_ns)):
        try:
            results = read_signed(file, "the results", schema)
        except Damaged:
            continue
        if results.get(holding):
            yield step, results


def write_usage(stem: Path, entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write a usage report: first its arrays, then its json file.

    Raises:
        UserError: as `write_evaluation`.
    """
    file = stem.with_name(f"{stem.name}.npz")
    write_arrays(file, arrays)
    write_json(stem.with_name(f"{stem.name}.json"), signed(entry | {ARRAYS: sha256_of(file)}))


def read_usage(stem: Path, source: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What `write_usage` wrote; None where there is nothing, or it was measured on another `source`, or (with a
    warning) is damaged.
    """
    file, arrays_file = (stem.with_name(f"{stem.name}.{ending}") for ending in ("json", "npz"))
    if not file.exists():
        return None
    try:
        entry = read_signed(file, "the usage report", KeptUsageReport)
        if entry["source"] != source:
            return None
        if entry.pop(ARRAYS, None) not in (None, sha256_of(arrays_file)):
            raise Altered(arrays_file)
        return entry, read_arrays(arrays_file)
    except UserError as error:
        warn(f"{error.message}; it is measured again")
        return None


def signed_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays with the digest of their names, types, shapes and values."""
    return arrays | {DIGEST: np.array(arrays_digest(arrays))}


def arrays_digest(arrays: dict[str, np.ndarray]) -> str:
    """See `signed_arrays`."""
    digest = hashlib.sha256()
    for name in sorted(arrays.keys() - {DIGEST}):
        array = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(array.data)
    return digest.hexdigest()


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays by name to a compressed .npz file, whose folder is made if it is missing."""
    make_folder(path.parent)
    with writing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path, *, signed: bool = False) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, without the digest that `signed_arrays` adds.

    Args:
        signed: whether they must have a digest.

    Raises:
        Altered: the digest does not match, or a required one is missing.
        UserError: (exit code 1) the file is missing or damaged.
    """
    try:
        with open_file(path) as stored, np.load(stored, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # zip, zlib, the headers' parser and the allocator: each has its own errors
        why = f"{type(error).__name__}: {error}"
        if "allow_pickle" in why:  # numpy's advice on what is neither .npy nor .npz
            why = "not an .npz file"
        raise UserError(f"{path} is missing or damaged: {why}", exit_code=1) from None
    if (signed or DIGEST in arrays) and str(arrays.get(DIGEST)) != arrays_digest(arrays):
        raise Altered(path)
    arrays.pop(DIGEST, None)
    return arrays


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl that are events; others are skipped."""
    if not path.exists():
        return
    with open_file(path, "r", encoding="utf-8", errors="replace") as file:
        for text in file:
            with suppress(ValueError, RecursionError, TypeError):  # torn by a kill, or not an event
                line = check_json(json.loads(text), Event)
                yield check_json(line, DriftEvent) if line["event"] == "drift" else line


def validations(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The validations in a log on as many tokens as the last one: `eval.tokens` may change at a resume, and losses and
    usage before that are of another text. (Older logs do not give the number of tokens.)
    """
    found = [event for event in events if event["event"] == "valid"]
    return [event for event in found if event.get("tokens") in (None, found[-1].get("tokens"))]
