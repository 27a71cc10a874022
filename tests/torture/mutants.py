"""Mutated recipes and weights: never a traceback or a hang, and never accepted for what they are not."""

import json
import math
import random
import shutil
import signal
import struct
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from pkmlm.errors import UserError
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import dump_recipe, flatten
from tests.forks import ROOT
from tests.torture.oracle import STEPS, Ground

HANG = 5.0  # seconds
BOMB = b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nname: *c\n"
JUNK = [
    *(b"\t", b"\0", b"&a ", b"*a", b"!!python/object/apply:os.system ", b"[", b"{", b"}", b": ", b"- ", b"\xff"),
    *(b'"', b"'", b"#", b"\n", b"1e9", b"-", b"<<: ", b"1e999", b".inf", b".nan", b"0x10", b"1_000", b"9" * 5000),
    *(b"[" * 60, b"{a: " * 40, b"---\n", b"...\n", b"%YAML 9.9\n", b"|\n", b">\n", b"\xe2\x80\xa8", b"\x1b[31m"),
    *(b"'../../../etc/passwd'", b"base: .\n", b"base: ../x.yaml\n", BOMB, b"null", b"~", b"true", b"2026-01-01"),
]


class Hang(BaseException):
    """More than HANG seconds."""


def alarm(number: int, frame: FrameType | None) -> None:
    raise Hang


def mutate_recipe(ground: Ground, number: int) -> tuple[bool, str]:
    """Change a recipe of the repository, as it is or in full, in up to three places and load it."""
    draw = random.Random(number)
    sources = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "grids")
    source = draw.choice(sources)
    data = bytearray(source.read_bytes() if draw.random() < 0.3 else dump_recipe(load_recipe(source)).encode())
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind, place, lines = draw.randrange(6), draw.randrange(len(data)), data.split(b"\n")
        digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
        if kind < 2 and digits:
            data[draw.choice(digits)] = draw.choice(b"0123456789")
        elif kind == 2:  # a line away
            del lines[draw.randrange(len(lines))]
            data = bytearray(b"\n".join(lines)) or data
        elif kind == 3:  # a line twice, perhaps under another mapping
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
            data = bytearray(b"\n".join(lines))
        else:
            data[place : place + draw.choice((0, 1, 8, 80))] = draw.choice([*JUNK, bytes([draw.randrange(256)])])
    path = ground.folder / "mutant.yaml"
    path.with_name("base.yaml").write_bytes(b"name: base")
    path.write_bytes(bytes(data))
    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        recipe = load_recipe(path)
    except UserError as error:
        return short(error), "refused" if short(error) else f"{number}: {error}"
    except BaseException as error:
        return False, f"recipe {number}: {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    numbers = [value for value in flatten(recipe).values() if isinstance(value, float)]
    path.write_text(dump_recipe(recipe))
    right = check_recipe(recipe) is recipe and all(map(math.isfinite, numbers)) and load_recipe(path) == recipe
    return right, "accepted" if right else f"recipe {number} wrongly accepted"


def short(error: UserError) -> bool:
    """Whether an error can be one line: printing it escapes what is no character of a line."""
    return 0 < len(error.message) < 600 and len(error.hint) < 1500


def mutate_tensors(ground: Ground, number: int) -> tuple[bool, str]:
    """Change the weights' file of a checkpoint, let the manifest agree, and load it; a reader of our own says what it
    should have given.
    """
    import torch

    from pkmlm.model.memory.values import table_ranks
    from pkmlm.model.transformer import build_model
    from pkmlm.runs import checkpoint
    from pkmlm.runs.checkpoint import verify

    draw = random.Random(number)
    folder = ground.folder / f"step-{STEPS:08d}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ground.reference("product-key") / "checkpoints" / folder.name, folder)
    path = folder / "weights.safetensors"
    data = changed(path.read_bytes(), draw)
    path.write_bytes(data)
    agree(folder)
    torch.manual_seed(0)
    model = build_model(load_recipe(ground.recipe("product-key")), 350)
    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    try:
        verify(folder)
        checkpoint.load_weights(folder, model.state_dict(), table_ranks(model))
    except UserError as error:
        return short(error), "refused" if short(error) else f"{number}: {error}"
    except BaseException as error:
        return False, f"tensors {number}: {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    expected = read_tensors(data)
    found = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    right = expected.keys() == found.keys() and all(same_bits(expected[name], found[name]) for name in found)
    return right, "accepted" if right else f"tensors {number} wrongly accepted"


def same_bits(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def agree(folder: Path) -> None:
    """Write the manifest that the files of a checkpoint now have: that of somebody who means harm."""
    from pkmlm.files import json_text, sha256_of

    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        entry.update(bytes=(folder / name).stat().st_size, sha256=sha256_of(folder / name))
    path.write_text(json_text(manifest))


def changed(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file with something wrong in its header, or its data."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    kind = draw.randrange(6)
    if kind == 0:  # any byte of the header
        place = draw.randrange(size)
        header = header[:place] + bytes([draw.randrange(256)]) + header[place + 1 :]
    elif kind == 1:  # its length
        return struct.pack("<Q", draw.choice((0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1))) + data[8:]
    elif kind == 2:  # the file's length
        return data[: draw.randrange(len(data))] if draw.random() < 0.5 else data + bytes(draw.randrange(1, 99))
    elif kind == 3:  # the data: accepted, as it is what the manifest says
        place = draw.randrange(len(body))
        body = body[:place] + bytes([body[place] ^ 255]) + body[place + 1 :]
    else:
        header = lying_header(json.loads(header), draw)
    return struct.pack("<Q", len(header)) + header + body


def lying_header(header: dict[str, Any], draw: random.Random) -> bytes:
    """A header that is JSON and does not tell the truth."""
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    kind = draw.randrange(8)
    if kind == 0:
        entry["shape"] = draw.choice(([2**40], [2**62, 2**62], [], [-1], [0], ["1"], entry["shape"][::-1]))
    elif kind == 1:
        entry["dtype"] = draw.choice(("F64", "F16", "BF16", "U8", "BOOL", "F128", "", None, 3))
    elif kind == 2:
        start, stop = entry["data_offsets"]
        entry["data_offsets"] = draw.choice(([stop, start], [0, stop], [start, 2**63], [-1, 5], [start], [0, 0], "x"))
    elif kind == 3:
        new = draw.choice(("../../etc/passwd", "/etc/passwd", "a\0b", "\x1b[31m", "", "0" * 70000, "\u202e"))
        header[new] = header.pop(name)
    elif kind == 4:
        del header[name]
    elif kind == 5:
        header["more"] = dict(entry)
    elif kind == 6:
        header["__metadata__"] = draw.choice(([1], "x", {"a": {"b": 1}}, {"format": "pt", "__class__": "os.system"}))
    else:  # a key twice: JSON readers take the last
        text = json.dumps(header)
        again = json.dumps({name: {**entry, "shape": [1]}})
        return (text[:-1] + ", " + again[1:]).encode()
    return json.dumps(header).encode()


def read_tensors(data: bytes) -> dict[str, Any]:
    """What a safetensors file holds, read plainly."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kinds = {"F32": np.float32, "I64": np.int64}
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
