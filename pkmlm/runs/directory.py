"""A run directory: where a training run keeps its recipe, its log, its metrics and its checkpoints.

Nothing here is ordered by time stamps: the step numbers in the names are the order.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pkmlm.console import warn
from pkmlm.errors import UserError
from pkmlm.files import (
    abandoned,
    locked,
    make_folder,
    open_file,
    read_bytes,
    read_json,
    remove_file,
    remove_leftovers,
    sha256_of,
    write_json,
    write_text,
    writing,
)
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe, dump_recipe, flatten, scalar_text
from pkmlm.runs.results import (
    EVAL,
    USAGE,
    Altered,
    CheckpointState,
    RunFacts,
    read_metrics,
    read_signed,
    read_state,
    signed,
)

CHECKPOINT = re.compile(r"step-([0-9]{8,18})")
STEP = re.compile(r"[0-9]{1,18}")
# A run, a folder of tokens and an export hold one of these.
TOKENIZERS = (SENTENCEPIECE_FILE, BYTE_LEVEL_FILE) = ("tokenizer.model", "tokenizer.json")
# What a run keeps in its folder, besides what is measured later.
OWN = {"recipe.yaml", "run.json", "metrics.jsonl", "train.log", *TOKENIZERS, "checkpoints"}
OWN |= {"best", "latest", "done"}
CHOOSE = "choose another -o"
LOST_RECORD = "delete it: then only the record of how the run was started and how it ended is lost"


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer's file in a folder; if there is none, the path that it usually has."""
    return next((folder / name for name in TOKENIZERS if (folder / name).exists()), folder / SENTENCEPIECE_FILE)


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
        if not run.recipe_file.is_file():
            if (run.path / "config.json").is_file():
                raise UserError(f"{path} is an export (expected a run)", "give the run it was exported from")
            if (run.path / "attached.json").is_file():
                raise UserError(
                    f"{path} is attached to a model (expected a run)", "see what takes it with `pkmlm help attach`"
                )
            if run.steps():
                run.recipe()  # says that it is missing
            what = "is not a run directory (no recipe.yaml in it)" if run.path.exists() else "does not exist"
            raise UserError(f"run {path} {what}", "give a folder that `pkmlm train -o` wrote")
        return run

    def create(self, recipe: Recipe) -> None:
        """Make the folder and write the resolved recipe; raise UserError if a file is in the folder's place."""
        make_folder(self.checkpoints)
        write_text(self.recipe_file, dump_recipe(recipe))

    def recipe(self) -> Recipe:
        """The resolved recipe that the run was started with. A relative `data.dir` that does not exist is replaced by
        the absolute path in run.json, if that exists.

        Raises:
            UserError: (exit code 1, as this is not the user's mistake) its file is missing or damaged.
        """
        try:
            recipe = load_recipe(self.recipe_file)
        except UserError as error:
            message = f"run {self.path}: its recipe.yaml is missing or damaged: {error.message}"
            hint = f"`pkmlm recipe show RECIPE -s ... > {self.recipe_file}` writes it again, if you know what it was"
            raise UserError(message, hint, exit_code=1) from None
        if recipe.data.dir is not None and not os.path.isabs(recipe.data.dir) and not os.path.exists(recipe.data.dir):
            with suppress(UserError):  # run.json is damaged, which is reported where it is needed
                folder = self.facts().get("data_dir")
                if folder is not None and os.path.exists(folder):
                    return replace(recipe, data=replace(recipe.data, dir=folder))
        return recipe

    def refuse_foreign(self) -> None:
        """Refuse, before anything is written, a folder in which training would overwrite what no run wrote.

        Raises:
            UserError: the path is a file, or a folder without a run that holds a file that a run would write.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"-o {self.path} is a file (expected a folder, or nothing)", CHOOSE)
        entries = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        known = {"recipe.yaml", "run.json"} & entries
        if ".lock" in entries or len(known) == 2 or (known and self.steps()):  # only a run has these
            return
        for name in sorted(entries & OWN):
            raise UserError(f"-o {self.path} is not a run, but holds {name}, which training would overwrite", CHOOSE)

    def refuse_orphans(self) -> None:
        """Refuse to start over where results of deleted checkpoints would be taken for those of the new ones.

        Raises:
            UserError: there are such results.
        """
        kept = [f"{name}/" for name in (EVAL, USAGE) if any((self.path / name).glob("*.json"))]
        if kept and not self.steps():
            message = f"-o {self.path} has no checkpoints, but results of deleted ones in {' and '.join(kept)}"
            raise UserError(message, f"delete them to train it again, or {CHOOSE}")

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
        """The step of the best validation, if its checkpoint exists: the one that `best` points to, with which the
        state of the latest checkpoint must agree.

        Raises:
            UserError: (exit code 1) they disagree.
        """
        steps, pointed = self.steps(), None
        with suppress(OSError, UnicodeDecodeError):
            match = CHECKPOINT.fullmatch(read_bytes(self.path / "best").decode().strip())
            pointed = int(match[1]) if match and int(match[1]) in steps else None
        try:
            latest = self.latest_state()
        except UserError as error:
            warn(f"{error.message}; the best checkpoint is the one that {self.path / 'best'} points to")
            return pointed
        shown = latest.get("validations") if latest else None
        best = shown["best_step"] if shown else None
        if shown is None or best is None or pointed == best:
            return pointed
        events = {(line["event"], line["step"]) for line in self.metrics()}
        if pointed == steps[-1] != shown["step"] and ("valid", pointed) in events:  # validated after it was saved
            return pointed
        if pointed is None or best == steps[-1]:  # saved a moment ago, and not yet pointed at
            return best if best in steps else None
        message = f"run {self.path}: its best validation was at step {best}, but `best` points to step {pointed}"
        raise UserError(message, f"choose one: --step {best}", exit_code=1)

    def latest_state(self) -> CheckpointState | None:
        """The state of the latest checkpoint; None where there is none.

        Raises:
            UserError: see `read_state`.
        """
        while steps := self.steps():
            try:
                return read_state(self.checkpoint(steps[-1]))
            except UserError:
                if self.checkpoint(steps[-1]).exists():
                    raise
                # a training process has replaced it since: look again
        return None

    def done(self) -> int | None:
        """The step in the file `done`, at which training finished or ran out of patience; None where there is none."""
        try:
            match = re.search(r" at step ([0-9]{1,18})\Z", read_bytes(self.path / "done").decode().rstrip())
        except (OSError, UnicodeDecodeError):
            return None
        return int(match[1]) if match else None

    def point(self, name: str, step: int) -> None:
        """Point `name` ("best", "latest") at a checkpoint."""
        self.refuse_replaced()
        write_text(self.path / name, f"step-{step:08d}\n")

    def facts(self) -> dict[str, Any]:
        """run.json; empty before the first write."""
        path = self.path / "run.json"
        facts: dict[str, Any] = {}
        if path.exists():
            facts = read_json(path, "the run's record", LOST_RECORD, exit_code=1, schema=RunFacts)
        return facts

    def status(self) -> str | None:
        """The status of training in run.json; "killed" if that is "running", but the process has ended."""
        status: str | None = self.facts().get("status")
        return "killed" if status == "running" and abandoned(self.path / ".lock") else status

    def note(self, **facts: Any) -> None:
        """Set keys of run.json, and sign it, the recipe and the log as they are now."""
        self.refuse_replaced()
        log_bytes = self.metrics_file.stat().st_size if self.metrics_file.exists() else 0
        facts["recipe_sha256"] = sha256_of(self.recipe_file)
        facts["log"] = {"bytes": log_bytes, "sha256": self._log_sha256(log_bytes)}
        write_json(self.path / "run.json", signed({**self.facts(), **facts}))

    def unsign(self) -> None:
        """Forget the digests of the recipe and the log, which are about to change."""
        if facts := self.facts():
            write_json(self.path / "run.json", signed({**facts, "recipe_sha256": None, "log": None}))

    def altered(self) -> list[Path]:
        """Those of run.json, recipe.yaml and metrics.jsonl that are not as training wrote them; earlier versions signed
        none.
        """
        file, altered = self.path / "run.json", []
        try:
            facts = read_signed(file, "the run's record", RunFacts, LOST_RECORD) if file.exists() else {}
        except Altered:
            facts, altered = self.facts(), [file]
        if (sha256 := facts.get("recipe_sha256")) and sha256 != sha256_of(self.recipe_file):
            altered.append(self.recipe_file)
        if (log := facts.get("log")) and log["sha256"] != self._log_sha256(log["bytes"]):
            altered.append(self.metrics_file)
        return altered

    def alterations(self) -> list[str]:
        """A warning for each file of `altered`."""
        return [f"{path} is not as training wrote it" for path in self.altered()]

    def _log_sha256(self, size: int) -> str:
        """The sha256 of the first `size` bytes of metrics.jsonl."""
        digest = hashlib.sha256()
        if self.metrics_file.exists():
            with open_file(self.metrics_file) as log:
                while block := log.read(min(size, 1 << 20)):
                    digest.update(block)
                    size -= len(block)
        return digest.hexdigest()

    @property
    def tokenizer_file(self) -> Path:
        return tokenizer_file(self.path)

    def write_tokenizer(self, name: str, content: bytes) -> None:
        """Write the tokenizer, one of `TOKENIZERS`, and remove any other."""
        with writing(self.path / name) as file:
            file.write(content)
        for other in {*TOKENIZERS} - {name}:
            remove_file(self.path / other)

    def check_tokenizer(self) -> None:
        """Refuse a tokenizer file that is not the one that the run was trained with.

        Raises:
            UserError: (exit code 1) it is missing, cannot be read, or does not have the sha256 in run.json.
        """
        hint = "copy it again from the tokens that the run was trained on"
        if not self.tokenizer_file.exists():
            raise UserError(f"{self.tokenizer_file} is missing", hint, exit_code=1)
        found = sha256_of(self.tokenizer_file)
        expected = self.facts().get("tokenizer_sha256", found)
        if found != expected:
            message = f"{self.tokenizer_file} is damaged: sha256 {found[:16]}... (expected {str(expected)[:16]}...)"
            raise UserError(message, hint, exit_code=1)

    def check_origin(self, step: int, origin: str | None, trained: dict[str, str] | None) -> None:
        """Refuse a checkpoint that another run has written, or this run under another recipe.

        Args:
            origin, trained: the "run" and "recipe" of its state.json; None, as in those of earlier versions: unknown.

        Raises:
            UserError: (exit code 1) it is such a checkpoint.
        """
        path, own, file = self.checkpoint(step), self.facts().get("id"), self.path / "run.json"
        if origin and own != origin and file.exists():
            if own is None or file in self.altered():
                its_id = "it has no id" if own is None else f"its id is {own[:40]}"
                message = f"{file} was changed after training: {its_id} (expected {origin}, as in {path})"
                raise UserError(message, f"set its id back to {origin}", exit_code=1)
            message = f"{path} is a checkpoint of another run: id {origin[:20]} (expected {own[:20]}, as in run.json)"
            raise UserError(message, "use it in the run that it was copied from, and another --step here", exit_code=1)
        found = {key: scalar_text(value) for key, value in flatten(self.recipe()).items()}
        changed = [
            f"{key} is {found[key]} (expected {text})"
            for key, text in (trained or {}).items()
            if found.get(key, text) != text
        ]
        if changed:
            message = f"{self.recipe_file} is not the recipe that {path.name} was trained with: {', '.join(changed)}"
            hint = "it was changed after training: set it back; to train another model, copy it and choose another -o"
            raise UserError(message, hint, exit_code=1)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """All complete lines of metrics.jsonl; a line torn by a kill is skipped."""
        return read_metrics(self.metrics_file)

    def sound_metrics(self) -> list[dict[str, Any]]:
        """`metrics`; none where the file is not as training wrote it."""
        return [] if self.metrics_file in self.altered() else list(self.metrics())

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
        """Remove what killed processes left half-written; the caller holds the run's lock."""
        for folder in (self.path, self.checkpoints, self.path / USAGE):
            remove_leftovers(folder)
