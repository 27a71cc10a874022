"""What `usage-report` shows of each run: measured on a text, or read from RUN/usage, where it is kept.

Needs torch only to measure.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pkmlm.console import token_progress, warn
from pkmlm.data.corpus import Corpus
from pkmlm.data.sources import expand_glob, find_source
from pkmlm.errors import UserError, printable
from pkmlm.evaluate.documents import TextChoice, chosen_documents
from pkmlm.export.config import ATTACHED, CONFIG, is_export, is_pretrained, read_config
from pkmlm.files import MANIFEST, read_json, sha256_of
from pkmlm.measure.usage import MemoryUsage, with_pools
from pkmlm.memory.address import Addresses
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import checkpoint_digest, read_progress
from pkmlm.runs.results import read_usage, usage_stem, write_arrays, write_usage

if TYPE_CHECKING:  # these modules import torch
    from pkmlm.distributed import World
    from pkmlm.measure.slots import PageSlots

ARRAYS = ("counts_HK", "masses_HK", "squares_H")  # of a MemoryUsage, as its run keeps them
MAYBE = ("common_HH", "spread_3", "weighing_H")  # those that hash tables do not have


class RunUsage(NamedTuple):
    """How the memories of one checkpoint, or of an exported folder, are used on a text.

    Attributes:
        run: its folder; for an export, only path, name and metrics (which are empty) can be used.
        entry: of `usage-report --format json`.
        memories: what was counted.
        slots: what a page shows of each memory's slots; empty unless that was asked for.
    """

    run: RunDirectory
    entry: dict[str, Any]
    memories: list[MemoryUsage]
    slots: "list[PageSlots]"


class Reading(NamedTuple):
    """How texts are read for reports.

    Attributes:
        choice: of the text.
        quiet: show no progress.
        world: the processes that share each pass over the text; only rank 0's reports count. None: one process.
        details: describe single slots, too; rank 0 does this alone: contexts of several processes are not merged.
        base: see `load_run`.
    """

    choice: TextChoice
    quiet: bool
    world: "World | None"
    details: bool
    base: str | None


def run_or_export(path: str) -> RunDirectory:
    """A run, or an exported folder as if it were one.

    Raises:
        UserError: there is neither.
    """
    return RunDirectory(path) if is_export(Path(path)) else RunDirectory.existing(path)


def has_memory(run: RunDirectory) -> bool:
    """Whether the model of a run or an export, or what is attached to a model, has a memory."""
    if (run.path / ATTACHED).is_file():
        facts = read_json(run.path / ATTACHED, "the attached memory's description", exit_code=1, schema=dict[str, Any])
        return facts.get("kind") != "dense"
    if is_export(run.path):
        return not is_pretrained(run.path) and bool(read_config(run.path / CONFIG)[0].model.memories)
    return bool(run.recipe().model.memories)


def usage_reports(runs: Mapping[str, RunDirectory], steps: Sequence[str], reading: Reading) -> list[RunUsage]:
    """A report of each run at each step: the one that is kept for the same checkpoint and text, or a new one, which is
    then kept.

    Args:
        runs: by their names in the reports.
        steps: "latest", "best" or a number.
        reading: of the text, for all of them.

    Raises:
        UserError: there is no such checkpoint or text, or it is damaged; none of the models has a memory.
    """
    if not any(has_memory(run) for run in runs.values()):
        what = f"{', '.join(runs)}: the model has no memory to report on"
        raise UserError(what, "give a run with a memory")
    world = reading.world
    if reading.details and world and world.rank > 0:
        return []
    for run in runs.values():
        for step in steps:
            if not is_export(run.path):
                run.resolve(step)  # so that a missing one is refused before the first pass
    reports = []
    for name, run in runs.items():
        for step in steps:
            report = _report(run, step, reading._replace(world=None if reading.details else world))
            report.entry["run"] = f"{name}@{step}" if len(steps) > 1 else name
            reports.append(report)
    sources = [report.entry["source"] for report in reports if "source" in report.entry]
    if len({source.get("sha256", source.get("text")) for source in sources}) > 1:
        told = "the runs were measured on different texts, or with different tokenizers"
        reports[-1].entry["warnings"] = [*reports[-1].entry["warnings"], told]
    return reports


def _report(run: RunDirectory, step: str, reading: Reading) -> RunUsage:
    choice, world = reading.choice, reading.world
    texts = [] if choice.text is None else sorted(map(Path, expand_glob(choice.text)))
    for text in texts:
        find_source(str(text), None)
    if is_export(run.path):  # nothing is written into an export
        return _measure(run, step, reading)
    if world and world.size > 1:
        step = str(world.broadcast(run.resolve(step)))
    return run.of(step, partial(_report_of, run, reading, texts))


def _report_of(run: RunDirectory, reading: Reading, texts: Sequence[Path], folder: Path) -> RunUsage:
    """The report of one checkpoint of a run; `texts` are those that `reading` chooses."""
    choice, world = reading.choice, reading.world
    first = world is None or world.rank == 0  # other ranks keep nothing
    number = read_progress(folder).step  # refuses a damaged checkpoint
    # What the report depends on besides the checkpoint: hashes of the text or tokens, and how the text is read.
    if choice.text is not None:
        sha256 = " ".join(map(sha256_of, texts))
        source: dict[str, Any] = {"text": sha256, "separator": choice.separator, "field": choice.field}
        name = f"text-{Path(choice.text).name}"
    else:
        name = choice.split or "test"
        corpus = Corpus(choice.token_folders(run.path, run.recipe_of(number)), name)
        source = {"sha256": corpus.sha256, "corpus": corpus.hashes}  # a run refuses tokens with other hashes
    stem = usage_stem(run.path, name, number)
    kept = load_usage(stem, checkpoint_digest(folder), source) if first and not reading.details else None
    if world.broadcast(kept is not None) if world else kept is not None:
        return RunUsage(run, *(kept or ({}, [])), slots=[])
    report = _measure(run, str(number), reading)
    if first:
        report.entry["source"] = source
        try:
            save_usage(stem, report.entry, report.memories)
        except UserError as error:  # for example in another user's folder; the report is valid
            warn(f"the report is not kept: {error.message}")
    return report


def _measure(run: RunDirectory, step: str, reading: Reading) -> RunUsage:
    """Make a report by reading the text."""
    from pkmlm.evaluate.load import load_on_all_ranks
    from pkmlm.measure.measure_usage import measure_usage
    from pkmlm.measure.ngrams import all_collisions, ngrams_of
    from pkmlm.measure.slots import PageSlots, index_slots, page_slots

    choice, quiet, world, details, base = reading
    loaded = load_on_all_ranks(run.path, step, world, base)
    quiet = quiet or (world is not None and world.rank > 0)
    documents = chosen_documents(choice, loaded, quiet)
    slots: list[PageSlots] = []
    ngrams = ngrams_of(loaded.model)
    with token_progress(f"reading {printable(loaded.name)}", documents.tokens, quiet) as advance:
        if details:
            indexes = index_slots(loaded, documents, advance)
            memories = with_pools([index.usage for index in indexes])
            ngrams = indexes[0].ngrams if indexes else ngrams
        else:
            memories = measure_usage(loaded, documents, advance, world, ngrams)
    if details and memories:
        slots = page_slots(loaded, indexes, chosen_documents(choice, loaded))
        slots += [PageSlots([], None, [])] * (
            len(memories) - len(indexes)
        )  # the slots of pools are shown with their layers
    entry = {
        "run": loaded.name,
        "step": loaded.step,
        "checkpoint": loaded.checkpoint,
        "split": documents.name,
        "memories": [memory.as_json() for memory in memories],
        "warnings": list(documents.warnings),
    }
    if found := all_collisions(loaded.model, ngrams):
        entry["ngrams"] = found
    return RunUsage(run, entry, memories, slots)


def save_usage(stem: Path, entry: dict[str, Any], memories: list[MemoryUsage]) -> None:
    """Keep a usage report in its run, so that tables and plots need no second forward pass.

    Args:
        stem: of `runs.results.usage_stem`.
        entry: of `usage-report --format json`, with what it was measured on ("source").
    """
    arrays = {f"{number}-{name}": getattr(m, name) for number, m in enumerate(memories) for name in ARRAYS + MAYBE}
    write_usage(stem, entry, {key: array for key, array in arrays.items() if array is not None})


def load_usage(stem: Path, checkpoint: str, source: dict[str, Any]) -> tuple[dict[str, Any], list[MemoryUsage]] | None:
    """What `save_usage` wrote; None if that is missing, damaged, or was measured on another checkpoint or source."""
    kept_files = read_usage(stem, checkpoint, source)
    if kept_files is None:
        return None
    entry, arrays = kept_files
    memories = []
    for number, facts in enumerate(entry["memories"]):
        fields = {key: facts[key] for key in ("memory", "layer", "kind", "tokens")}
        fields |= {name: arrays[f"{number}-{name}"] for name in ARRAYS}
        fields |= {name: arrays.get(f"{number}-{name}") for name in MAYBE}
        addresses = Addresses(facts["slots"], **facts["addresses"])
        pool, part = tuple(facts.get("pool", ())), facts.get("part", "")
        memories.append(MemoryUsage(**fields, addresses=addresses, pool=pool, part=part))
    return entry, memories


def export_usage(path: Path, report: RunUsage) -> None:
    """Write how memories are used on a text as arrays (.npz), for methods that choose slots by their use.

    For each memory, by layer, name and part ("3.pkm", "1.tables.ffn2"; a table that layers share: "plus"):
        3.pkm.counts   int64 (heads, slots): reads of each slot by each head (of tables: (tables, rows))
        3.pkm.masses   float64, same shape: the sum of the absolute values of their weights
        3.pkm.tokens   int64: positions that were counted
    and for the report: run, step, split, and sha256 (of the checkpoint's or the export's manifest, which lists the
    sha256 of every file; empty for an export without one, as `transformers` saves it).
    """
    entry, manifest = report.entry, report.run.path / MANIFEST
    sha256 = entry["checkpoint"] or (sha256_of(manifest) if manifest.exists() else "")
    facts = {key: entry[key] for key in ("run", "step", "split")} | {"sha256": sha256}
    arrays = {key: np.array(value) for key, value in facts.items()}
    for memory in report.memories:
        where = memory.label.removeprefix("layer ").replace(" ", ".")
        arrays[f"{where}.counts"], arrays[f"{where}.masses"] = memory.counts_HK, memory.masses_HK
        arrays[f"{where}.tokens"] = np.array(memory.tokens)
    write_arrays(path, arrays)
