"""Damage of checkpoints and of tokens, as a disk or a copy does it: each is found and told in one line."""

import random
import re
import shutil
from pathlib import Path

from tests.forks import Ended
from tests.torture.oracle import Ground

STOPPED = 9  # the step of the checkpoint that is damaged; two intact ones are below it


def spoil(path: Path, draw: random.Random) -> str:
    """Do one thing to a file; say what."""
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "flip", "flip", "flip", "cut", "zero", "missing"))
    if kind == "missing":
        path.unlink()
        return "missing"
    place = draw.randrange(len(data))
    if kind == "cut":
        del data[min(place, len(data) - 2) :]  # JSON may lack its last newline
    elif kind == "zero" and any(data[place : place + 512]):  # as a power cut leaves blocks
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    else:
        kind = "flip"
        data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return kind


def spoil_checkpoint(ground: Ground, number: int) -> tuple[bool, str]:
    """Spoil the newest checkpoint of a run that was stopped, evaluate it and resume the run. The evaluation is refused,
    unless it does not read what is damaged: the optimizer's file, and its line in the manifest. The resume falls back
    on an older checkpoint, or refuses one of another version.
    """
    draw, run = random.Random(number), ground.stopped_at("product-key", STOPPED, ground.folder / "spoilt-run")
    path = draw.choice(sorted((run / "checkpoints" / f"step-{STOPPED:08d}").iterdir()))
    what = f"{path.name}: {spoil(path, draw)}"
    ended = ground.forks.pkmlm("eval", run, "--split", "valid", code=None)
    passed_over = ended.code == 0 and path.name in ("manifest.json", "optimizer.safetensors")
    lost = [] if passed_over or refused(ended, (1, 2)) else [f"eval: exit {ended.code}, said {ended.stderr[-300:]!r}"]
    ended = ground.train("product-key", run, "-q", code=None)
    if path.name != "manifest.json" or not refused(ended, (2,)):
        lost += [] if re.match(r"warning: .*damaged", ended.stderr) else [f"train said {ended.stderr[-300:]!r}"]
        found = ground.differences("product-key", run) if ended.code == 0 else [f"train: exit {ended.code}"]
        lost += [name for name in found if name != "warn"]
    return not lost, f"{what}: {', '.join(lost)}" if lost else what.rpartition(" ")[2]


def spoil_tokens(ground: Ground, number: int) -> tuple[bool, str]:
    """Spoil a folder of tokens and look at the first step of a training on it, every byte checked first."""
    draw, folder = random.Random(number), ground.folder / "spoilt-tokens"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ground.tokens, folder)
    path = draw.choice(sorted(folder.iterdir()))
    what = f"{path.name}: {spoil(path, draw)}"
    words = ("train", ground.recipe("mixed"), "-s", f"data.dir={folder}", "--verify", "--dry-run")
    ended = ground.forks.pkmlm(*words, code=None)
    right = refused(ended, (2,))
    return right, what.rpartition(" ")[2] if right else f"{what}: exit {ended.code}, said {ended.stderr[-300:]!r}"


def refused(ended: Ended, codes: tuple[int, ...]) -> bool:
    """Whether a command said in one line (and a hint) that something is wrong, and ended with one of `codes`."""
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("hint: ")]
    return ended.code in codes and len(lines) == 1 and lines[0].startswith("error: ") and lines[0].isprintable()
