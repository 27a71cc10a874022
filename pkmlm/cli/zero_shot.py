"""The part of `pkmlm eval` that scores zero-shot tasks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pkmlm.cli.outputs import free_file
from pkmlm.console import warn
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from pkmlm.distributed import World
    from pkmlm.evaluate.load import LoadedRun
    from pkmlm.evaluate.tasks import TaskSource


@dataclass(frozen=True)
class Asked:
    """The options of `pkmlm eval` that speak of tasks; None and False where they were not given."""

    tasks: str | None
    task_data: str | None
    limit: int | None
    num_fewshot: int | None
    batch_size: int | None
    log_samples: str | None
    force: bool

    def refuse_contradictions(self) -> None:
        """Refuse options that would do nothing, and a file for samples that cannot be written."""
        if self.tasks is None:
            for name in ("task_data", "limit", "num_fewshot", "batch_size", "log_samples"):
                if getattr(self, name) is not None:
                    raise UserError(f"--{name.replace('_', '-')} goes with --tasks")
            return
        free_file("--log-samples", self.log_samples, self.force)


class Prepared(NamedTuple):
    """The tasks that are asked for, with their rows."""

    sources: Sequence["TaskSource"]
    tasks: dict[str, "ConfigurableTask"]


def prepare(names: str, task_data: str | None, num_fewshot: int | None) -> Prepared:
    """Find and check the tasks and their rows: what is wrong with them is told before a model is loaded."""
    from pkmlm.evaluate.harness import build_tasks
    from pkmlm.evaluate.tasks import find_tasks

    sources = find_tasks(names, None if task_data is None else Path(task_data), num_fewshot)
    return Prepared(sources, build_tasks(sources, num_fewshot))


def score_tasks(
    run: "LoadedRun", prepared: Prepared, asked: Asked, world: "World", quiet: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The part of the record that tells of tasks: "tasks", "average_acc" and "harness"; and the samples."""
    from pkmlm.console import token_progress
    from pkmlm.evaluate.harness import run_tasks, settings

    with token_progress("scoring", 0, quiet or world.rank > 0) as advance:
        facts, samples = run_tasks(
            run,
            prepared.sources,
            prepared.tasks,
            limit=asked.limit,
            batch_size=asked.batch_size,
            advance=advance,
        )
    right = [each["acc"] for each in facts.values() if each["acc"] is not None]
    record = {
        "tasks": facts,
        "average_acc": fmean(right) if right else None,
        "harness": {
            **settings(run),
            "batch_size": asked.batch_size or "auto",
            "limit": asked.limit,
            "processes": world.size,
        },
    }
    return record, samples


def warn_of_cuts(record: dict[str, Any]) -> None:
    """Say on standard error of which tasks more than half of the requests lost their beginning."""
    for name, facts in record["tasks"].items():
        if 2 * facts["truncated"] > facts["requests"]:
            warn(
                f"{name}: {facts['truncated']:,} of {facts['requests']:,} requests are longer than "
                f"the context of {record['harness']['context']:,}: their beginnings were cut"
            )


def write_samples(path: Path, samples: list[dict[str, Any]]) -> None:
    """One line of JSON for each document of each task."""
    from pkmlm.runs.files import writing

    with writing(path, "w") as file:
        for sample in samples:
            file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
