"""`pkmlm sweep`: grids of tiny models, trained and measured for real."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pkmlm.runtime.rundir import RunDirectory
from pkmlm.runtime.signals import StopRequest
from pkmlm.sweep.cells import Cells
from pkmlm.sweep.grid import read_grid
from pkmlm.sweep.runner import Outcome, Runner
from tests.conftest import pkmlm

GRID = """title: Two memories
base: product-key.yaml
axes:
  slots: {none: {model.memory.kind: none}, 64: {model.memory.num_keys: 8}, 256: {model.memory.num_keys: 16}}
without: [{slots: 64}]
tune: {values: [3e-3, 1e30]}
measure: [perplexity, usage, speed, dense]
paper: {perplexity: [23.0, 22.0, 21.0]}
claims: [{text: the memory helps, measure: perplexity, greater: {slots: none}, less: {slots: 256}}]
figures: [{x: slots, y: perplexity}]
"""
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


def test_a_sweep_trains_measures_and_tells(grid, tmp_path):
    """One value of the rate diverges: it is a result, not a failure; the second call only tells again."""
    folder = tmp_path / "swept"
    done = pkmlm("sweep", grid, "-o", folder, "--jobs", 2, "-s", "train.steps=12")
    results = json.loads((folder / "results.json").read_text())
    assert {cell["status"] for cell in results["cells"] if cell["tuned"] == "1e30"} == {"diverged"}
    for point in results["points"]:
        (name,) = [c["name"] for c in results["cells"] if c["point"] == point["point"] and c["tuned"] == "3e-3"]
        kept = json.loads(next((folder / "cells" / name / "eval").glob("test-step-12.json")).read_text())
        assert point["measured"]["perplexity"]["mean"] == kept["perplexity"]["token_ppl"]
        assert point["measured"]["speed"]["mean"] > 0
        assert point["tuned"] == "3e-3"
        assert (point["measured"]["usage"] is None) == (point["point"]["slots"] == "none")
    assert [point["paper"]["perplexity"] for point in results["points"]] == [23.0, 21.0]
    assert (folder / "perplexity-by-slots.png").read_bytes().startswith(b"\x89PNG")
    assert "diverged" in (folder / "table.md").read_text()
    assert "4/4" in done.stderr
    times = {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*.safetensors")}
    again = pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=12", "-q")
    assert again.stdout == done.stdout, "timed once, told twice"
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "cells").rglob("*.safetensors")}
    assert pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=12", "--table").stdout.startswith("Two memories")
    changed = pkmlm(
        "sweep", grid, "-o", folder, "-s", "train.steps=12", "-s", "model.dim=16", "-q", "--jobs", 2, code=1
    )
    assert "was started with another recipe" in json.dumps(json.loads((folder / "results.json").read_text())["cells"])
    assert "failed" in changed.stdout


def test_a_stopped_sweep_goes_on(grid, tmp_path):
    folder = tmp_path / "swept"
    text = GRID.replace("tune: {values: [3e-3, 1e30]}\n", "").replace(", usage, speed, dense]", "]")
    grid.write_text(text)
    command = [sys.executable, "-m", "pkmlm", "sweep", str(grid), "-o", str(folder), "-s", "train.steps=3000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sweep:
        deadline = time.monotonic() + 60
        log = folder / "cells" / "none_seed-1" / "metrics.jsonl"
        while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        sweep.send_signal(signal.SIGTERM)
        _, said = sweep.communicate(timeout=60)
    assert sweep.returncode == 75, said
    assert "the same command goes on" in said
    run = json.loads((folder / "cells" / "none_seed-1" / "run.json").read_text())
    assert run["status"] == "stopped", "the cell saved a checkpoint"
    assert not (folder / "cells" / "256_seed-1").exists()
    stopped = RunDirectory(folder / "cells" / "none_seed-1").steps()[-1]
    pkmlm("sweep", grid, "-o", folder, "-s", f"train.steps={stopped + 4}", "-q")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, stopped + 5))
    assert f"resuming at step {stopped}" in (log.parent / "train.log").read_text()
    cells = {cell["name"]: cell for cell in json.loads((folder / "results.json").read_text())["cells"]}
    assert {cell["step"] for cell in cells.values()} == {stopped + 4}
    assert cells.keys() == {"none_seed-1", "256_seed-1"}


def test_a_sweep_that_trains_longer_measures_again(grid, tmp_path):
    folder, task_data = tmp_path / "swept", tmp_path / "tasks"
    task_data.mkdir()
    (task_data / "piqa.jsonl").write_text(PIQA)
    text = GRID.replace("tune: {values: [3e-3, 1e30]}\n", "").replace(", usage, speed, dense]", ", usage, piqa]")
    grid.write_text(text.replace("without: [{", "without: [{slots: none}, {"))
    run = folder / "cells" / "256_seed-1"
    train = ("train", grid.parent / "product-key.yaml", "-o", run, "-q", "-s", "model.memory.num_keys=16")
    pkmlm(*train, "-s", "train.steps=4")
    pkmlm("eval", run, "-q")
    pkmlm("usage-report", run, "-q")
    (run / "eval" / "tasks-piqa-step-4.json").write_text('{"step": 4, "tasks": {"piqa": {"acc": 0.875}}}')
    again = ("sweep", grid, "-o", folder, "--task-data", task_data, "-q")
    row = pkmlm(*again, "-s", "train.steps=4", "--table").stdout.splitlines()[4].split()
    assert (row[-1], "-" in row) == ("0.875", False)
    pkmlm(*train, "-s", "train.steps=8")
    row = pkmlm(*again, "-s", "train.steps=8", "--table").stdout.splitlines()[4].split()
    assert row == ["256", "1", "-", "21.00", "-", "-"], "what was measured at step 4 is not that of step 8"
    pkmlm(*again, "-s", "train.steps=8")
    (cell,) = json.loads((folder / "results.json").read_text())["cells"]
    kept = json.loads((run / "usage" / "test-step-8.json").read_text())["memories"]
    assert [memory["kl"] for memory in cell["usage"]] == [memory["mass"]["kl"] for memory in kept]
    tasks = json.loads((run / "eval" / "tasks-piqa-step-8.json").read_text())["tasks"]
    assert cell["tasks"] == {"piqa": tasks["piqa"]["acc"]}


def test_a_cell_on_each_device(grid, tmp_path):
    folder = tmp_path / "swept"
    said = pkmlm("sweep", grid, "-o", folder, "--device", "0,1", "--jobs", 3, code=2).stderr
    assert "--jobs 3: found 2 devices (expected one a job)" in said
    assert not folder.exists()
    grid.write_text(GRID.replace("tune: {values: [3e-3, 1e30]}\n", "").replace(", usage, speed, dense]", "]"))
    for name in ("none_seed-1", "256_seed-1"):  # no runs: these cells fail before anything is started
        (folder / "cells" / name).mkdir(parents=True)
        (folder / "cells" / name / "done").touch()
    done = pkmlm("sweep", grid, "-o", folder, "--device", "0,1", code=1)
    assert f"2 runs in {folder}, 2 at a time" in done.stderr


def test_no_value_can_be_chosen_without_a_valid_split(grid, novels, tmp_path):
    pkmlm("tokenize", novels / "valid.txt", "-o", tmp_path / "tokens", "--vocab-size", 400)
    done = pkmlm("sweep", grid, "-o", tmp_path / "swept", "-s", f"data.dir={tmp_path / 'tokens'}", code=2)
    assert "tokens has no valid split, by which the grid chooses optim.lr" in done.stderr
    assert not (tmp_path / "swept").exists(), "told before anything is trained"


def test_an_error_ends_the_sweep_at_once(grid, tmp_path):
    """One cell has ended, two train for long, one waits: they save checkpoints, and it never begins."""
    grid.write_text("""base: product-key.yaml
axes: {steps: {2: {train.steps: 2}, 3000: {train.steps: 3000}, 4000: {train.steps: 4000}, 3: {train.steps: 3}}}
""")
    cells, runs = Cells(read_grid(grid), grid.parent / "product-key.yaml"), tmp_path / "cells"
    long = [runs / f"{steps}_seed-1" for steps in (3000, 4000)]
    deadline = time.monotonic() + 60

    def done(outcome: Outcome) -> None:
        while not all((run / "metrics.jsonl").exists() for run in long):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        raise RuntimeError(f"told of {outcome.cell.name}")

    runner = Runner(cells.base, runs, ["valid_loss"], 2, [], None, StopRequest())
    with pytest.raises(RuntimeError, match="told of 2_seed-1"):
        runner.run(cells, done, lambda running: None)
    assert [json.loads((run / "run.json").read_text())["status"] for run in long] == ["stopped"] * 2
    assert len(runner.asked) == 2, "no other command began"
    assert time.monotonic() < deadline


def test_a_killed_sweep_takes_its_command_along(grid, tmp_path):
    folder = tmp_path / "swept"
    grid.write_text(GRID.replace("tune: {values: [3e-3, 1e30]}\n", "").replace(", usage, speed, dense]", "]"))
    command = [sys.executable, "-m", "pkmlm", "sweep", str(grid), "-o", str(folder), "-s", "train.steps=100000", "-q"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as sweep:
        run, deadline = folder / "cells" / "none_seed-1", time.monotonic() + 60
        while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        sweep.kill()
    while json.loads((run / "run.json").read_text())["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads((run / "run.json").read_text())["exit_code"] == 75


def test_a_cell_that_cannot_be_read_fails_alone(grid, tmp_path):
    folder = tmp_path / "swept"
    text = GRID.replace("tune: {values: [3e-3, 1e30]}\n", "").replace(", usage, speed, dense]", ", dense]")
    grid.write_text(text)
    bad = folder / "cells" / "none_seed-1"
    bad.mkdir(parents=True)
    (bad / "done").touch()
    (bad / "recipe.yaml").write_text("name: &a x\n")
    for content in (
        "[]",
        '{"speed": 5}',
        '{"speed": [{}]}',
        '{"speed": [{"point": {"slots": 5}, "tokens_per_second": []}]}',
    ):
        (folder / "results.json").write_text(content)
        said = pkmlm("sweep", grid, "-o", folder, "--table", code=2).stderr
        assert "the sweep's results" in said
    (folder / "results.json").unlink()
    pkmlm("sweep", grid, "-o", folder, "--table")
    done = pkmlm("sweep", grid, "-o", folder, "-s", "train.steps=2", code=1)
    cells = {cell["name"]: cell for cell in json.loads((folder / "results.json").read_text())["cells"]}
    assert cells["256_seed-1"]["status"] == "measured"
    assert (cells["none_seed-1"]["status"], "anchors" in cells["none_seed-1"]["message"]) == ("failed", True)
    assert "1:7: anchors" in done.stderr


def test_a_dry_run_lists_the_cells_and_writes_nothing(grid, tmp_path):
    done = pkmlm("sweep", grid, "--dry-run")
    assert done.stdout.startswith("Two memories: 4 runs")
    assert not (tmp_path / "cells").exists()
    assert "-o" in pkmlm("sweep", grid, code=2).stderr


def test_a_broken_grid_is_refused_before_anything_is_trained(grid, tmp_path):
    grid.write_text(GRID.replace("num_keys: 16", "num_keys: 0"))
    assert "slots 256: " in pkmlm("sweep", grid, "-o", tmp_path / "swept", code=2).stderr
    assert not (tmp_path / "swept").exists()
    assert "cannot read" in pkmlm("sweep", tmp_path / "no.yaml", "-o", tmp_path / "swept", code=2).stderr
