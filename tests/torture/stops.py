"""SIGTERM at random moments from the first line of the log on."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

from tests.forks import ROOT
from tests.torture.oracle import INIT_SCALE, Ground

SOON = 10.0  # seconds


# The demo's model at the demo's batch; some twenty seconds with validations, saves and a sample within them.
DEMO = ("train.steps=24", "train.precision=fp32", "eval.every=6", "eval.tokens=5000", "checkpoint.every=8")


def stop_training(ground: Ground, number: int) -> tuple[bool, str]:
    """Ask a training to stop at a random moment; its checkpoint must be there, its exit code 75 (or 0, if it had just
    finished), and a resume must end as a run that was never stopped.
    """
    run = ground.folder / "stopped"
    words = ["train", str(ground.recipe("product-key")), "-o", str(run)]
    lost, _, status = stop(ground, run, words, random.Random(number).random() * 0.4)
    again = ground.train("product-key", run, code=None)
    lost += [f"again: exit {again.code}"] if again.code else ground.differences("product-key", run)
    return not lost, ", ".join(lost) or status


def stop_demo(ground: Ground, number: int) -> tuple[bool, str]:
    """The same with the demo's product-key model, which has to be quick about it."""
    settings = [part for text in (f"data.dir={ground.tokens}", *DEMO) for part in ("-s", text)]
    run, words = ground.folder / "stopped-demo", ["train", str(ROOT / "recipes" / "demo.yaml"), *settings]
    lost, took, status = stop(ground, run, [*words, "-o", str(run)], random.Random(number).random() * 20)
    return not lost, ", ".join(lost) or f"{status} after {took:.2f} s"


def stop(ground: Ground, run: Path, words: list[str], delay: float) -> tuple[list[str], float, str]:
    """Ask a new training in `run` to stop, `delay` seconds after its first line; what is wrong with how it ended, the
    seconds that it took, and the status that it left.
    """
    from pkmlm.runs.checkpoint import verify
    from pkmlm.runs.directory import RunDirectory

    shutil.rmtree(run, ignore_errors=True)
    child = ground.forks.start("command", words=words, init_scale=INIT_SCALE)
    log = run / "train.log"
    while child.running() and not (log.exists() and log.stat().st_size):
        time.sleep(0.0005)
    moment = time.monotonic() + delay
    while child.running() and time.monotonic() < moment:
        time.sleep(0.01)
    asked = time.monotonic()
    child.signal(signal.SIGTERM)
    (ended,) = child.end()
    took = time.monotonic() - asked
    facts = json.loads((run / "run.json").read_text())
    lost = [] if took < SOON else [f"took {took:.1f} s"]
    if (ended.code, facts["status"], facts["exit_code"]) not in ((75, "stopped", 75), (0, "finished", 0)):
        lost.append(f"exit {ended.code}, run.json {facts['status']} {facts['exit_code']}: {ended.stderr[-200:]}")
    steps = RunDirectory(run).steps()
    lost += [] if steps and facts["step"] == steps[-1] else [f"no checkpoint of step {facts['step']}"]
    for step in steps:
        verify(RunDirectory(run).checkpoint(step))
    return lost, took, facts["status"]
