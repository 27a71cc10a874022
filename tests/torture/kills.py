"""Kills at random moments of training and tokenizing, each followed by the same command again."""

import filecmp
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torture.oracle import INIT_SCALE, KINDS, Ground

LONGEST = 3.0  # seconds until a kill


def kill(
    ground: Ground,
    words: list[object],
    prepare: Callable[[], object],
    draw: random.Random,
    ranks: int = 1,
    **given: Any,
) -> None:
    """Run a command and kill it (SIGKILL) at a random moment; where it had ended before, prepare and run it again. Of
    several ranks, one is killed and then the others, as a launcher does.
    """
    longest = LONGEST
    while True:
        prepare()
        child = ground.forks.start("command", size=ranks, words=[str(word) for word in words], **given)
        began = time.monotonic()
        after = longest * draw.random()
        while child.running() and time.monotonic() - began < after:
            time.sleep(0.005)
        longest = min(longest, time.monotonic() - began) if not child.running() else longest
        for rank in draw.sample(range(ranks), ranks):
            child.signal(signal.SIGKILL, rank)
            time.sleep(draw.random() * 0.1)
        if any(ended.code == -signal.SIGKILL for ended in child.end()):
            return


def kill_training(ground: Ground, number: int) -> tuple[bool, str]:
    """Trial `number`: kill, resume, compare. Returns whether nothing was lost, and the kind of run, how many
    checkpoints the kill left, and what differed.
    """
    draw = random.Random(number)
    kind, run = list(KINDS)[number % len(KINDS)], ground.folder / "killed"
    words = ["train", ground.recipe(kind), "-o", run]
    kill(ground, words, lambda: shutil.rmtree(run, ignore_errors=True), draw, KINDS[kind][2], init_scale=INIT_SCALE)
    what = f"{kind} with {len(list(run.glob('checkpoints/step-*')))} checkpoints"
    ended = ground.train(kind, run, code=None)
    lost = [f"exit {ended.code}: {ended.stderr[-200:]}"] if ended.code else ground.differences(kind, run)
    return not lost, ": ".join(filter(None, [what, ", ".join(lost)[:300]]))


def kill_tokenizing(ground: Ground, number: int) -> tuple[bool, str]:
    """As `kill_training`; every second trial replaces tokens that are there, which must stay whole until then."""
    draw = random.Random(number)
    out, force = ground.folder / "tokenized", number % 2 == 1
    command = ["tokenize", ground.text, "--valid", ground.folder / "valid.txt", "-o", out, "--vocab-size", 350]
    command += ["--force"] if force else []
    older = older_tokens(ground)

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if force:
            shutil.copytree(older, out)

    kill(ground, command, prepare, draw)
    lost = [] if whole(ground, out, force) else ["half a folder"]
    if not out.exists() or "--force" in command:
        ended = ground.forks.pkmlm(*command, code=None)
        lost += [f"exit {ended.code}: {ended.stderr[-200:]}"] if ended.code else []
    lost += [] if not lost and same(out, ground.tokens) else ["other bytes"]
    return not lost, ", ".join(lost)


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
