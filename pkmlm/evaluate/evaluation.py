"""What `pkmlm eval` does: the perplexity of a text and the accuracy on tasks, in one record that the run keeps."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pkmlm.console import token_progress
from pkmlm.distributed import World
from pkmlm.environment import work_offline_without_hub
from pkmlm.errors import UserError
from pkmlm.evaluate.answers import open_answers, score_answers
from pkmlm.evaluate.documents import TextChoice, chosen_documents
from pkmlm.evaluate.load import LoadedRun, load_on_all_ranks
from pkmlm.evaluate.perplexity import score
from pkmlm.runs.results import perplexity_file, tasks_file, write_evaluation

NO_PERPLEXITY: dict[str, Any] = {"stride": None, "source": None, "perplexity": None}
NO_TASKS: dict[str, Any] = {"tasks": {}, "average_acc": None}


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate_run`.

    Attributes:
        stride: as requested, see `score`.
        record: what `pkmlm eval --json` prints.
        samples: those of answers and of tasks, see `score_answers` and `score_tasks`.
        warnings: about what may make the results misleading.
    """

    run: LoadedRun
    choice: TextChoice
    stride: int | None
    record: dict[str, Any]
    samples: list[dict[str, Any]]
    warnings: list[str]

    def keep(self) -> list[str]:
        """Write the results into RUN/eval/; an exported folder is left unchanged.

        Returns:
            a warning if they cannot be written.
        """
        if self.run.exported:
            return []
        record = {**self.record, "checkpoint": self.run.checkpoint}
        try:
            if record["perplexity"] is not None:
                split = record["perplexity"]["split"]
                own = self.choice.text is None and split == (self.choice.split or "test")
                name = split if own else f"text-{split}-{record['source']['sha256'][:8]}"
                name += "-answers" if "answers" in record else ""
                alone = {key: value for key, value in record.items() if key != "harness"}
                file = perplexity_file(name, record["step"], self.stride)
                write_evaluation(self.run.path, file, {**alone, **NO_TASKS})
            if record["tasks"]:
                write_evaluation(self.run.path, tasks_file(record), {**record, **NO_PERPLEXITY})
        except UserError as error:
            return [f"the results are not kept in the run: {error.message}"]
        return []


def evaluate_run(
    path: str,
    step: str,
    choice: TextChoice,
    world: World,
    *,
    stride: int | None = None,
    answers: bool = False,
    tasks: str | None = None,
    task_data: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    base: str | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Evaluate a run or an export; all processes of `world` call it and share the work.

    Args:
        step: "latest", "best" or a number.
        choice: the text; with tasks, perplexity is computed only if the user chose a text.
        stride: tokens scored by a window, see `score`.
        answers: whether prompts of the split are answered, too, see `score_answers`.
        tasks, task_data, num_fewshot: see `load_tasks`.
        limit, batch_size: see `score_tasks`.
        base: see `load_run`.
        quiet: show no progress.

    Raises:
        UserError: the run, the text or the tasks cannot be loaded; scores are not finite (exit code 1).
    """
    if tasks is not None:  # first: bad rows are reported before a model is loaded
        if task_data is None:
            work_offline_without_hub()
        from pkmlm.evaluate.lm_eval import score_tasks  # this import takes seconds
        from pkmlm.evaluate.tasks import load_tasks

        loaded = load_tasks(tasks, None if task_data is None else Path(task_data), num_fewshot)
    quiet = quiet or world.rank > 0
    if world.size > 1:
        choice.refuse_standard_input("several processes cannot read one standard input")
    run = load_on_all_ranks(path, step, world, base)
    record: dict[str, Any] = {"run": run.name, "step": run.step, **NO_PERPLEXITY, **NO_TASKS}
    samples: list[dict[str, Any]] = []
    warnings: list[str] = []
    if tasks is None or choice.explicit:
        asked = open_answers(run, choice) if answers else None
        documents = chosen_documents(choice, run, quiet)
        with token_progress("scoring", documents.tokens, quiet) as advance:
            found = score(run.model, documents, run.prefix, stride=stride, advance=advance, world=world)
        assert found is not None
        record |= {"stride": stride or run.model.context, "source": documents.source, "perplexity": asdict(found)}
        warnings += documents.warnings
        if asked is not None:
            with token_progress("answering", sum(asked[1].values()), quiet) as advance:
                record["answers"], samples = score_answers(run, *asked, advance, world)
        if tasks is not None and world.rank == 0:  # the tasks may fail, or be stopped, after hours
            Evaluation(run, choice, stride, record, samples, warnings).keep()
    if tasks is not None:
        with token_progress("scoring", 0, quiet) as advance:
            scored, of_tasks = score_tasks(run, loaded, limit=limit, batch_size=batch_size, advance=advance)
        record |= scored
        samples += of_tasks
        for name, facts in record["tasks"].items():
            if 2 * facts["truncated"] > facts["requests"]:
                warnings.append(
                    f"{name}: {facts['truncated']:,} of {facts['requests']:,} requests are longer than "
                    f"the context of {run.model.context:,}: their beginnings were cut"
                )
    return Evaluation(run, choice, stride, record, samples, warnings)
