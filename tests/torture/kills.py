"""Kills at random moments of training and tokenizing, each followed by the same command again."""

import filecmp
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from tests.torture.oracle import INIT_SCALE, KINDS, Ground
from tests.torture.phases import TOKENIZING, TRAINING, Phases, phases_of

# Where the kill is aimed at, and how long after the phase has begun it may come (seconds). Where it hits is noted.
AIMS = {
    "train": {
        "begin": 0.02,
        "build": 0.02,
        "step": 0.02,
        "validate": 0.03,
        "write": 0.01,
        "tensors": 0.003,
        "manifest": 0.003,
        "prune": 0.004,
        "point": 0.003,
        "log": 0.001,
        "outside": 0.3,
    },
    "tokenize": {
        "learn": 0.05,
        "split": 0.03,
        "shards": 0.03,
        "index": 0.003,
        "result": 0.003,
        "outside": 0.1,
    },
}


OFTEN = {"step", "validate", "write", "tensors", "manifest", "prune", "point", "log"}


def kill(
    ground: Ground, words: list[object], aim: str, draw: random.Random, ranks: int = 1, **arguments: Any
) -> str | None:
    """Run a command and kill it (SIGKILL) about where `aim` says; the phase that it was in, or None if it had ended. Of
    several ranks, one is killed and then the others, as a launcher does.
    """
    kind = str(words[0])
    phases = Phases(ground.folder / f"phases-{kind}", phases_of(TOKENIZING if kind == "tokenize" else TRAINING))
    phases.clear()
    times = draw.randint(1, 4) if aim in OFTEN else 1
    delay = draw.random() * AIMS[kind][aim]
    path = str(ground.folder / f"phases-{kind}")
    given = [str(word) for word in words]
    child = ground.forks.start("command", size=ranks, words=given, phases=path, **arguments)
    until = time.monotonic() + 20
    while aim != "outside" and phases.times(aim) < times and time.monotonic() < until:
        time.sleep(0.0001)
        if time.monotonic() - child.began > 0.3 and not child.running():
            break
    time.sleep(delay)
    for rank in draw.sample(range(ranks), ranks):
        child.signal(signal.SIGKILL, rank)
        time.sleep(draw.random() * 0.1)
    return phases.now() if any(ended.code == -signal.SIGKILL for ended in child.end()) else None


def kill_training(ground: Ground, number: int) -> tuple[bool, str]:
    """Trial `number`: kill, resume, compare. Returns whether nothing was lost, and the phase or what differed."""
    draw = random.Random(number)
    kind, aim = list(KINDS)[number % len(KINDS)], list(AIMS["train"])[number // len(KINDS) % len(AIMS["train"])]
    run = ground.folder / "killed"
    phase = None
    while phase is None:  # it had ended before the kill came: aim again
        shutil.rmtree(run, ignore_errors=True)
        words = ["train", ground.recipe(kind), "-o", run]
        phase = kill(ground, words, aim, draw, KINDS[kind][2], init_scale=INIT_SCALE)
    ended = ground.train(kind, run, code=None)
    lost = [f"exit {ended.code}: {ended.stderr[-200:]}"] if ended.code else ground.differences(kind, run)
    return not lost, f"{kind} {phase}" if not lost else f"{kind} {phase}: {', '.join(lost)[:300]}"


def kill_tokenizing(ground: Ground, number: int) -> tuple[bool, str]:
    """As `kill_training`; every second trial replaces tokens that are there, which must stay whole until then."""
    draw = random.Random(number)
    aim = list(AIMS["tokenize"])[number % len(AIMS["tokenize"])]
    out, force = ground.folder / "tokenized", number // len(AIMS["tokenize"]) % 2 == 1
    command = ["tokenize", ground.text, "--valid", ground.folder / "valid.txt", "-o", out, "--vocab-size", 350]
    command += ["--force"] if force else []
    phase = None
    while phase is None:
        shutil.rmtree(out, ignore_errors=True)
        if force:
            shutil.copytree(older_tokens(ground), out)
        phase = kill(ground, command, aim, draw)
    lost = [] if whole(ground, out, force) else ["half a folder"]
    if not out.exists() or "--force" in command:
        ended = ground.forks.pkmlm(*command, code=None)
        lost += [f"exit {ended.code}: {ended.stderr[-200:]}"] if ended.code else []
    lost += [] if not lost and same(out, ground.tokens) else ["other bytes"]
    return not lost, phase + (": " + ", ".join(lost) if lost else "")


def older_tokens(ground: Ground) -> Path:
    folder = ground.folder / "older"
    if not folder.exists():
        ground.forks.pkmlm("tokenize", ground.folder / "valid.txt", "-o", folder, "--vocab-size", 320)
    return folder


def whole(ground: Ground, out: Path, force: bool) -> bool:
    """Whether there is nothing, or all of the new tokens, or (where they are replaced) all of the old, if only under
    the name from which the next attempt takes them back.
    """
    if not out.exists():
        return not force or same(out.with_name(f".tmp-old-{out.name}"), older_tokens(ground))
    return same(out, ground.tokens) or (force and same(out, older_tokens(ground)))


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files."""
    names = sorted(path.name for path in one.iterdir()) if one.is_dir() else []
    if not names or names != sorted(path.name for path in other.iterdir()):
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])
