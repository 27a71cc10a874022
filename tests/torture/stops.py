"""SIGTERM at random moments from the first line of the log on."""

import json
import random
import shutil
import signal
import time

from tests.torture.oracle import INIT_SCALE, Ground

SOON = 10.0  # seconds


def stop_training(ground: Ground, number: int) -> tuple[bool, str]:
    """Ask a training to stop at a random moment; its checkpoint must be there, its exit code 75 (or 0, if it had just
    finished), and a resume must end as a run that was never stopped.
    """
    from pkmlm.runtime.rundir import RunDirectory
    from pkmlm.train.checkpoint import verify

    draw = random.Random(number)
    run = ground.folder / "stopped"
    shutil.rmtree(run, ignore_errors=True)
    words = ["train", str(ground.recipe("product-key")), "-o", str(run)]
    child = ground.forks.start("command", words=words, init_scale=INIT_SCALE)
    log = run / "train.log"
    while child.running() and not (log.exists() and log.stat().st_size):
        time.sleep(0.0005)
    time.sleep(draw.random() * 0.4)
    asked = time.monotonic()
    child.signal(signal.SIGTERM)
    ended = child.end()
    took = time.monotonic() - asked
    facts = json.loads((run / "run.json").read_text())
    lost = [] if took < SOON else [f"took {took:.1f} s"]
    if (ended.code, facts["status"], facts["exit_code"]) not in ((75, "stopped", 75), (0, "finished", 0)):
        lost.append(f"exit {ended.code}, run.json {facts['status']} {facts['exit_code']}: {ended.stderr[-200:]}")
    steps = RunDirectory(run).steps()
    lost += [] if steps and facts["step"] == steps[-1] else [f"no checkpoint of step {facts['step']}"]
    for step in steps:
        verify(RunDirectory(run).checkpoint(step))
    again = ground.train("product-key", run, code=None)
    lost += [f"again: exit {again.code}"] if again.code else ground.differences("product-key", run)
    return not lost, ", ".join(lost) if lost else facts["status"]
