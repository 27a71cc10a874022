"""A run directory: where a training run keeps its recipe, its log, its metrics and its checkpoints.

Nothing here is ordered by time stamps: the step numbers in the names are the order.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pkmlm.data.tokenizer_file import TOKENIZERS, tokenizer_file
from pkmlm.errors import UserError
from pkmlm.files import (
    abandoned,
    locked,
    make_folder,
    read_bytes,
    read_json,
    remove_file,
    remove_leftovers,
    write_json,
    write_text,
    writing,
)
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe, dump_recipe
from pkmlm.runs.record import checkpoint_digest, read_recipe
from pkmlm.runs.results import EVAL, USAGE, read_metrics, read_results

Read = TypeVar("Read")
CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
STEP = re.compile(r"[0-9]{1,18}")
FACTS = threading.Lock()  # a checkpoint that is saved in the background notes what it took, beside other facts
# What a run keeps in its folder, besides what is measured later.
OWN = {"recipe.yaml", "run.json", "metrics.jsonl", "train.log", *TOKENIZERS, "checkpoints"}
OWN |= {"best", "latest", "done"}
# In folders of exports and attached memories: commands would take a run in them for one of these.
FOREIGN = {"config.json", "attached.json"}
CHOOSE = "choose another -o"
IMPORTED = "imported"  # the status of a run that `pkmlm import` wrote, which is no training's
LOST_RECORD = "delete it; only the record of how the run started and ended is lost"


class RunDirectory:
    """Paths and small files of a run; reading needs nothing but the folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.name = os.path.basename(os.path.realpath(self.path))
        self.held: Callable[[], bool] = lambda: True

    @classmethod
    def existing(cls, path: str | Path) -> "RunDirectory":
        """The run at `path`.

        Raises:
            UserError: there is none, or (exit code 1) its recipe is missing.
        """
        run = cls(path)
        if not run.recipe_file.is_file() and not run.steps():
            if (run.path / "config.json").is_file():
                hint = "give the run it was exported from, or turn it into one: pkmlm import"
                raise UserError(f"{path} is a model for transformers (expected a run)", hint)
            if (run.path / "attached.json").is_file():
                raise UserError(
                    f"{path} is attached to a model (expected a run)", "see what takes it with `pkmlm help attach`"
                )
            what = "is not a run directory (no recipe.yaml in it)" if run.path.exists() else "does not exist"
            raise UserError(f"run {path} {what}", "give a folder that `pkmlm train -o` wrote")
        return run

    def create(self, recipe: Recipe) -> None:
        """Make the folder and write the resolved recipe; raise UserError if a file is in the folder's place."""
        make_folder(self.checkpoints)
        write_text(self.recipe_file, dump_recipe(recipe))

    def recipe(self) -> Recipe:
        """The recipe of the latest checkpoint; before the first, that of recipe.yaml, which is a record.

        Raises:
            UserError: (exit code 1, as this is not the user's mistake) its file is missing or damaged.
        """
        recipe = self.of_latest(read_recipe)
        if recipe is not None:
            return self._with_data(recipe)
        try:
            return self._with_data(load_recipe(self.recipe_file))
        except UserError as error:
            message = f"run {self.path}: its recipe.yaml is missing or damaged: {error.message}"
            raise UserError(message, "train it again under another -o", exit_code=1) from None

    def recipe_of(self, step: int) -> Recipe:
        """The recipe that the checkpoint of a step was trained with; raises as `read_recipe` does."""
        return self._with_data(read_recipe(self.checkpoint(step)))

    def _with_data(self, recipe: Recipe) -> Recipe:
        """A recipe whose relative `data.dir`, if it does not exist, is replaced by the absolute path in run.json, if
        that exists.
        """
        if any(not os.path.isabs(folder) and not os.path.exists(folder) for folder in recipe.data.folders):
            with suppress(UserError):  # run.json is damaged, which is reported where it is needed
                found = self.facts().get("data_dir")
                data = replace(recipe.data, dir=tuple(found) if isinstance(found, list) else found)
                if data.folders and all(map(os.path.exists, data.folders)):
                    return replace(recipe, data=data)
        return recipe

    def refuse_foreign(self) -> None:
        """Refuse, before anything is written, a folder in which training would overwrite what no run wrote.

        Raises:
            UserError: the path is a file, or a folder without a run that holds a file that a run would write.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"-o {self.path} is a file (expected a folder, or nothing)", CHOOSE)
        entries = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        if ".lock" in entries or {"recipe.yaml", "run.json"} <= entries or self.steps():  # only a run has these
            return
        for name in sorted(entries & (OWN | FOREIGN)):
            why = "which training would overwrite" if name in OWN else "as a model for transformers does"
            raise UserError(f"-o {self.path} is not a run, but holds {name}, {why}", CHOOSE)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process; the kernel releases it however the process ends.

        Raises:
            UserError: another process holds it.
        """
        make_folder(self.path)
        with locked(self.path / ".lock", f"run {self.path}") as self.held:
            self.refuse_replaced()
            yield

    def refuse_replaced(self) -> None:
        """Refuse to write into a folder that has been renamed, deleted or replaced since it was locked.

        Raises:
            UserError: (exit code 1) it has been.
        """
        if not self.held():
            message = f"run {self.path} has been renamed, deleted or replaced while this process trained in it"
            hint = "nothing more is written; wherever it is now, it can be resumed from its last checkpoint"
            raise UserError(message, hint, exit_code=1)

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        if not self.checkpoints.is_dir():
            return []
        names = (CHECKPOINT.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def resolve(self, step: str) -> int:
        """The step that "latest", "best" or a number stands for.

        Raises:
            UserError: there is no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            if self.facts().get("status") == "diverged":
                hint = "train under another -o with a lower optim.lr or a longer warm-up"
                raise UserError(f"run {self.path} diverged before its first checkpoint", hint)
            if self.done() is not None:
                raise UserError(f"run {self.path} has finished, but its checkpoints are gone", "train it again")
            raise UserError(f"run {self.path} has no checkpoint yet", "let it train to its first checkpoint")
        if step == "latest":
            return steps[-1]
        if step == "best":
            best = self.best()
            if best is None:
                raise UserError(
                    f"run {self.path} has no best checkpoint: it was never validated, or the checkpoint was deleted",
                    "use the latest: --step latest, or step='latest' in Python",
                )
            return best
        if not STEP.fullmatch(step) or int(step) not in steps:
            have = ", ".join(map(str, steps))
            message = f"run {self.path} has no checkpoint at step {step[:40]} (found {have})"
            raise UserError(message, "use --step latest|best|N")
        return int(step)

    def best(self) -> int | None:
        """The step of the best validation, to which `best` points; None: there was none, or its checkpoint is gone."""
        step = self._step_in("best")
        while step is not None and step not in self.steps():
            gone, step = step, self._step_in("best")
            if step == gone:
                return None
            # a training process has found a better one since: look again
        return step

    def _step_in(self, pointer: str) -> int | None:
        with suppress(OSError, UnicodeDecodeError):
            if match := CHECKPOINT.fullmatch(read_bytes(self.path / pointer).decode().strip()):
                return int(match[1])
        return None

    def of(self, step: str, read: Callable[[Path], Read]) -> Read:
        """What a function reads of the checkpoint that `step` stands for, see `resolve`; if a training process replaces
        that meanwhile, of the one that it stands for then.
        """
        while True:
            folder = self.checkpoint(self.resolve(step))
            try:
                return read(folder)
            except UserError:
                if folder.exists():
                    raise

    def of_latest(self, read: Callable[[Path], Read]) -> Read | None:
        """What a function reads of the latest checkpoint; None where there is none."""
        return self.of("latest", read) if self.steps() else None

    def digests(self) -> set[str]:
        """The digests of the run's checkpoints, see `checkpoint_digest`."""
        found = set()
        for step in self.steps():
            with suppress(UserError):  # it has been replaced since, or its manifest is missing
                found.add(checkpoint_digest(self.checkpoint(step)))
        return found

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the run's checkpoints, see `read_results`."""
        return read_results(self.path / EVAL, self.digests())

    def usage_reports(self) -> list[dict[str, Any]]:
        """The usage reports of the run's checkpoints, see `read_results`."""
        return read_results(self.path / USAGE, self.digests())

    def done(self) -> int | None:
        """The step in the file `done`, at which training finished or ran out of patience; None where there is none."""
        try:
            match = re.search(r" at step ([0-9]{1,18})\Z", read_bytes(self.path / "done").decode().rstrip())
        except (OSError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def set_pointer(self, name: str, step: int) -> None:
        """Point `name` ("best", "latest") at a checkpoint."""
        write_text(self.path / name, f"step-{step:08d}\n")

    def facts(self) -> dict[str, Any]:
        """run.json; empty before the first write."""
        path = self.path / "run.json"
        facts: dict[str, Any] = {}
        if path.exists():
            facts = read_json(path, "the run's record", LOST_RECORD, exit_code=1, schema=dict[str, Any])
        return facts

    def step_tokens(self) -> float:
        """The tokens that a step reads, on average, as run.json says; if it does not, those of a full batch."""
        return self.facts().get("step_tokens") or self.recipe().train.batch_tokens

    def status(self) -> str | None:
        """The status of training in run.json; "killed" if that is "running", but the process has ended."""
        status: str | None = self.facts().get("status")
        if status == "running" and abandoned(self.path / ".lock"):
            status = self.facts().get("status")  # it may have ended between the two looks
            return "killed" if status == "running" else status
        return status

    def write_facts(self, **facts: Any) -> None:
        """Set keys of run.json."""
        with FACTS:
            self.refuse_replaced()
            write_json(self.path / "run.json", {**self.facts(), **facts})

    @property
    def tokenizer_file(self) -> Path:
        return tokenizer_file(self.path)

    def write_tokenizer(self, name: str, content: bytes) -> None:
        """Write the tokenizer, one of `TOKENIZERS`, and remove any other."""
        with writing(self.path / name) as file:
            file.write(content)
        for other in {*TOKENIZERS} - {name}:
            remove_file(self.path / other)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """All complete lines of metrics.jsonl; a line torn by a kill is skipped."""
        return read_metrics(self.metrics_file)

    def cut_metrics(self, step: int, *, validated: bool = True) -> None:
        """Drop what was measured after `step` (by a run that died before its next checkpoint) and torn lines.

        Args:
            validated: whether the validation of `step` itself stays.
        """
        if self.metrics_file.exists():
            with writing(self.metrics_file) as file:
                for line in self.metrics():
                    dropped = not validated and (line["step"], line["event"]) == (step, "valid")
                    if line["step"] <= step and not dropped:
                        file.write(json.dumps(line).encode() + b"\n")

    def clean(self) -> None:
        """Remove what killed processes left half-written in training; the caller holds the run's lock. A usage report
        needs no lock: one may be writing beside this.
        """
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
