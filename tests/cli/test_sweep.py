"""`pkmlm sweep`: grids of tiny models, trained and measured for real.

Every process imports torch, which takes seconds: what needs none of its own (a cell that is done, a table, the commands
that a cell still lacks) is done in this one.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from pkmlm.bench.rounds import Timing
from pkmlm.cli.sweep import parse_devices
from pkmlm.environment import source_sha256
from pkmlm.files import locked
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import checkpoint_digest
from pkmlm.runs.results import tasks_file, write_evaluation
from pkmlm.signals import StopRequest, handled
from pkmlm.sweep.cells import Cell, CellOutcome, Cells, facts_at_end, finished
from pkmlm.sweep.grid import read_grid
from pkmlm.sweep.run import TIMED_TOKENS, Runner, Workers
from tests.conftest import given, pkmlm

GRID = """title: Two memories
base: product-key.yaml
axes:
  slots:
    none: {model.memories: null}
    64: {model.memories.pkm.num_keys: 8}
    256: {model.memories.pkm.num_keys: 16}
without: [{slots: 64}]
measure: [valid_loss, dense]
"""
TUNED = """title: One memory
base: product-key.yaml
axes: {slots: {256: {model.memories.pkm.num_keys: 16, optim.weight_decay: 300}}}  # at a rate of 1000, it diverges
tune: {values: [3e-3, 1e-9, 1000]}
measure: [perplexity, speed]
paper: {perplexity: [21.0]}
figures: [{x: slots, y: perplexity}]
"""
PATIENCE = 300  # seconds, on a busy machine
PIQA = "".join(
    json.dumps({"goal": f"To open door {number}", "sol1": "turn the key", "sol2": "sing", "label": number % 2}) + "\n"
    for number in range(4)
)


@pytest.fixture
def grid(tmp_path, write_recipe) -> Path:
    write_recipe(tmp_path, "product-key")
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def cells_of(grid: Path, steps: int, *settings: str) -> dict[str, Cell]:
    cells = Cells(read_grid(grid)[0], grid.parent / "product-key.yaml", [f"train.steps={steps}", *settings])
    return {cell.name: cell for cell in cells.first.values()}


def runner_of(grid: Path, runs: Path, task_data: Path | None = None) -> Runner:
    rows = None if task_data is None else str(task_data)
    return Runner(runs, read_grid(grid)[0].measure, Workers(task_data=rows), StopRequest(), source_sha256())


def cells_in(folder: Path) -> dict[str, dict]:
    return {cell["name"]: cell for cell in json.loads((folder / "results.json").read_text())["cells"]}


def train_cell(grid: Path, folder: Path, *settings: str) -> None:
    """The cell 256_seed-1 of GRID, in this process."""
    shared = ("-q", "-s", "train.steps=2", "-s", "model.memories.pkm.num_keys=16", "-s", "train.seed=1")
    pkmlm("train", grid.parent / "product-key.yaml", "-o", folder / "cells" / "256_seed-1", *shared, *settings)


def wait_for(log: Path) -> None:
    """Until a run has logged something."""
    deadline = time.monotonic() + PATIENCE
    while not (log.exists() and log.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_sweep_trains_measures_and_tells(grid, tmp_path, foreign_code, monkeypatch):
    """One value of the rate diverges: it is a result, not a failure; other calls only tell again, the same. What lies
    in the working folder, or is left over of a launcher, is in no cell's way.
    """
    folder = tmp_path / "swept"
    grid.write_text(TUNED)
    sweep = ("sweep", grid, "-o", folder, "-s", "train.steps=12")
    for cell in cells_of(grid, 12).values():
        if cell.tuned != "1000":  # the other two are trained here
            words = given(*cell.overrides)
            pkmlm("train", grid.parent / "product-key.yaml", "-o", folder / "cells" / cell.name, "-q", *words)
    pkmlm("eval", folder / "cells" / "256_3e-3_seed-1", "-q")
    monkeypatch.chdir(foreign_code)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = pkmlm(*sweep, "--jobs", 2)
    monkeypatch.delenv("WORLD_SIZE")
    results = json.loads((folder / "results.json").read_text())
    status = {cell["tuned"]: cell["status"] for cell in results["cells"]}
    assert status == {"3e-3": "measured", "1e-9": "measured", "1000": "diverged"}
    found = {cell["tuned"]: cell["test_token_ppl"] is not None for cell in results["cells"]}
    assert found == {"3e-3": True, "1e-9": False, "1000": False}, "what is not chosen is trained, no more"
    assert re.search(r"256_1e-9_seed-1: valid \d\.\d{4}\n", done.stderr)
    (point,) = results["points"]
    run = folder / "cells" / "256_3e-3_seed-1"
    kept = json.loads((run / "eval" / "test-step-12.json").read_text())
    assert point["measured"]["perplexity"]["mean"] == kept["perplexity"]["token_ppl"]
    assert point["measured"]["speed"]["mean"] > 0
    assert (point["tuned"], point["paper"]["perplexity"]) == ("3e-3", 21.0)
    assert (folder / "perplexity-by-slots.png").read_bytes().startswith(b"\x89PNG")
    assert "diverged" in (folder / "README.md").read_text()
    assert re.findall(r"^(\S+) 256_", done.stderr, re.MULTILINE) == ["1/3", "2/3", "3/3", "chosen"]
    assert "chosen 256_3e-3_seed-1: ppl " in done.stderr
    trained = RunDirectory(run).facts()
    assert trained["source_sha256"] == results["published_by"]["source_sha256"]
    told = {key: trained[key] for key in ("versions", "commit", "source_sha256", "device", "cpu", "precision", "ranks")}
    assert results["trained_by"] == [told]
    assert {cell["tuned"]: cell["trained_by"] for cell in results["cells"]} == {"3e-3": 0, "1e-9": 0, "1000": None}
    assert results["speed"][0]["timed_on"]["device"] == trained["device"]
    times = {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("[!.]*.*")}
    again = pkmlm(*sweep)
    assert again.stdout == done.stdout
    assert "1000_seed-1: diverged: as its run.json says" in again.stderr
    kept = json.loads((folder / "results.json").read_text())
    assert kept["speed"] == results["speed"], "timed once, told twice"
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("[!.]*.*")}
    assert pkmlm(*sweep, "--table").stdout == done.stdout
    again = pkmlm("sweep", grid, "-o", folder, "--table", "--plot-format", "pdf,svg", "--plot-width", 3.3)
    assert again.stdout == done.stdout, "with the -s of last time"
    assert (folder / "perplexity-by-slots.pdf").read_bytes().startswith(b"%PDF")
    assert "![perplexity-by-slots](perplexity-by-slots.svg)" in (folder / "README.md").read_text()
    written = (folder / "results.json").read_text()
    # Another commit, where somebody commits meanwhile.
    assert json.loads(written) == kept | {"published_by": json.loads(written)["published_by"]}
    grid.write_text(TUNED.replace(", 1e-9, 1000", "") + "set: {model.dim: 16}\n")
    said = pkmlm(*sweep, "--table", code=2).stderr
    assert f"{folder} holds no run of this grid that has ended\nhint: " in said
    hint = "set it back with -s, or name another folder with -o"
    assert f"256_3e-3_seed-1: its run has model.dim 32 (expected 16): {hint}" in said
    assert (folder / "results.json").read_text() == written, "an empty table takes no other's place"
    grid.write_text(TUNED.replace(", 1e-9, 1000", ""))
    assert "3e-3" in pkmlm(*sweep, "--table").stdout
    grid.write_text(TUNED.replace("1000", "500"))
    told = pkmlm(*sweep, "--table", "--over", "seconds").stdout
    assert "3e-3" in told, "while a rate is awaited there is nothing to time"


@pytest.mark.slow
def test_runs_are_compared_at_equal_amounts(grid, tmp_path):
    folder = tmp_path / "swept"
    tune = "tune: {values: [3e-3, 1e-9]}\nover: [tokens, seconds]\n"
    grid.write_text(GRID + tune)
    settings = ["optim.warmup_steps=0"]
    cells = Cells(read_grid(grid)[0], grid.parent / "product-key.yaml", settings)
    assert len(cells) == 4
    for cell in cells.first.values():
        words = given(*cell.overrides)
        pkmlm("train", grid.parent / "product-key.yaml", "-o", folder / "cells" / cell.name, "-q", *words)
    sweep = ("sweep", grid, "-o", folder, *given(*settings))
    done = pkmlm(*sweep)
    results = json.loads((folder / "results.json").read_text())
    steps = {cell["name"]: cell["step"] for cell in results["cells"]}
    assert steps == {f"{slots}_{rate}_seed-1": 30 for slots in ("none", "256") for rate in ("3e-3", "1e-9")}
    cells = cells_in(folder)
    for point, name in zip(results["points"], ("none_3e-3_seed-1", "256_3e-3_seed-1"), strict=True):
        assert point["tuned"] == "3e-3"
        assert point["measured"]["valid_loss"]["values"] == [cells[name]["valid_loss"]]
        assert cells[name]["equal_tokens_valid_loss"] == cells[name]["valid_loss"]
    assert results["equal"]["tokens"]["amount"] == 30 * 256
    times = json.loads((folder / "cells" / "256_3e-3_seed-1" / "steps.json").read_text())["steps"]
    assert len(times) == 2
    assert results["equal"]["seconds"]["amount"] == min(
        30 * cells[f"{slots}_3e-3_seed-1"]["seconds_per_step"] for slots in ("none", "256")
    )
    assert {path.name for path in folder.glob("*.png")} == {
        f"learning-curves-over-{each}.png" for each in ("tokens", "seconds")
    }
    assert "![learning-curves-over-seconds]" in (folder / "README.md").read_text()
    assert re.search(r"by optim\.lr\n\n.*3e-3.*\n.*\n *none +\d.*\n *256 +\d", done.stdout)
    assert "At equal seconds" in done.stdout
    again = pkmlm("sweep", grid, "-o", folder, "--table", "--over", "operations")
    assert "timing" not in again.stderr
    assert "At equal operations" in again.stdout
    assert "At equal seconds" not in again.stdout, "the option is in place of the grid's key"


@pytest.mark.slow
def test_models_are_trained_for_equal_tokens_and_equal_seconds(grid, tokens, tmp_path):
    """One run serves both where it takes as many steps; a resumed sweep keeps its steps; the tables need no tokens."""
    folder, copied = tmp_path / "swept", tmp_path / "tokens"
    shutil.copytree(tokens, copied)
    claim = "{text: slots help, measure: bits_per_byte, greater: {slots: none}, less: {slots: 256}}"
    grid.write_text(f"{GRID.replace('valid_loss', 'bits_per_byte')}equal: [tokens, seconds]\nclaims: [{claim}]\n")
    sweep = ("sweep", grid, "-o", folder, "-s", "train.steps=12", "-s", f"data.dir={copied}")
    done = pkmlm(*sweep)
    relative = json.loads((folder / "budget.json").read_text())["relative"]
    steps = {name: cell["step"] for name, cell in cells_in(folder).items()}
    (by_seconds,) = {round(12 / each) for each in relative.values() if each != 1}
    assert steps["none_seed-1"] == 12
    assert sorted(steps.values()) == sorted([12, 12, by_seconds] if by_seconds != 12 else [12, 12])
    results = json.loads((folder / "results.json").read_text())
    measured = {
        tuple(point["point"].values()): point["measured"]["bits_per_byte"]["mean"] for point in results["points"]
    }
    assert measured.keys() == {(slots, equal) for slots in ("none", "256") for equal in ("tokens", "seconds")}
    assert measured["none", "tokens"] == measured["none", "seconds"]
    assert [(each["equal"], each["pairs"]) for each in results["verdicts"]] == [("tokens", 1), ("seconds", 1)]
    budget = json.loads((folder / "budget.json").read_text())
    for busy in (0.0, 1.5):  # what was timed beside other work is told under what holds
        (folder / "budget.json").write_text(json.dumps(budget | {"busy_cores": busy}))
        assert ("1.5 cores" in pkmlm(*sweep, "--table").stdout) == (busy > 0)
        assert ("1.5 cores" in (folder / "README.md").read_text()) == (busy > 0)
    (folder / "budget.json").write_text(json.dumps(budget))
    shutil.rmtree(copied)
    assert pkmlm(*sweep, "--table").stdout == done.stdout
    latex = pkmlm(*sweep, "--table", "--format", "latex").stdout
    assert latex.count("\\toprule") == len(re.findall(r"^-+$", done.stdout, re.MULTILINE))
    assert json.loads(pkmlm(*sweep, "--table", "--json").stdout)["points"] == results["points"]
    assert pkmlm(*sweep, "--table", "--retime").stdout == done.stdout, "steps of runs that have begun stay"


def test_equal_budgets_leave_a_folder_of_other_files_alone(grid, tmp_path):
    grid.write_text(GRID + "equal: seconds\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    said = pkmlm("sweep", grid, "-o", tmp_path / "mine", "-q", "-s", "train.steps=2", code=2).stderr
    assert "holds no sweep, but other files" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_dry_run_estimates_hours(grid):
    plan = json.loads(pkmlm("sweep", grid, "--dry-run", "--json", "-s", "train.steps=7").stdout)["plan"]
    assert [(row["slots"], row["steps"], row["hours"] > 0) for row in plan] == [("none", 7, True), ("256", 7, True)]
    told = pkmlm("sweep", grid, "--dry-run", "-s", "train.steps=1000000").stdout
    (hours,) = map(float, re.findall(r"([\d.,]+) hours of training here", told.replace(",", "")))
    assert hours > 0
    assert sum(float(line.split()[-1]) for line in told.splitlines()[-2:]) == pytest.approx(hours, abs=0.1)


def test_a_run_under_other_settings_is_not_the_cells(grid, tmp_path):
    """For training it is complete, whatever eval.tokens are; and the base's file may change while a sweep runs."""
    folder = tmp_path / "swept"
    grid.write_text(GRID.replace("    none: {model.memories: null}\n", ""))
    sweep = ("sweep", grid, "-o", folder, "-q", "-s", "train.steps=2")
    train_cell(grid, folder)
    pkmlm(*sweep)
    assert cells_in(folder)["256_seed-1"]["status"] == "measured"
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    narrow = grid.read_text()
    grid.write_text(GRID)  # one more cell, which the other settings would train
    for words in ((*sweep, "-s", "eval.tokens=500"), (*sweep, "-s", "eval.tokens=500", "--table"), sweep[:-2]):
        done = pkmlm(*words, code=2)
        others = "train.steps=2 eval.tokens=500" if "eval.tokens=500" in words else "nothing"
        assert f"train.steps=2 (expected {others})" in done.stderr
    assert before == {path: path.read_bytes() for path in folder.glob("*.*")}
    assert [path.name for path in (folder / "cells").glob("*_*")] == ["256_seed-1"]
    grid.write_text(narrow)
    table = (folder / "README.md").read_text()
    # A longer training would have had other learning rates on its way.
    for key, was, value in (("eval.tokens", 600, 500), ("train.steps", 2, 4)):
        (folder / "results.json").unlink(missing_ok=True)  # nothing tells but the run
        told = pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=2", "-s", f"{key}={value}", code=2)
        found = f"{key} {was} (expected {value})"
        assert "256_seed-1: failed: " in told.stderr
        assert found in told.stderr
        assert found in pkmlm(*sweep, "-s", f"{key}={value}", "--table", code=2).stderr
        assert (folder / "README.md").read_text() == table, "the table that is there stays"
    assert pkmlm(*sweep, "--table").stdout, "what was noted of others is in nobody's way"
    assert cells_in(folder)["256_seed-1"]["status"] == "measured"
    assert RunDirectory(folder / "cells" / "256_seed-1").done() == 2
    (folder / "cells" / "256_seed-1" / "run.json").unlink()
    pkmlm(*sweep, "--table")
    assert "torch unknown" in (folder / "README.md").read_text(), "it only records how the run was started"


def test_runs_of_other_code_fail_a_sweep_and_are_told(grid, tmp_path):
    folder = tmp_path / "swept"
    grid.write_text(GRID.replace("    none: {model.memories: null}\n", ""))
    sweep = ("sweep", grid, "-o", folder, "-q", "-s", "train.steps=2")
    train_cell(grid, folder)
    run = RunDirectory(folder / "cells" / "256_seed-1")
    run.write_facts(source_sha256="0" * 64)
    done = pkmlm(*sweep, code=1)
    assert "other code of pkmlm than this: 256_seed-1\nhint: " in done.stderr
    assert cells_in(folder)["256_seed-1"]["status"] == "measured", "nothing is lost"
    assert pkmlm(*sweep, "--table").stdout == done.stdout
    shutil.rmtree(run.path)
    train_cell(grid, folder)
    pkmlm(*sweep)


def test_a_cell_of_epochs_is_found_finished(grid, tmp_path):
    cell = cells_of(grid, 12, "train.epochs=1", "train.batch_tokens=16384")["none_seed-1"]
    assert cell.recipe.train.steps < 12, "as many as they take"
    words = given(*cell.overrides)
    pkmlm("train", grid.parent / "product-key.yaml", "-o", tmp_path / cell.name, "-q", *words)
    outcome = finished(cell, tmp_path)
    assert outcome is not None
    assert (outcome.status, outcome.message) == ("measured", "")


def test_tokens_that_have_moved_are_those_of_the_cells(grid, tokens, tmp_path):
    """Where the tokens are does not make a run another cell's; other tokens do."""
    folder, moved, others = tmp_path / "swept", tmp_path / "moved", tmp_path / "others"
    shutil.copytree(tokens, moved)
    grid.write_text(GRID.replace("    none: {model.memories: null}\n", "").replace("valid_loss", "perplexity"))
    train_cell(grid, folder)
    sweep = ("sweep", grid, "-o", folder, "-q", "-s", "train.steps=2")
    (command,) = runner_of(grid, folder / "cells").commands(cells_of(grid, 2, f"data.dir={moved}")["256_seed-1"])
    pkmlm(*command)
    pkmlm(*sweep, "-s", f"data.dir={moved}")
    (cell,) = cells_in(folder).values()
    assert cell["test_token_ppl"] > 1
    assert (folder / "cells" / "256_seed-1" / "eval" / "test-step-2.json").exists()
    text = tmp_path / "others.txt"
    text.write_text("Another text. " * 100)
    pkmlm("tokenize", text, "--test", text, "-o", others, "--tokenizer", tokens / "tokenizer.model", "-q")
    said = pkmlm(*sweep, "-s", f"data.dir={others}", code=2).stderr
    assert f"expected train.steps=2 data.dir={others}" in said
    assert pkmlm(*sweep, "-s", f"data.dir={tmp_path / 'no'}", "--table", code=2).stderr.count("error: ") == 1


def test_an_archive_is_shown_without_its_tokens(grid, tokens, tmp_path):
    """Tables and figures, wherever the recipe said that they were: here beside it."""
    folder, base, beside = tmp_path / "swept", grid.parent / "product-key.yaml", grid.parent / "beside"
    shutil.copytree(tokens, beside)
    base.write_text(base.read_text().replace(str(tokens), "beside"))
    text = GRID.replace("    none: {model.memories: null}\n", "") + "figures: [{x: slots, y: valid_loss}]\n"
    grid.write_text(text + "over: tokens\n")
    train_cell(grid, folder)
    done = pkmlm("sweep", grid, "-o", folder, "-q", "-s", "train.steps=2")
    shutil.rmtree(beside)
    archive = folder.rename(tmp_path / "archive")
    figures = sorted(path.name for path in archive.glob("*.png"))
    assert len(figures) == 2
    for left in ("nothing", "an empty folder"):
        for path in archive.glob("*.png"):
            path.unlink()
        assert pkmlm("sweep", grid, "-o", archive, "--table", "-s", "train.steps=2").stdout == done.stdout
        assert sorted(path.name for path in archive.glob("*.png")) == figures
        for place in (tmp_path / "new", archive):
            said = pkmlm("sweep", grid, "-o", place, "-q", "-s", "train.steps=2", code=2).stderr
            assert "-s data.dir=DIR" in said, left
        beside.mkdir(exist_ok=True)


def test_validation_is_that_of_the_last_step(grid, tmp_path, trained):
    """As test perplexity and all else that is measured of a cell."""
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(trained("flat-key"), run.path, symlinks=True)
    lines = [line | {"loss": 0.5} if line["step"] == 15 else line for line in run.metrics()]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = next(line for line in lines if line["event"] == "valid" and line["step"] == 30)
    facts = facts_at_end(cells_of(grid, 30)["256_seed-1"], run)
    assert (facts["valid_step"], facts["valid_loss"]) == (30, last["loss"])
    assert facts["valid_token_ppl"] == last["token_ppl"]


def test_other_seeds_run_at_the_best_value(grid, tmp_path, monkeypatch):
    """All runs are done already, so that nothing trains here."""
    folder = tmp_path / "swept"
    text = GRID.replace("    none: {model.memories: null}\n", "").replace("dense", "speed")
    grid.write_text(text + "seeds: [1, 2]\ntune: {values: [3e-3, 1e-9]}\n")
    settings = ["train.steps=2", "optim.warmup_steps=0"]
    cells = Cells(read_grid(grid)[0], grid.parent / "product-key.yaml", settings)
    first = list(cells.first.values())
    for cell in (*first, *cells.others(first[0].point, first[0].tuned)):
        words = given(*cell.overrides)
        pkmlm("train", grid.parent / "product-key.yaml", "-o", folder / "cells" / cell.name, "-q", *words)
    monkeypatch.setattr("pkmlm.sweep.run.interleaved", lambda actions, *_: {each: Timing([0.5]) for each in actions})
    pkmlm("sweep", grid, "-o", folder, "-q", *given(*settings))
    (point,) = json.loads((folder / "results.json").read_text())["points"]
    assert point["tuned"] == "3e-3"
    assert len(point["measured"]["valid_loss"]["values"]) == 2
    assert point["measured"]["speed"]["values"] == [TIMED_TOKENS / 0.5 / 1000]


def test_an_error_in_timing_leaves_the_table(grid, tmp_path, tokens, monkeypatch):
    folder, copied = tmp_path / "swept", tmp_path / "tokens"
    shutil.copytree(tokens, copied)
    grid.write_text(GRID.replace("dense", "speed"))
    sweep = ("sweep", grid, "-o", folder, "-q", "-s", "train.steps=2", "-s", f"data.dir={copied}")
    train_cell(grid, folder, "-s", f"data.dir={copied}")
    (folder / "cells/none_seed-1").write_text("no run")  # this cell fails
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    (copied / "test.documents").unlink()
    said = pkmlm(*sweep, "--device", "3,1", code=1).stderr
    assert f"error: nothing was timed: {copied / 'test.documents'}" in said
    assert "error: none_seed-1: " in said
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1", "of the process that times, on the first"
    assert cells_in(folder)["256_seed-1"]["status"] == "measured"

    def crowded(path: Path, step: str) -> None:
        assert "256_seed-1" in cells_in(folder), "the table is there before anything is timed"
        raise MemoryError

    (folder / "results.json").unlink()
    monkeypatch.setattr("pkmlm.sweep.run.load_run", crowded)
    done = pkmlm(*sweep, code=1)
    assert "error: nothing was timed: memory does not hold all models together" in done.stderr
    assert done.stdout.startswith("Two memories: 1 of 2 runs\n")


def test_a_stopped_sweep_resumes(grid, tmp_path):
    folder = tmp_path / "swept"
    run = RunDirectory(folder / "cells" / "none_seed-1")

    def ask() -> None:
        wait_for(run.metrics_file)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = Thread(target=ask)
    with handled(lambda number, frame: None):  # a request that comes when no sweep hears it ends no tests
        asking.start()
        said = pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=5000", code=75).stderr
        asking.join()
    assert "stopped on request" in said
    assert run.facts()["status"] == "stopped", "the cell saved a checkpoint"
    assert not (folder / "cells" / "256_seed-1").exists()
    said = pkmlm("sweep", grid, "-o", folder, "--table", code=2).stderr
    assert "no run of this grid that has ended" in said, "it knows the -s, though nothing has ended"
    stopped = run.steps()[-1]
    (command,) = runner_of(grid, folder / "cells").commands(cells_of(grid, 5000)["none_seed-1"])
    last = f"train.steps={stopped + 3}"  # no more is needed
    said = pkmlm("sweep", grid, "-o", folder, "-s", last, code=2).stderr
    assert f"{folder} holds the sweep with train.steps=5000 (expected {last})" in said
    assert not (folder / "cells" / "256_seed-1").exists(), "nothing was trained beside it"
    pkmlm(*command, "-s", last)
    trained = [event["step"] for event in run.metrics() if event["event"] == "train"]
    assert trained == list(range(1, stopped + 4))
    assert f"resuming at step {stopped}" in (run.path / "train.log").read_text()
    told = pkmlm("sweep", grid, "-o", folder, "-s", last, "--table").stdout
    assert told.startswith("Two memories: 1 of 2 runs\n")
    assert {name: cell["step"] for name, cell in cells_in(folder).items()} == {"none_seed-1": stopped + 3}


def test_one_sweep_at_a_time_works_in_a_folder(grid, tmp_path):
    runs = tmp_path / "swept" / "cells"
    runs.mkdir(parents=True)
    with locked(runs / ".lock", "it"):
        said = pkmlm("sweep", grid, "-o", tmp_path / "swept", code=1).stderr
    assert f"error: the sweep {tmp_path / 'swept'} is in use by process {os.getpid()}" in said
    assert not (runs / "none_seed-1").exists()


def test_a_run_that_was_trained_longer_is_measured_again(grid, tmp_path):
    folder, task_data = tmp_path / "swept", tmp_path / "tasks"
    task_data.mkdir()
    (task_data / "piqa.jsonl").write_text(PIQA)
    grid.write_text(GRID.replace("valid_loss, dense", "perplexity, usage, piqa"))
    runs = folder / "cells"
    run = RunDirectory(runs / "256_seed-1")
    runner = runner_of(grid, runs, task_data)

    def row(steps: int) -> list[str]:
        told = pkmlm("sweep", grid, "-o", folder, "-s", f"train.steps={steps}", "--table").stdout
        return next(line.split() for line in told.splitlines() if line.startswith("256"))

    def keep_piqa(step: int, **scores: float) -> None:
        record = {"step": step, "checkpoint": checkpoint_digest(run.checkpoint(step)), "harness": {"limit": None}}
        record |= {"tasks": {"piqa": scores | {"chance": 0.5}}, "perplexity": None, "stride": None, "source": None}
        write_evaluation(run.path, tasks_file(record), record)

    commands = iter(runner.commands(cells_of(grid, 4)["256_seed-1"]))
    for _ in ("train", "eval", "usage-report"):
        pkmlm(*next(commands))
    keep_piqa(4, acc=0.875, num_fewshot=0)
    assert (row(4)[-1], "-" in row(4)) == ("0.875", False)
    longer = cells_of(grid, 8)["256_seed-1"]
    assert not list(runner.commands(longer)), "a sweep does not train it longer"
    pkmlm(
        "train",
        grid.parent / "product-key.yaml",
        "-o",
        run.path,
        "-q",
        *given(*longer.overrides),
    )
    keep_piqa(8, acc=0.5, num_fewshot=2)
    assert row(8) == ["256", "-", "-", "-", "-"], "neither what was measured at step 4, nor after examples"
    asked = []
    for command in runner.commands(longer):
        pkmlm(*command)
        asked.append(command[0])
    assert asked == ["eval", "usage-report", "eval"]
    assert not list(runner.commands(cells_of(grid, 8)["256_seed-1"])), "it lacks nothing"
    assert "-" not in row(8)
    cell = cells_in(folder)["256_seed-1"]
    kept = json.loads((run.path / "usage" / "test-step-8.json").read_text())["memories"]
    assert [memory["kl"] for memory in cell["usage"]] == [memory["mass"]["kl"] for memory in kept]
    tasks = json.loads((run.path / "eval" / "tasks-piqa-step-8.json").read_text())["tasks"]
    assert cell["tasks"] == {"piqa": tasks["piqa"]["acc"]}
    commands = iter(runner.commands(cells_of(grid, 2)["none_seed-1"]))
    pkmlm(*next(commands))
    assert [command[0] for command in commands] == ["eval", "eval"], "no memory, no usage"


def test_a_sweep_has_read_its_base_recipe_once(grid, tmp_path):
    runner, cell = runner_of(grid, tmp_path / "cells"), cells_of(grid, 2)["256_seed-1"]
    (grid.parent / "product-key.yaml").unlink()
    command = next(iter(runner.commands(cell)))
    assert load_recipe(command[1]) == cell.recipe


def test_a_cell_on_each_device(grid, tmp_path, monkeypatch):
    folder = tmp_path / "swept"
    said = pkmlm("sweep", grid, "-o", folder, "--device", "0,1", "--jobs", 3, code=2).stderr
    assert "--jobs 3: found 2 devices (expected one per job)" in said
    assert not folder.exists()
    for name in ("none_seed-1", "256_seed-1"):  # these cells fail before anything is started
        (folder / "cells" / name).mkdir(parents=True)
        (folder / "cells" / name / "recipe.yaml").write_text("name: &a x\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the command changes it
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    said = pkmlm("sweep", grid, "-o", folder, "--device", "0,1", code=2).stderr
    assert "error: --device 0,1: there is no GPU 1 here" in said
    done = pkmlm("sweep", grid, "-o", folder, "--device", "MIG-5f3a,MIG-41b3", code=1)
    assert f"2 runs in {folder}, 2 at a time" in done.stderr
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    done = pkmlm("sweep", grid, "-o", folder, "--device", "0,1", code=1)
    assert f"2 runs in {folder}, 2 at a time" in done.stderr


@pytest.mark.parametrize("dry", [False, True])
def test_steps_are_timed_on_the_devices_that_are_asked_for(grid, tmp_path, monkeypatch, dry):
    """CUDA looks once at which it may see: when steps are timed for equal budgets, before any cell runs."""
    seen = []

    def timed(recipes, *_):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return {"timed_on": {}, "busy_cores": 0.0, "steps": {key: [1.0] for key in recipes}}

    for module in ("budget", "run"):
        monkeypatch.setattr(f"pkmlm.sweep.{module}.time_steps", timed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(Runner, "run", lambda *_: None)
    grid.write_text(GRID + "equal: [seconds]\n")
    end = ["--dry-run"] if dry else ["-o", tmp_path / "swept"]
    pkmlm("sweep", grid, "-q", "-s", "train.steps=2", "--device", "3,1", *end)
    assert seen == ["3,1"] * (1 + dry)


@pytest.mark.parametrize(("names", "found"), [("abc", "abc"), ("0,,1", "nothing"), ("0,0", "0 twice"), ("-1", "-1")])
def test_devices_are_gpus_each_once(grid, tmp_path, names, found):
    gpus = "0,11,GPU-5f3a2b1c-0001-4d5e-8f9a-0b1c2d3e4f5a,MIG-GPU-5f3a2b1c/1/0,MIG-41b3e2"
    assert parse_devices(gpus) == gpus.split(",")
    said = pkmlm("sweep", grid, "-o", tmp_path / "swept", "--device", names, code=2).stderr
    assert f"--device {names}: found {found}" in said
    assert not (tmp_path / "swept").exists()


def test_a_cell_that_the_system_refuses_is_told(grid, tmp_path):
    text = GRID.replace("256: {", "2" * 256 + ": {").replace("    none: {model.memories: null}\n", "")
    grid.write_text(text)
    runner, ended = Runner(tmp_path / "cells", ["valid_loss"], Workers(), StopRequest(), source_sha256()), []
    cells = Cells(read_grid(grid)[0], grid.parent / "product-key.yaml", ["train.steps=2"])
    runner.run(cells, ended.append, lambda running: None)
    (failed,) = ended
    assert failed.status == "failed"
    assert failed.message.endswith(": File name too long")


def test_each_command_has_a_device_of_its_own(grid, tmp_path):
    """Three cells on two devices: two train at once, are ended, and the third has one of the devices again."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("what a process was given stands in /proc")
    grid.write_text(GRID.replace("without: [{slots: 64}]\n", ""))
    base, stop, given = grid.parent / "product-key.yaml", StopRequest(), {}
    runner = Runner(tmp_path / "cells", ["valid_loss"], Workers(2, ["4", "5"]), stop, source_sha256())

    def tick(running: list[Cell]) -> None:
        children = list(runner.children)
        if len(given) < 2 and len(children) < 2:
            return
        for child in (child for child in children if child.pid not in given):
            entries = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
            given[child.pid] = dict(entry.split(b"=", 1) for entry in entries if entry)[b"CUDA_VISIBLE_DEVICES"]
            child.kill()

    ended: list[CellOutcome] = []
    runner.run(Cells(read_grid(grid)[0], base, ["train.steps=5000"]), ended.append, tick)
    assert [(outcome.status, outcome.exit_code) for outcome in ended] == [("failed", 1)] * 3
    assert {outcome.message for outcome in ended} == {
        "pkmlm train was killed (SIGKILL): if nobody killed it, memory ran out"
    }
    *first, third = given.values()
    assert sorted(first) == [b"4", b"5"]
    assert third in first


def test_splits_that_a_sweep_will_need_are_asked_for_first(grid, novels, tmp_path):
    no_tokens = ("-s", "data.dir=null", "-s", "model.vocab_size=400")
    said = pkmlm("sweep", grid, "-o", tmp_path / "swept", *no_tokens, code=2).stderr
    assert said.startswith("error: data.dir is not set\nhint: ")
    pkmlm("tokenize", novels / "valid.txt", "-o", tmp_path / "tokens", "--vocab-size", 400)
    for text, expected in (
        (TUNED, "tokens has no valid split, by which the grid chooses optim.lr"),
        (GRID, "tokens has no valid split, on which the grid measures valid_loss"),
        (GRID.replace("valid_loss", "usage"), "tokens has no test split, on which the grid measures usage"),
    ):
        grid.write_text(text)
        done = pkmlm("sweep", grid, "-o", tmp_path / "swept", "-s", f"data.dir={tmp_path / 'tokens'}", code=2)
        assert expected in done.stderr
        assert not (tmp_path / "swept").exists(), "told before anything is trained"


def test_a_folder_of_another_sweep_or_of_other_files_is_left_alone(grid, tmp_path):
    folder = tmp_path / "swept"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    said = pkmlm("sweep", grid, "-o", folder / "README.md", code=2).stderr
    assert f"{folder / 'README.md'} is a file" in said
    said = pkmlm("sweep", grid, "-o", folder, "--table", code=2).stderr
    assert f"{folder} holds no sweep" in said
    assert (folder / "README.md").read_text() == "mine"
    (folder / "README.md").unlink()
    for missing in (folder, tmp_path / "swetp"):
        said = pkmlm("sweep", grid, "-o", missing, "--table", code=2).stderr
        assert f"{missing} holds no run of this grid" in said
    assert not (tmp_path / "swetp").exists()
    assert not list(folder.iterdir())
    for place, theirs in (
        (folder, {"grid": "grid", "scale": None}),
        (tmp_path / "two", {"grid": "other", "scale": "small"}),
    ):
        (place / "cells").mkdir(parents=True)
        said = pkmlm("sweep", grid, "-o", place, "--table", code=2).stderr
        assert f"{place} holds no run of this grid" in said
        (place / "results.json").write_text(json.dumps(theirs | {"set": [], "cells": [], "speed": []}))
    other = grid.with_name("other.yaml")
    other.write_text(GRID + "scales: {small: {}, large: {}}\n")
    for words, said in (
        ([other, "-o", folder], "(expected other at scale small)"),
        ([other, "-o", tmp_path / "two", "--scale", "large"], "--scale"),
    ):
        before = (words[2] / "results.json").read_bytes()
        assert said in pkmlm("sweep", *words, "--table", code=2).stderr
        assert (words[2] / "results.json").read_bytes() == before


def test_rows_of_tasks_are_asked_for_before_anything_is_trained(grid, tmp_path):
    grid.write_text(GRID.replace("valid_loss", "logiqa"))
    done = pkmlm("sweep", grid, "-o", tmp_path / "swept", code=2)
    assert "logiqa" in done.stderr
    assert "--task-data" in done.stderr
    assert not (tmp_path / "swept").exists()
    grid.write_text(GRID.replace("valid_loss", "piqa"))
    (tmp_path / "piqa.jsonl").write_text(PIQA + '{"goal": 3}\n')
    done = pkmlm("sweep", grid, "-o", tmp_path / "swept", "--task-data", tmp_path, code=2)
    assert str(tmp_path / "piqa.jsonl") in done.stderr
    assert not (tmp_path / "swept").exists()


def test_an_error_ends_the_sweep_at_once(grid, tmp_path):
    """One cell is done, one has begun, one waits: the second is asked to stop, and the third never begins."""
    grid.write_text("""base: product-key.yaml
axes: {steps: {2: {train.steps: 2}, 5000: {train.steps: 5000}, 3: {train.steps: 3}}}
measure: [valid_loss]
""")
    base, runs = grid.parent / "product-key.yaml", tmp_path / "cells"
    pkmlm("train", base, "-o", runs / "2_seed-1", "-q", "-s", "train.steps=2")

    def done(outcome: CellOutcome) -> None:
        while not runner.children:
            time.sleep(0.05)
        raise RuntimeError(f"told of {outcome.cell.name}")

    runner = runner_of(grid, runs)
    with pytest.raises(RuntimeError, match="told of 2_seed-1"):
        runner.run(Cells(read_grid(grid)[0], base), done, lambda running: None)
    assert len(runner.asked) == 1, "no other command began"
    assert not runner.children
    assert not (runs / "3_seed-1").exists()


def test_a_cell_that_fails_fails_alone(grid, tmp_path, trained):
    """One cannot be read, one is a run of another recipe, one is done."""
    folder = tmp_path / "swept"
    grid.write_text(GRID.replace("without: [{slots: 64}]\n", ""))
    bad = folder / "cells" / "none_seed-1"
    bad.mkdir(parents=True)
    (bad / "done").touch()
    (bad / "recipe.yaml").write_text("name: &a x\n")
    shutil.copytree(trained("flat-key"), folder / "cells" / "64_seed-1", symlinks=True)
    train_cell(grid, folder)
    for content in (
        "[]",
        '{"grid": "grid", "speed": [{"point": {"slots": "64"}, "tokens_per_second": [], "timed_on": 5}]}',
    ):
        (folder / "results.json").write_text(content)
        said = pkmlm("sweep", grid, "-o", folder, "--table", code=1).stderr
        assert "the sweep's results" in said
    (folder / "results.json").unlink()
    told = pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=2", "--table", code=1)
    assert "error: none_seed-1: " in told.stderr
    assert told.stdout.splitlines()[4].split()[:3] == ["none", "-", "failed"]
    done = pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=2", "-q", code=1)
    assert (done.stdout, done.stderr.partition("error: ")[2]) == (told.stdout, told.stderr.removeprefix("error: "))
    assert done.stderr.startswith("warning: none_seed-1, 64_seed-1, 256_seed-1: optim.warmup_steps: 5 for 2 steps ")
    cells = cells_in(folder)
    assert {name: cell["status"] for name, cell in cells.items()} == {
        "none_seed-1": "failed",
        "64_seed-1": "failed",
        "256_seed-1": "measured",
    }
    assert "anchors" in cells["none_seed-1"]["message"]
    assert cells["64_seed-1"]["message"].startswith("its run has ")
    assert "1:7: anchors" in done.stderr


def test_a_dry_run_lists_the_cells_and_writes_nothing(grid, tmp_path):
    done = pkmlm("sweep", grid, "--dry-run")
    assert done.stdout.startswith("Two memories: 2 runs")
    rows = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[5] for row in rows] == ["0.0077"] * 2, "30 steps of 256 tokens are no 0.0 million"
    assert all(0 < float(row[3]) < 1 for row in rows), "nor are the operations of a tiny model"
    grid.write_text(GRID.replace("num_keys: 16", "num_keys: 16, optim.warmup_steps: 60"))
    said = pkmlm("sweep", grid, "--dry-run").stderr
    assert said.startswith("warning: 256_seed-1: optim.warmup_steps: 60 for 30 steps of training: ")
    assert not (tmp_path / "cells").exists()
    assert "-o" in pkmlm("sweep", grid, code=2).stderr
    grid.write_text(GRID.replace("valid_loss, dense", "dense"))
    title, _, headings, *_ = pkmlm("sweep", grid, "--dry-run").stdout.splitlines()
    assert (title, headings.split()[-2:]) == ("Two memories: no runs", ["M", "ops/token"])


def test_a_broken_grid_is_refused_before_anything_is_trained(grid, tmp_path):
    grid.write_text(GRID.replace("num_keys: 16", "num_keys: 0"))
    assert "slots 256: " in pkmlm("sweep", grid, "-o", tmp_path / "swept", code=2).stderr
    assert not (tmp_path / "swept").exists()
    assert "cannot read" in pkmlm("sweep", tmp_path / "no.yaml", "-o", tmp_path / "swept", code=2).stderr
