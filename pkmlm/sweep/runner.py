"""The cells of a grid, run by the commands that a person would use: each in processes of its own, so that what one of
them does (a full memory, a divergence) harms no other, and all of it goes on where it was stopped.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from pkmlm.analysis.compare import Facts, facts_of
from pkmlm.data.index import read_index
from pkmlm.environment import usable_cores
from pkmlm.errors import UserError
from pkmlm.recipe.dump import dump_recipe, flatten, scalar_text
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import make_folder, write_text
from pkmlm.signals import StopRequest
from pkmlm.sweep.cells import Cell, Cells
from pkmlm.sweep.measures import MEASURES, tasks_of

WRONG_USAGE, DIVERGED = 2, 3  # exit codes of commands
CIRCUMSTANCES = ("versions", "commit", "device", "precision", "ranks", "earlier")  # of run.json


@dataclass(frozen=True)
class Outcome:
    """How a cell ended.

    Attributes:
        status: "measured", "diverged", "failed" or "stopped".
        facts: what is known of the run, where it was measured.
        message: what a failed command said last, or why training ended early.
        exit_code: of what has failed: 2 where the user asked for what cannot be, else 1.
    """

    cell: Cell
    status: str
    facts: Facts
    message: str = ""
    exit_code: int = 1

    @property
    def loss(self) -> float:
        """The last validation loss, by which tuned values are chosen; without validation, infinite."""
        loss = self.facts.get("valid_loss")
        return loss if isinstance(loss, float) else float("inf")


class Runner:
    """Runs cells.

    Args:
        folder: of the run directories, and in `.recipes` of their recipes.
        measures: names of `MEASURES`.
        jobs: cells at a time; each gets its share of the usable cores.
        devices: values of CUDA_VISIBLE_DEVICES, at least as many as jobs; empty: as this process has it.
        task_data: of `pkmlm eval --task-data`.
    """

    def __init__(
        self,
        folder: Path,
        measures: Sequence[str],
        jobs: int,
        devices: Sequence[str],
        task_data: str | None,
        stop: StopRequest,
    ):
        self.folder, self.task_data, self.stop, self.jobs = folder, task_data, stop, jobs
        self.sources = {MEASURES[name].source for name in measures}
        self.tasks = tasks_of(measures)
        self.devices, self.free_devices = devices, list(devices)
        self.running: list[Cell] = []
        self.children: list[subprocess.Popen[str]] = []
        self.asked: set[int] = set()  # processes that have been asked to stop
        self.ended = False

    def run(self, cells: Cells, done: Callable[[Outcome], None], tick: Callable[[list[Cell]], None]) -> None:
        """Run all cells: of every point the first seed at each tuned value, then the other seeds at the best of them.
        What is to be chosen from is trained, and measured only if it is chosen.

        Args:
            done: is told of every cell that has ended, in this thread.
            tick: is told some times a second which cells are running.
        """
        outcomes: dict[tuple[str, ...], list[Outcome]] = {}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            waiting = {
                pool.submit(self._run_cell, cell, len(cells.tuning(cell.point)) == 1) for cell in cells.first.values()
            }
            while waiting:
                ended, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                tick(list(self.running))
                if self.stopping:
                    self._stop_children()
                for outcome in (future.result() for future in ended):
                    done(outcome)
                    known = outcomes.setdefault(outcome.cell.point, [])
                    known.append(outcome)
                    if len(known) == len(cells.tuning(outcome.cell.point)) and not self.stopping:
                        chosen = best(known)
                        also = [chosen.cell] if chosen and len(known) > 1 else []
                        also += cells.others(chosen.cell) if chosen else []
                        waiting |= {pool.submit(self._run_cell, cell, True) for cell in also}
        finally:
            self._end(pool)

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked to stop, or an error ends the sweep."""
        return self.ended or self.stop.exit_code is not None

    def _end(self, pool: ThreadPoolExecutor) -> None:
        """Leave nothing behind: where an error ends the sweep, cells wait and commands run."""
        self.ended = True
        pool.shutdown(wait=False, cancel_futures=True)
        while self.running:
            self._stop_children()
            time.sleep(0.05)
        pool.shutdown()

    def _run_cell(self, cell: Cell, measure: bool) -> Outcome:
        self.running.append(cell)
        try:
            return self._measured(cell, measure)
        except UserError as error:  # its folder holds another run, say: the other cells go on
            return Outcome(cell, "failed", {}, error.message, error.exit_code)
        finally:
            self.running.remove(cell)

    def _measured(self, cell: Cell, measure: bool) -> Outcome:
        before = finished(cell, self.folder)
        if before is not None and before.status != "measured":
            return before
        for command in self.commands(cell, measure):
            if self.stopping:
                return Outcome(cell, "stopped", {})
            code, said = self._call(command)
            if code:
                status = "stopped" if self.stopping else "diverged" if code == DIVERGED else "failed"
                return Outcome(cell, status, {}, said, WRONG_USAGE if code == WRONG_USAGE else 1)
        return finished(cell, self.folder) or Outcome(cell, "failed", {}, "its run is not there any more")

    def commands(self, cell: Cell, measure: bool = True) -> Iterable[list[str]]:
        """The arguments of `pkmlm`, one call after the other, without what has been done already."""
        run, model = RunDirectory(self.folder / cell.name), cell.recipe.model
        path = str(run.path)
        if finished(cell, self.folder) is None:
            recipe = self.folder / ".recipes" / f"{cell.name}.yaml"  # the base's file may change meanwhile
            make_folder(recipe.parent)
            write_text(recipe, dump_recipe(cell.recipe))
            yield ["train", str(recipe), "-o", path, "-q"]
        if not measure:
            return
        facts, folder = facts_at_end(cell, run), cell.recipe.data.dir
        tokens = ["--data", folder] if folder and folder != run.recipe().data.dir else []  # they have moved since
        if "eval" in self.sources and facts["test_step"] is None:
            yield ["eval", path, "-q", *tokens]
        remembers = model.projections == "hash" or model.memory.kind != "none"
        if "usage" in self.sources and remembers and not facts["usage"]:
            yield ["usage-report", path, "-q", *tokens]
        if "tasks" in self.sources and not set(self.tasks) <= facts["tasks"].keys():
            data = [] if self.task_data is None else ["--task-data", self.task_data]
            yield ["eval", path, "-q", "--tasks", ",".join(self.tasks), *data]

    def _call(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run one command; its exit code and the last thing that it said."""
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.jobs)))
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = device = self.free_devices.pop(0)
        try:
            with subprocess.Popen(
                [sys.executable, "-m", "pkmlm.cli.child", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
            ) as child:
                self.children.append(child)
                _, said = child.communicate()
                self.children.remove(child)
        finally:
            if self.devices:
                self.free_devices.append(device)
        lines = said.strip().splitlines()
        told = [line for line in lines if line.startswith("error: ")] or lines
        last = told[-1].removeprefix("error: ") if told else ""
        return child.returncode, killed(arguments[0], -child.returncode, last) if child.returncode < 0 else last

    def _stop_children(self) -> None:
        """Ask the running commands to stop, each once: it saves a checkpoint; a second request would end it at once."""
        for child in list(self.children):
            if child.pid not in self.asked:
                self.asked.add(child.pid)
                child.terminate()


def killed(command: str, number: int, last: str) -> str:
    """What to say of a command that a signal has ended, which it cannot say itself; `last`: what it said last."""
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    why = "if nobody did it, memory ran out" if number == signal.SIGKILL else last  # no word comes of a SIGKILL
    return f"pkmlm {command} was killed ({name})" + (f": {why}" if why else "")


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The one of lowest validation loss; None where none was measured, or one is to be tried again as it was stopped or
    has failed. A single one needs no validation.

    Raises:
        UserError: one of several was measured, but its validation is not known.
    """
    if any(outcome.status in ("stopped", "failed") for outcome in outcomes):
        return None
    measured = [outcome for outcome in outcomes if outcome.status == "measured"]
    unknown = [outcome.cell.name for outcome in measured if outcome.loss == float("inf")]
    if len(measured) > 1 and unknown:
        message = f"{unknown[0]} has lost its validation, so that no value can be chosen"
        raise UserError(message, "delete its folder to train it again")
    return min(measured, key=lambda outcome: outcome.loss, default=None)


def facts_at_end(cell: Cell, run: RunDirectory) -> Facts:
    """What is known of a cell's run (see `facts_of`) and "trained_by", of run.json: under what circumstances. What was
    measured of another step than its last is left out, and so are tasks asked after examples; validation is the last
    one, not the best.
    """
    facts, last, recorded = facts_of(cell.name, run), run.done(), run.facts()
    facts["trained_by"] = {key: recorded[key] for key in CIRCUMSTANCES if key in recorded}
    valid = [event for event in run.metrics() if event["event"] == "valid"][-1:]
    for key in ("step", "loss", "token_ppl", "bits_per_byte"):
        facts[f"valid_{key}"] = valid[0].get(key) if valid else None
    if facts["test_step"] != last:
        facts |= {key: None for key in facts if key.startswith("test_")}
    if facts["usage_step"] != last:
        facts |= {"usage_step": None, "usage": []}
    if facts["tasks_step"] != last:
        facts |= {"tasks_step": None, "tasks": {}, "average_acc": None}
    facts["tasks"] = {name: task for name, task in facts["tasks"].items() if not task.get("num_fewshot")}
    return facts


def finished(cell: Cell, folder: Path) -> Outcome | None:
    """The outcome of a cell that was run before, or None; "failed" where its files cannot be read."""
    run = RunDirectory(folder / cell.name)
    try:
        if not run.recipe_file.exists():
            return None
        if not is_of(run, cell.recipe):  # without a checkpoint nothing is lost: it is trained anew
            return Outcome(cell, "failed", {}, other_recipe(cell, run), WRONG_USAGE) if run.steps() else None
        if run.facts().get("status") == "diverged":
            return Outcome(cell, "diverged", {}, "as its run.json says; delete its folder to train it again")
        step = run.done()
        if step is None:
            return None
        message = "" if step >= cell.recipe.train.steps else f"eval.patience ended it at step {step}"
        return Outcome(cell, "measured", facts_at_end(cell, run), message)
    except UserError as error:
        return Outcome(cell, "failed", {}, error.message, error.exit_code)


def is_of(run: RunDirectory, recipe: Recipe) -> bool:
    """Whether a run is of a recipe, wherever the tokens that it was trained on are now.

    Raises:
        UserError: files cannot be read.
    """
    own, folder = run.recipe(), recipe.data.dir
    if own == recipe or folder is None or replace(own, data=recipe.data) != recipe:
        return own == recipe
    facts, index = run.facts(), read_index(Path(folder))
    train = index.splits.get("train")
    now = (index.tokenizer_sha256, train and train.hashes_sha256)
    return (facts.get("tokenizer_sha256"), facts.get("data_sha256")) == now


def other_recipe(cell: Cell, run: RunDirectory) -> str:
    """What to say of a run that is not the cell's: training would take it for complete, say, in spite of other
    eval.tokens, or train it longer, at other rates than one that begins with as many steps.
    """
    before, now = flatten(run.recipe()), flatten(cell.recipe)
    changed = [
        f"{key} {scalar_text(before[key])} (expected {scalar_text(now[key])})" for key in now if before[key] != now[key]
    ]
    return f"its run has {', '.join(changed)}: set it back with -s, or name another folder with -o"


def steps_taken(cell: Cell, folder: Path) -> int:
    """How many steps a running cell has logged, from the end of its log; 0 where that cannot be told."""
    try:
        with open(RunDirectory(folder / cell.name).metrics_file, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))  # a line tells of each memory
            last = file.read().splitlines()[-1]
        return int(json.loads(last)["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0
