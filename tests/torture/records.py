"""Corruptions of what a run only records: no command may end in a traceback or hang, whatever it makes of them."""

import os
import random
import shutil
from pathlib import Path

from tests.torture.oracle import Ground

COMMANDS = ("compare", "eval", "usage-report", "train")
STRANGE = (
    b"",
    b"[]",
    b"{}",
    b"null",
    b"5",
    b"[" * 100_000,
    b'{"step": 1e999}',
    b"\xff\xfe",
    b"\0" * 4096,
    b'{"a": NaN}',
)


def recorded(ground: Ground) -> Path:
    """A run stopped half-way, with its measurements."""
    run = ground.folder / "recorded"
    if not run.exists():
        made = ground.stopped_at("product-key", 6, ground.folder / "recorded-so-far")
        for words in (["eval", made, "--split", "valid"], ["usage-report", made, "--split", "valid"]):
            ground.forks.pkmlm(*words)
        made.rename(run)
    return run


def spoil_records(ground: Ground, number: int) -> tuple[bool, str]:
    """Spoil one file of a run that is neither its recipe, its tokenizer nor in a checkpoint, and use the run."""
    draw, run = random.Random(number), ground.folder / "spoilt-records"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(recorded(ground), run)
    kept = {run / "recipe.yaml", run / "tokenizer.model"}
    files = [path for path in run.rglob("*") if path.is_file() and path not in kept and "checkpoints" not in path.parts]
    path = draw.choice(sorted(files))
    what = f"{path.name}: {spoil(path, draw)}"
    for command in COMMANDS:
        words: list[object] = [command, run, *(["--split", "valid"] if command in ("eval", "usage-report") else [])]
        if command == "train":
            words = ["train", ground.recipe("product-key"), "-o", run]
        ended = ground.forks.pkmlm(*words, code=None, limit=60)
        if ended.code not in (0, 1, 2) or "Traceback" in ended.stderr:
            return False, f"{what}: {command} ended with {ended.code}: {ended.stderr[-300:]}"
    return True, path.suffix or path.name


def spoil(path: Path, draw: random.Random) -> str:
    """Do one thing to a file; say what."""
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "flip", "cut", "strange", "strange", "number", "missing", "folder", "pipe", "link"))
    if kind == "flip" and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: draw.randrange(len(data) + 1)])
    elif kind == "number":  # JSON that says something else
        digits = [place for place, byte in enumerate(data) if chr(byte).isdigit()] or [0]
        place = draw.choice(digits)
        data[place : place + 1] = draw.choice((b"-1", b"1e400", b"null", b'"x"', b"[]", b"9" * 30))
        path.write_bytes(data)
    elif kind in ("missing", "folder", "pipe", "link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(path.with_name("nowhere"))
    else:
        path.write_bytes(draw.choice(STRANGE))
    return kind
