"""The life of a sweep: check what it needs, train and measure its cells, time the models, publish the tables.

Cells run with the commands that a person would use, each in its own process: a cell that runs out of memory or diverges
does not affect the others, and a sweep that was stopped continues where it was.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, TaskID, TimeElapsedColumn

from pkmlm.bench.generate import score_batch
from pkmlm.bench.rounds import Say, interleaved
from pkmlm.bench.steps import ESTIMATE_ROUNDS, step_amounts, time_steps, timed_part, vocab_size_in
from pkmlm.console import Table, progress_bars, say_drawn, status_line, warn, warn_each
from pkmlm.cost import cost_of
from pkmlm.cost_tables import vocab_size_of
from pkmlm.data.batches import Batches, mean_read
from pkmlm.device import default_device, machine
from pkmlm.environment import SIZE, child_command, usable_cores
from pkmlm.errors import UserError, memory_errors, printable
from pkmlm.evaluate.documents import open_split
from pkmlm.evaluate.load import load_run
from pkmlm.files import locked, make_folder, write_text
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.schema import Recipe, dump_recipe, recipe_sha256
from pkmlm.recipe.shipped import find_base
from pkmlm.report.compare import differences
from pkmlm.report.equal import Over
from pkmlm.report.metrics import MEASURES, TASKS
from pkmlm.report.plots import Look, draw_curves
from pkmlm.runs.directory import RunDirectory
from pkmlm.signals import StopRequest, signal_name, stop_on_signals
from pkmlm.sweep.budget import busy_note, relative_steps
from pkmlm.sweep.cells import WRONG_USAGE, Cell, CellOutcome, Cells, Place, best, facts_at_end, finished, steps_taken
from pkmlm.sweep.grid import Point, read_grid
from pkmlm.sweep.plots import draw
from pkmlm.sweep.results import Results, SweepFolder

TIMED_TOKENS = 4096  # scored at once
ROUNDS = 7
DIVERGED = 3  # exit code of a command


@dataclass(frozen=True)
class Workers:
    """Who runs the cells of a sweep.

    Attributes:
        jobs: cells at a time; each gets its share of the usable cores.
        devices: GPUs as in CUDA_VISIBLE_DEVICES, a cell on each; empty: those of this process.
        task_data: as for `pkmlm eval --task-data`.
    """

    jobs: int = 1
    devices: Sequence[str] = ()
    task_data: str | None = None


def use_devices(devices: Sequence[str]) -> None:
    """Let this process see only these GPUs, before it uses any: it times models on the first.

    Args:
        devices: as in CUDA_VISIBLE_DEVICES.

    Raises:
        UserError: one does not exist: torch would silently use the CPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    found = torch.cuda.device_count()
    if found < (1 if devices[0].startswith("MIG-") else len(devices)):  # CUDA shows a process one MIG instance
        message = f"--device {','.join(devices)}: there is no GPU {devices[found]} here"
        raise UserError(message, "pkmlm doctor lists the devices")


def open_sweep(
    grid_file: Path,
    scale: str | None,
    overrides: Sequence[str],
    output: str | None,
    *,
    over: Sequence[Over],
    dry_run: bool,
    table_only: bool,
    retime: bool,
    quiet: bool,
) -> tuple[Results, SweepFolder | None]:
    """Read a grid, make its cells and compute what its points cost.

    Args:
        scale: of the grid; None: its first.
        overrides: `key=value` for all cells.
        output: the sweep's folder; None: a dry run without one.
        over: replaces the grid's, unless it is empty.
        dry_run: write nothing.
        table_only: if there are no overrides, take those with which the folder's results were made.
        retime: for `equal: seconds`, time the steps of all models again, unless a run has begun.
        quiet: show no progress on standard error.

    Raises:
        UserError: the grid, a cell's recipe or the folder is invalid.
    """
    grid, scale = read_grid(grid_file, scale)
    if over and not grid.trains:
        raise UserError(f"--over: {grid_file} trains nothing (expected a grid with runs)")
    grid = replace(grid, over=tuple(over) or grid.over)
    folder = SweepFolder(Path(output), grid_file.stem, scale) if output else None
    found = folder.read() if folder else {}
    if folder and table_only:
        if not folder.path.exists():
            raise UserError(f"{folder.path} holds no run of this grid", "leave --table out to train them")
        overrides = overrides or found.get("set") or ()
    base = find_base(grid_file, grid.base)
    cells = Cells(grid, base, overrides)
    known = with_vocab_sizes(cells, folder.runs if folder and table_only else None)
    if grid.equal:
        begun = folder is not None and any(folder.runs.glob("*/recipe.yaml"))
        if folder and not dry_run:
            make_folder(folder.runs)
        with status_line(quiet) as say:
            at, shown = folder.path if folder else None, folder is not None and table_only
            again = retime and not begun and not shown
            relative = relative_steps(known, grid, at, say, keep=not dry_run, retime=again, table_only=shown)
        cells = Cells(grid, base, overrides, relative)
    return Results(grid, cells, {place: facts_of_cost(recipe) for place, recipe in known.items()}), folder


def with_vocab_sizes(cells: Cells, runs: Path | None) -> dict[Place, Recipe]:
    """The recipes of all points and tuned values, with the `model.vocab_size` that their tokens have.

    Args:
        runs: a folder of runs, which have the tokenizers of tokens that are gone; None: there is none.

    Raises:
        UserError: a recipe does not say its vocabulary size, and has no tokens.
    """
    trained = [RunDirectory(path.parent) for path in sorted(runs.glob("*/recipe.yaml"))] if runs else []
    several = len({cell.recipe.data.folders for cell in cells.first.values()}) > 1
    sizes: dict[tuple[str, ...], int] = {}
    found = {}
    for place, cell in cells.first.items():
        recipe, folders = cell.recipe, cell.recipe.data.folders
        if recipe.model.vocab_size is None:
            if folders not in sizes:
                alike = [run for run in trained if not several or run.recipe().data.folders == folders]
                sizes[folders] = vocab_size_in(alike[0]) if alike else vocab_size_of(recipe)
            recipe = replace(recipe, model=replace(recipe.model, vocab_size=sizes[folders]))
        found[place] = recipe
    return found


def seconds_of_steps(cells: Cells, quiet: bool) -> dict[Point, float]:
    """How long a step of each point's model takes here, at the first tuned value: an estimate from two rounds. Empty,
    with a warning, where memory does not hold all models together.

    Raises:
        UserError: a recipe does not say its vocabulary size, and has no tokens.
    """
    known = with_vocab_sizes(cells, None)
    recipes = {point: recipe for (point, value), recipe in known.items() if value == cells.values[0]}
    parts = {
        point: timed_part(recipe, recipe.model.vocab_size or 0, mean_read(recipe)) for point, recipe in recipes.items()
    }
    keys = {point: recipe_sha256(part) for point, part in parts.items()}
    try:
        with status_line(quiet) as say:
            times = time_steps({keys[point]: part for point, part in parts.items()}, say, ESTIMATE_ROUNDS)
    except UserError as error:
        warn(f"no hours: {error.message}")
        return {}
    return {point: median(times["steps"][key]) for point, key in keys.items()}


def run_sweep(
    results: Results,
    folder: SweepFolder,
    *,
    show: Callable[[dict[str, Any], list[Table]], None],
    look: Look,
    table_only: bool,
    retime: bool,
    workers: Workers,
    quiet: bool,
) -> int:
    """Run the cells of a grid that have not ended, time their models, and write and show the tables.

    Args:
        results: those of the grid before any run; outcomes and speeds are added.
        show: called with results.json and the tables.
        look: of the plots.
        table_only: run nothing; publish what the folder holds.
        retime: time models and steps again.
        quiet: show no progress on standard error.

    Returns:
        The exit code: 0, that of the failures, or that of the signal that stopped the sweep.

    Raises:
        UserError: data is missing, or the folder is in use, or holds another sweep; (exit code 1) the models could not
            be timed, and the tables lack their speeds, or runs of other code are among them.
    """
    folder.recall(results)
    results.note = busy_note(folder.path) if "seconds" in results.grid.equal else ""
    if retime:
        results.speeds = {}
    code, problem = 0, None
    if table_only:
        folder.collect(results)
    else:
        if results.grid.trains:
            code = run_cells(results, folder, workers, quiet)
        timed = results.grid.points() if "speed" in results.grid.measure else []
        if not code and any(results.chosen(point) and not results.rounds(point) for point in timed):
            folder.write(results)  # before the timing, which may fail
            try:
                with status_line(quiet) as say:
                    time_models(results, folder.runs, say)
            except UserError as error:
                problem = UserError(f"nothing was timed: {error.message}", error.hint, exit_code=1)
    if results.ended or not results.grid.trains:  # an empty table must not replace an existing one
        comparison = results.comparison(folder.runs)
        warn_each(differences(comparison.facts))
        drawn = draw(results, folder.path, look)
        for over in results.grid.over if comparison.runs and not code else ():
            try:
                with status_line(quiet) as say:
                    amounts = step_amounts(over, comparison.runs, say, retime)
            except UserError as error:
                problem = UserError(f"no table over {over}: {error.message}", error.hint, exit_code=1)
                continue
            if equal := comparison.at_equal(over, amounts):
                results.equals.append(equal)
            drawn += draw_curves(folder.path, comparison.curves(over), over, look, by_byte=comparison.by_byte)
        show(*folder.write(results, drawn))
        if drawn:
            say_drawn(len(drawn), folder.path)
    for outcome in results.failed if not code else ():
        print(f"error: {printable(outcome.cell.name)}: {printable(outcome.message)}", file=sys.stderr)
    others = results.of_other_code()
    if others and not (table_only or code):
        message = f"{len(others)} of the runs were trained with other code of pkmlm than this: {', '.join(others)}"
        hint = "delete their folders to train them again; --table shows them with the rest"
        raise UserError(f"{folder.path}: {message}", hint, exit_code=1)
    if problem:
        raise problem
    # 2 if wrong usage explains all of them.
    return code or min((outcome.exit_code for outcome in results.failed), default=0)


def run_cells(results: Results, folder: SweepFolder, workers: Workers, quiet: bool) -> int:
    """Train and measure the cells; returns the exit code of the signal that stopped it, or 0."""
    results.cells.refuse_missing_data()
    warn_each(results.cells.warnings())
    if tasks := tasks_of(results.grid.measure):  # bad ones are refused before hours of training
        from pkmlm.evaluate.tasks import load_tasks  # takes seconds

        load_tasks(",".join(tasks), Path(workers.task_data) if workers.task_data else None, None)
    total, runs = len(results.cells), folder.runs
    make_folder(runs)
    lock = locked(runs / ".lock", f"the sweep {folder.path}")
    progress = progress_bars(quiet, MofNCompleteColumn(), TimeElapsedColumn())
    bars: dict[str, TaskID] = {}
    with lock, stop_on_signals() as stop, progress:

        def show_running(running: list[Cell]) -> None:
            for name in bars.keys() - {cell.name for cell in running}:
                progress.remove_task(bars.pop(name))
            for cell in running if not progress.disable else ():
                if cell.name not in bars:
                    bars[cell.name] = progress.add_task(cell.name, total=cell.recipe.train.steps)
                progress.update(bars[cell.name], completed=steps_taken(cell, runs))

        def say(text: str) -> None:
            if not quiet:
                wrap = progress.console.is_interactive  # elsewhere a long line stays one line
                progress.console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=not wrap)

        def on_end(outcome: CellOutcome) -> None:
            chosen = outcome.cell.name in results.outcomes  # it was trained before; now it is measured
            results.add(outcome)
            if outcome.status != "stopped":
                place = "chosen" if chosen else f"{len(results.outcomes)}/{total}"
                measured = [
                    f"{MEASURES[name].heading} {MEASURES[name].format.format(value)}"
                    for name in dict.fromkeys((*results.grid.measure, "valid_loss"))
                    if MEASURES[name].seeded and (value := MEASURES[name].read(outcome.facts)) is not None
                ]
                what = ", ".join(measured[:4] or [outcome.status])
                say(f"{place} {outcome.cell.name}: " + ": ".join(filter(None, (what, outcome.message))))

        folder.begin(results)
        say(f"{total} runs in {folder.path}, {workers.jobs} at a time")
        Runner(runs, results.grid.measure, workers, stop, results.source).run(results.cells, on_end, show_running)
        if stop.exit_code is not None:
            print("stopped on request; the same command resumes it", file=sys.stderr)
    return stop.exit_code or 0


class Runner:
    """Runs cells.

    Args:
        folder: of the run directories; its `.recipes` receives their recipes.
        measures: names of `MEASURES`.
        stop: says when a signal has asked to stop.
        source: see `child_command`.
    """

    def __init__(self, folder: Path, measures: Sequence[str], workers: Workers, stop: StopRequest, source: str):
        self.folder, self.workers, self.stop, self.source = folder, workers, stop, source
        self.sources = {MEASURES[name].source for name in measures}
        self.tasks = tasks_of(measures)
        self.free_devices = list(workers.devices)
        self.running: list[Cell] = []
        self.children: list[subprocess.Popen[str]] = []
        self.asked: set[int] = set()  # processes that have been asked to stop
        self.ended = False

    def run(self, cells: Cells, on_end: Callable[[CellOutcome], None], on_tick: Callable[[list[Cell]], None]) -> None:
        """Run all cells: for every point, the first seed at each tuned value, then the other seeds at the best of them.
        A cell that competes with others is measured only after it has been chosen. A cell that points share runs once.

        Args:
            on_end: called in this thread with the outcome of every cell that has ended.
            on_tick: called a few times a second with the cells that are running.
        """
        compete = {point: [cell.name for cell in cells.tuning(point)] for point in cells.grid.points()}
        ended: dict[str, CellOutcome] = {}
        begun: set[tuple[str, bool]] = set()  # with whether it is measured
        pool = ThreadPoolExecutor(self.workers.jobs)
        waiting: list[Future[CellOutcome]] = []

        def begin(found: Iterable[Cell], measure: bool) -> None:
            for cell in found:
                if (cell.name, measure) not in begun:
                    begun.add((cell.name, measure))
                    waiting.append(pool.submit(self._run_cell, cell, measure))

        try:
            begin(cells.first.values(), len(cells.values) == 1)
            while waiting:
                done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                on_tick(list(self.running))
                if self.stopping:
                    self._stop_children()
                ready = [each for each in waiting if each in done]  # in their order, even if they end together
                waiting = [each for each in waiting if each not in done]
                for outcome in (future.result() for future in ready):
                    on_end(outcome)
                    name = outcome.cell.name
                    first_time = name not in ended
                    ended[name] = outcome
                    for point, names in compete.items() if first_time and not self.stopping else ():
                        if name in names and ended.keys() >= set(names):
                            known = [ended[each] for each in names]
                            chosen = best(known)
                            if chosen and len(known) > 1:
                                begin([chosen.cell], True)
                            if chosen:
                                begin(cells.others(point, chosen.cell.tuned), True)
        finally:  # if an error ends the sweep, running commands are stopped and waiting cells are dropped
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

    def _run_cell(self, cell: Cell, measure: bool) -> CellOutcome:
        self.running.append(cell)
        try:
            for command in self.commands(cell, measure):
                if self.stopping:
                    return CellOutcome(cell, "stopped", {})
                code, said = self._call(command)
                if code:
                    status = "stopped" if self.stopping else "diverged" if code == DIVERGED else "failed"
                    return CellOutcome(cell, status, {}, said, WRONG_USAGE if code == WRONG_USAGE else 1)
            return finished(cell, self.folder) or CellOutcome(cell, "failed", {}, "its run has disappeared")
        except UserError as error:  # its folder holds another run, for example: the other cells continue
            return CellOutcome(cell, "failed", {}, error.message, error.exit_code)
        except OSError as error:  # its folder cannot be examined, or the system starts no more processes
            return CellOutcome(cell, "failed", {}, f"{error.filename or 'the system refused'}: {error.strerror}")
        finally:
            self.running.remove(cell)

    def commands(self, cell: Cell, measure: bool = True) -> Iterable[list[str]]:
        """The arguments of the `pkmlm` commands that the cell still needs, one after the other."""
        run = RunDirectory(self.folder / cell.name)
        path = str(run.path)
        ended = finished(cell, self.folder)
        if ended is None:
            recipe = self.folder / ".recipes" / f"{cell.name}.yaml"  # the base's file may change meanwhile
            make_folder(recipe.parent)
            write_text(recipe, dump_recipe(cell.recipe))
            yield ["train", str(recipe), "-o", path, "-q"]
        if not measure or (ended and ended.status != "measured"):
            return
        facts, folders = ended.facts if ended else facts_at_end(cell, run), cell.recipe.data.folders
        have_moved = folders != run.recipe().data.folders
        tokens = [word for folder in folders for word in ("--data", folder)] if have_moved else []
        if "eval" in self.sources and facts["test_step"] is None:
            yield ["eval", path, "-q", *tokens]
        if "usage" in self.sources and cell.recipe.model.memories and not facts["usage"]:
            yield ["usage-report", path, "-q", *tokens]
        if "tasks" in self.sources and not set(self.tasks) <= facts["tasks"].keys():
            rows = self.workers.task_data
            data = [] if rows is None else ["--task-data", rows]
            yield ["eval", path, "-q", "--tasks", ",".join(self.tasks), *data]

    def _call(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run one command; returns its exit code and its last error, or else its last line."""
        environment = dict(os.environ)
        environment.pop(SIZE, None)  # each cell trains alone; left over from a launcher, it would wait for others
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.workers.jobs)))
        if self.workers.devices:
            environment["CUDA_VISIBLE_DEVICES"] = device = self.free_devices.pop(0)
        try:
            with subprocess.Popen(
                child_command(arguments, self.source),
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
            if self.workers.devices:
                self.free_devices.append(device)
        lines = said.strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines
        last = errors[-1].removeprefix("error: ") if errors else ""
        if child.returncode < 0:  # a signal killed it
            name = signal_name(-child.returncode)
            why = "if nobody killed it, memory ran out" if name == "SIGKILL" else last
            last = f"pkmlm {arguments[0]} was killed ({name}): {why}"
        return child.returncode, last

    def _stop_children(self) -> None:
        """Ask each running command once to stop and save a checkpoint; a second request would end it at once."""
        for child in list(self.children):
            if child.pid not in self.asked:
                self.asked.add(child.pid)
                child.terminate()


def time_models(results: Results, runs: Path, say: Say) -> None:
    """Time how fast the model of each point scores the test split: interleaved in one process, so that the machine's
    load affects all equally.

    Args:
        runs: the folder of the run directories.

    Raises:
        UserError: a run or the test split cannot be read; (exit code 1) memory does not hold all models together.
    """
    actions: dict[Point, Callable[[], object]] = {}
    counted: dict[Point, int] = {}
    cells = {point: chosen[0].cell for point in results.grid.points() if (chosen := results.chosen(point))}
    with memory_errors("memory does not hold all models together"):
        for point, cell in cells.items():
            run = load_run(runs / cell.name, "latest")
            assert isinstance(run.model, Transformer)  # as every run's is
            context = run.recipe.model.context
            sequences = max(1, TIMED_TOKENS // context)
            corpus = open_split(cell.recipe.data.folders, "test", run.tokenizer)
            tokens_BT = Batches(corpus, context, sequences, 1).micro_batch(1, 0, sequences)[0].to(run.device)
            counted[point] = tokens_BT.numel()
            actions[point] = partial(score_batch, run.model, tokens_BT)
        times = interleaved(actions, ROUNDS, default_device(), say)
    results.speeds = {
        point: {
            "point": results.grid.place(point),
            "recipe": recipe_sha256(cells[point].recipe),
            "timed_on": machine(),
            "tokens_per_second": [counted[point] / each for each in timing.seconds],
        }
        for point, timing in times.items()
    }


def tasks_of(measures: Sequence[str]) -> list[str]:
    """The zero-shot tasks to score: those that are measured, or all, if their average is measured."""
    return list(TASKS) if "average_acc" in measures else [name for name in TASKS if name in measures]


def facts_of_cost(recipe: Recipe) -> dict[str, Any]:
    """The numbers of `pkmlm cost` that measures read: parameters, operations and parameters read for a token, and the
    operations and memory of the largest block over a whole sequence.
    """
    cost = cost_of(recipe, vocab_size_of(recipe))
    block = max(cost.blocks, key=lambda block: block.memory)
    return {
        "dense": cost.dense,
        "memory": cost.memory,
        "operations": cost.flops_per_token,
        "read": cost.read_per_token,
        "block_flops": block.flops_without_attention + block.attention_flops,
        "map_flops": block.flops_without_attention,
        "tables": block.memory,
    }
