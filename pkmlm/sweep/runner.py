"""Runs the cells of a grid by the commands that a person would use, each in a process of its own: a cell that fills the
memory or diverges harms no other, and a sweep that was stopped continues where it was.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from pkmlm.environment import usable_cores
from pkmlm.errors import UserError
from pkmlm.recipe.schema import dump_recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import make_folder, write_text
from pkmlm.signals import StopRequest
from pkmlm.sweep.cells import WRONG_USAGE, Cell, Cells, Outcome, best, facts_at_end, finished
from pkmlm.sweep.measures import MEASURES, tasks_of

DIVERGED = 3  # exit code of a command


class Runner:
    """Runs cells.

    Args:
        folder: of the run directories; its `.recipes` receives their recipes.
        measures: names of `MEASURES`.
        jobs: cells at a time; each gets its share of the usable cores.
        devices: values of CUDA_VISIBLE_DEVICES, at least as many as jobs; empty: as this process has it.
        task_data: as of `pkmlm eval --task-data`.
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

    def run(self, cells: Cells, on_end: Callable[[Outcome], None], on_tick: Callable[[list[Cell]], None]) -> None:
        """Run all cells: of every point the first seed at each tuned value, then the other seeds at the best of them.
        A cell that competes with others is measured only once it has been chosen.

        Args:
            on_end: called in this thread with the outcome of every cell that has ended.
            on_tick: called a few times a second with the cells that are running.
        """
        outcomes: dict[tuple[str, ...], list[Outcome]] = {}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            waiting = {
                pool.submit(self._run_cell, cell, len(cells.tuning(cell.point)) == 1) for cell in cells.first.values()
            }
            while waiting:
                ended, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                on_tick(list(self.running))
                if self.stopping:
                    self._stop_children()
                for outcome in (future.result() for future in ended):
                    on_end(outcome)
                    known = outcomes.setdefault(outcome.cell.point, [])
                    known.append(outcome)
                    if len(known) == len(cells.tuning(outcome.cell.point)) and not self.stopping:
                        chosen = best(known)
                        also = [chosen.cell] if chosen and len(known) > 1 else []
                        also += cells.others(chosen.cell) if chosen else []
                        waiting |= {pool.submit(self._run_cell, cell, True) for cell in also}
        finally:  # an error may end the sweep: the commands that run are stopped, the cells that wait are dropped
            self.ended = True
            pool.shutdown(wait=False, cancel_futures=True)
            while self.running:
                self._stop_children()
                time.sleep(0.05)
            pool.shutdown()

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked to stop, or an error ends the sweep."""
        return self.ended or self.stop.exit_code is not None

    def _run_cell(self, cell: Cell, measure: bool) -> Outcome:
        self.running.append(cell)
        try:
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
            return finished(cell, self.folder) or Outcome(cell, "failed", {}, "its run has disappeared")
        except UserError as error:  # its folder holds another run, for example: the other cells continue
            return Outcome(cell, "failed", {}, error.message, error.exit_code)
        finally:
            self.running.remove(cell)

    def commands(self, cell: Cell, measure: bool = True) -> Iterable[list[str]]:
        """The arguments of the `pkmlm` commands that remain to be done, one after the other."""
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
        have_moved = folder and folder != run.recipe().data.dir
        tokens = ["--data", str(folder)] if have_moved else []
        if "eval" in self.sources and facts["test_step"] is None:
            yield ["eval", path, "-q", *tokens]
        remembers = model.projections == "hash" or model.memory.kind != "none"
        if "usage" in self.sources and remembers and not facts["usage"]:
            yield ["usage-report", path, "-q", *tokens]
        if "tasks" in self.sources and not set(self.tasks) <= facts["tasks"].keys():
            data = [] if self.task_data is None else ["--task-data", self.task_data]
            yield ["eval", path, "-q", "--tasks", ",".join(self.tasks), *data]

    def _call(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run one command; its exit code and its last error, or last line."""
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.jobs)))
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = device = self.free_devices.pop(0)
        try:
            with subprocess.Popen(
                [sys.executable, "-m", "pkmlm.cli.launch", str(os.getpid()), *arguments],
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
        errors = [line for line in lines if line.startswith("error: ")] or lines
        last = errors[-1].removeprefix("error: ") if errors else ""
        if child.returncode < 0:  # a signal killed it
            name = next(
                (each.name for each in signal.Signals if each == -child.returncode), f"signal {-child.returncode}"
            )
            why = "if nobody did it, memory ran out" if name == "SIGKILL" else last
            last = f"pkmlm {arguments[0]} was killed ({name}): {why}"
        return child.returncode, last

    def _stop_children(self) -> None:
        """Ask each running command once to stop and save a checkpoint; a second request would end it at once."""
        for child in list(self.children):
            if child.pid not in self.asked:
                self.asked.add(child.pid)
                child.terminate()
