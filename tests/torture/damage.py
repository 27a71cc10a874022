"""Corruptions of checkpoints and of tokens: each must be found, in one line, with the right exit code."""

import json
import random
import shutil
from pathlib import Path

from pkmlm.errors import UserError
from pkmlm.runs.checkpoint import verify
from tests.torture.oracle import STEPS, Ground
from tests.torture.words import said_by

REGIONS = 8  # of a file, in each of which bits are flipped


def spoil(folder: Path, draw: random.Random) -> str:
    """Do one thing to the files of a folder; say what. No two kinds undo each other."""
    names = sorted(path.name for path in folder.iterdir())
    path = folder / draw.choice(names)
    data = bytearray(path.read_bytes())
    kind = draw.choice(("flip", "flip", "flip", "flip", "truncate", "zero", "swap", "missing", "extra", "grow"))
    if kind == "flip":
        region = draw.randrange(REGIONS)
        place = min(len(data) - 1, len(data) * region // REGIONS + draw.randrange(max(1, len(data) // REGIONS)))
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        return f"{path.name}: bit flipped in byte {place}"
    if kind == "truncate":
        path.write_bytes(data[: draw.choice((0, 1, len(data) // 2, len(data) - 2))])  # JSON may lack its last newline
    elif kind == "zero":
        start = draw.randrange(len(data))
        stop = min(len(data), start + draw.choice((1, 64, 4096)))
        if not any(data[start:stop]):
            return spoil(folder, draw)
        data[start:stop] = bytes(stop - start)
        path.write_bytes(data)
    elif kind == "swap":
        other = folder / draw.choice([name for name in names if name != path.name])
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "missing":
        path.unlink()
    elif kind == "extra":
        path = folder / draw.choice(("train-00007.bin", "test.documents", "valid-00001.bin"))
        if "state.json" in names:
            path = folder / f"weights-1-of-{draw.choice((2, 3))}.safetensors"
        path.write_bytes(b"more")
    else:
        path.write_bytes(data + draw.choice((b"\0", b"x" * 100)))
    return f"{path.name}: {kind}"


def spoil_checkpoint(ground: Ground, number: int) -> tuple[bool, str]:
    """Spoil the newest checkpoint of a run (or its tokenizer) and evaluate it; moments alone are looked at as training
    does, before it reads them."""
    draw = random.Random(number)
    run = ground.folder / "spoilt-run"
    if not run.exists():
        shutil.copytree(ground.reference("product-key"), run)
    folder, sound = run / "checkpoints" / f"step-{STEPS:08d}", ground.reference("product-key")
    if number % 20 == 0:  # the tokenizer that the run keeps
        path = run / "tokenizer.model"
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        what = "tokenizer.model of the run"
    elif number % 20 == 1:  # another checkpoint under this one's name
        shutil.rmtree(folder)
        shutil.copytree(sound / "checkpoints" / f"step-{draw.choice((3, 6, 9)):08d}", folder)
        what = "another step's checkpoint"
    else:
        what = spoil(folder, draw)
    code, said = said_by("eval", run, "--split", "valid")
    of_moments = what.startswith("optimizer.") and not what.endswith("swap")  # of no interest but to training
    # So is what the manifest says of the optimizer's file; all else of a manifest, evaluation must refuse.
    of_moments |= code == 0 and what.startswith("manifest.json: bit") and only_optimizer_differs(folder, sound)
    told = of_moments and damage_of(folder)
    shutil.rmtree(folder)
    shutil.copytree(sound / "checkpoints" / folder.name, folder)
    shutil.copy(sound / "tokenizer.model", run)
    if of_moments:
        right = code == 0 and bool(told)
        return right, "moments" if right else f"{what}: evaluation exit {code}, training told {told!r}"
    return judged(code, said, {1, 2}, what)


def only_optimizer_differs(folder: Path, sound: Path) -> bool:
    """Whether a manifest differs from that of the sound run in the entry of the optimizer's file alone."""
    found, whole = (
        json.loads((place / "manifest.json").read_text()) for place in (folder, sound / "checkpoints" / folder.name)
    )
    for manifest in (found, whole):
        manifest["files"].pop("optimizer.safetensors")
    return bool(found == whole)


def damage_of(folder: Path) -> str:
    """What training says of a checkpoint before it reads it; nothing where it is whole."""
    try:
        verify(folder)
    except UserError as error:
        return error.message
    return ""


def spoil_tokens(ground: Ground, number: int) -> tuple[bool, str]:
    """Spoil a folder of tokens and look at the first step of a training on it, every byte checked first."""
    draw = random.Random(number)
    folder = ground.folder / "spoilt-tokens"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ground.tokens, folder)
    what = spoil(folder, draw)
    code, said = said_by("train", ground.recipe("hash"), "-s", f"data.dir={folder}", "--verify", "--dry-run")
    return judged(code, said, {2}, what)


def judged(code: int, said: str, codes: set[int], what: str) -> tuple[bool, str]:
    """Whether a command said in one line (and a hint) that something is wrong, and ended with one of `codes`."""
    lines = [line for line in said.splitlines() if not line.startswith("hint: ")]
    told = len(lines) == 1 and lines[0].startswith("error: ") and lines[0].isprintable()
    right = code in codes and told
    return right, what.split(":")[-1].split(" in byte")[0] if right else f"{what}: exit {code}, said {said[-300:]!r}"
