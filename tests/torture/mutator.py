"""The directed mutator: in every file of a run, of tokens, of a sweep and of an export, every key and every number is
changed in turn, by a small change that keeps the file valid. Each command that reads the folder must then give the same
result, a warning that names the file, or an error: never another result without a word.
"""

import hashlib
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pkmlm.console import Column, Table, number
from pkmlm.errors import UserError
from pkmlm.files import json_text
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe, dump_recipe, flatten, leaves, scalar_text
from pkmlm.runs.results import write_evaluation
from pkmlm.sweep.cells import Cells
from pkmlm.sweep.grid import read_grid
from tests.forks import Ended
from tests.torture.oracle import STEPS, Ground, state_of

NAME = "directed mutator"
HALF = STEPS // 2  # where the run was stopped that is changed
GRID = """title: Two sizes
base: product-key.yaml
axes: {slots: {16: {model.memory.num_keys: 4}, 64: {model.memory.num_keys: 8}}}
tune: {values: [1e-3, 3e-3]}
measure: [valid_loss, valid_perplexity, seconds]
"""
Verdict = Literal["same", "warned", "refused", "different"]


@dataclass(frozen=True)
class Change:
    """What a file of a folder holds after one small change."""

    file: str
    what: str
    data: bytes


@dataclass(frozen=True)
class Kind:
    """A kind of folder that commands read.

    Attributes:
        folder: where changed copies of it are made, always in one place, for outputs name it.
        sound: the folder that nobody changed.
        commands: the words of every command that reads it.
    """

    folder: Path
    sound: Path
    commands: dict[str, Sequence[object]]


# The folders, and what reads them.


def kinds(ground: Ground) -> dict[str, Kind]:
    """The folders that are changed, made where they are not there yet."""
    place, recipe = ground.folder / "mutator", ground.recipe("product-key")
    sound = place / "sound"
    if not sound.exists():
        make_sound(ground, place / "sound-so-far")
        (place / "sound-so-far").rename(sound)
    work = place / "work"
    run, tokens, sweep, export = (work / name for name in ("run", "tokens", "sweep", "export"))
    grid = sound / "grid.yaml"
    train: tuple[object, ...] = ("train", recipe, "-o", run, "-q", "-s", f"train.steps={STEPS}")

    def reading(model: Path, data: Path) -> dict[str, Sequence[object]]:
        test = ("--split", "test", "--data", data)
        return {
            "eval": ("eval", model, *test, "--json"),
            "usage-report": ("usage-report", model, *test, "--format", "json"),
            "slots": ("slots", model, *test, "--top", 3, "--json"),
        }

    found: dict[str, dict[str, Sequence[object]]] = {
        "run": {
            **reading(run, sound / "tokens"),
            "eval --step best": (*reading(run, sound / "tokens")["eval"], "--step", "best"),
            "generate": ("generate", run, "It was", "-n", 8),
            "compare": ("compare", run, "--format", "json"),
            "export": ("export", run, "-o", work / "exported"),
            "train": train,
        },
        "tokens": {**reading(run, tokens), "train": (*train, "-s", f"data.dir={tokens}")},
        "sweep": {"sweep": ("sweep", grid, "-o", sweep, "-q"), "--table": ("sweep", grid, "-o", sweep, "--table")},
        "export": {**reading(export, sound / "tokens"), "generate": ("generate", export, "It was", "-n", 8)},
    }
    return {name: Kind(work / name, sound / name, commands) for name, commands in found.items()}


def make_sound(ground: Ground, place: Path) -> None:
    """Tokens; a run that was stopped half way, with all that is measured of one; its export."""
    shutil.rmtree(place, ignore_errors=True)
    tokens, valid = place / "tokens", ground.folder / "valid.txt"
    splits = ("--valid", valid, "--test", valid, "--tokenizer", ground.tokens / "tokenizer.model")
    ground.forks.pkmlm("tokenize", ground.text, *splits, "-o", tokens)
    run = ground.stopped_at("product-key", HALF, place / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    (run / "best").write_text((run / "best").read_text().replace(f"{STEPS:08d}", "00000004"))
    test = ("--split", "test", "--data", tokens)
    for words in (("eval", run, *test), ("usage-report", run, *test), ("export", run, "-o", place / "export")):
        ground.forks.pkmlm(*words)
    scores = {"n": 4, "acc": 0.5, "acc_stderr": 0.25, "acc_norm": 0.75, "acc_norm_stderr": 0.2, "chance": 0.5}
    record = {"run": "run", "step": HALF, "perplexity": None, "tasks": {"piqa": scores}, "average_acc": 0.5}
    write_evaluation(run, f"tasks-piqa-step-{HALF}.json", record)
    shutil.copy(ground.recipe("product-key"), place)
    (place / "grid.yaml").write_text(GRID)


def make_sweep(ground: Ground, place: Path) -> None:
    """A sweep of `GRID`, whose runs are trained before, in children."""
    base, grid, sweep = (place / name for name in ("product-key.yaml", "grid.yaml", "sweep"))
    for cell in Cells(read_grid(grid)[0], base).first.values():
        settings = [word for text in cell.overrides for word in ("-s", text)]
        ground.forks.pkmlm("train", base, "-o", sweep / "cells" / cell.name, *settings)
    ground.forks.pkmlm("sweep", grid, "-o", sweep, "-q")


# What a command gives.


@dataclass(frozen=True)
class Given:
    """What a command gave: its exit code, its result, and its errors and warnings."""

    code: int
    result: Any
    said: tuple[str, ...]


def give(ground: Ground, kind: Kind, command: str) -> Given:
    """Run a command on the changed folder; what it wrote counts as its result, too."""
    words, work = kind.commands[command], kind.folder.parent
    ended: Ended = ground.forks.pkmlm(*words, code=None, limit=60)
    said = tuple(line for line in ended.stderr.splitlines() if line.startswith(("warning: ", "error: ")))
    result: Any = ended.stdout
    with suppress(ValueError):
        result = json.loads(ended.stdout)
    if words[0] == "usage-report" and ended.code == 0:
        for entry in result["runs"]:
            entry.pop("source", None)  # digests of what was read, which are no result
    if words[0] == "export" and ended.code == 0:
        files = sorted(path for path in (work / "exported").iterdir() if path.name != "manifest.json")
        result = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    if words[0] == "train" and ended.code == 0:
        state = state_of(work / "run")
        # What was logged before is no result of this command.
        result = {key: value for key, value in state.items() if not re.search(r"seconds|leftovers", key)}
        for event in ("train", "valid", "drift", "warn"):
            result[event] = [line for line in state[event] if line["step"] > HALF]
    return Given(ended.code, result, said)


def judge(before: Given, now: Given, file: str) -> Verdict:
    """What became of a command's result after a change in `file`."""
    if now.code and any(line.startswith("error: ") for line in now.said):
        return "refused"
    names = [part for part in Path(file).parts if part != "checkpoints"]
    if any(name in line for line in now.said if line not in before.said for name in names):
        return "warned"
    return "same" if (now.code, now.result) == (before.code, before.result) else "different"


def fresh(kind: Kind) -> None:
    """The folders as nobody changed them."""
    work, sound = kind.folder.parent, kind.sound.parent
    shutil.rmtree(work, ignore_errors=True)
    for name in {"run", kind.folder.name}:
        shutil.copytree(sound / name, work / name, symlinks=True)


class Mutator:
    """Changes the folders of one kind.

    Args:
        name: of the kind: "run", "tokens", "sweep" or "export".
        only: the commands that are tried; empty: all.

    Attributes:
        changes: of all its files; of those in checkpoints, which are compared by sha256 as a whole, every eighth.
        before: what each command gives on the folder that nobody changed.
        reads: the files that each command reads, as their time of access says.
    """

    def __init__(self, ground: Ground, name: str, only: Sequence[str] = ()):
        self.ground, self.kind = ground, kinds(ground)[name]
        self.commands = only or list(self.kind.commands)
        if name == "sweep" and not self.kind.sound.exists():
            make_sweep(ground, self.kind.sound.parent)
        self.before: dict[str, Given] = {}
        self.reads: dict[str, set[str]] = {}
        files = sorted(path for path in self.kind.sound.rglob("*") if path.is_file() and path.name != ".lock")
        older = f"checkpoints/step-{4:08d}/"  # whose tensors are those of the newest once more
        files = [path for path in files if older not in str(path) or path.suffix == ".json"]
        if name == "sweep":  # of its runs one, without its tensors: these are those of "run" once more
            cells = sorted(path for path in (self.kind.sound / "cells").iterdir() if path.name[0] != ".")
            files = [path for path in files if not any(str(cell) in str(path) for cell in cells[1:])]
            files = [path for path in files if path.suffix != ".safetensors"]
        self.changes = [
            Change(str(path.relative_to(self.kind.sound)), what, data)
            for path in files
            for number, (what, data) in enumerate(changes_of(path))
            if data != path.read_bytes() and (number % 8 == 0 or "checkpoints" not in path.parts)
        ]

    def run_unchanged(self, command: str) -> None:
        """Note what a command gives and reads."""
        if command not in ("train", "sweep"):  # the server imports what the children will need
            fresh(self.kind)
            self.ground.forks.pkmlm(*self.kind.commands[command], here=True)
        fresh(self.kind)
        files = [path for path in self.kind.folder.rglob("*") if path.is_file()]
        for path in files:
            os.utime(path, (0, path.stat().st_mtime))
        self.before[command] = give(self.ground, self.kind, command)
        assert self.before[command].code == 0, (command, self.before[command].said)
        read = {path for path in files if not path.exists() or path.stat().st_atime}
        self.reads[command] = {str(path.relative_to(self.kind.folder)) for path in read or files}

    def try_change(self, number: int) -> tuple[bool, str]:
        """One change and every command that reads its file; whether none gives another result without a word, and what
        each did.
        """
        change = self.changes[number]
        verdicts: dict[str, Verdict] = {}
        for command in self.commands:
            if command not in self.before:
                self.run_unchanged(command)
            if change.file not in self.reads[command]:
                continue
            fresh(self.kind)
            (self.kind.folder / change.file).write_bytes(change.data)
            verdicts[command] = judge(self.before[command], give(self.ground, self.kind, command), change.file)
        silent = [command for command, verdict in verdicts.items() if verdict == "different"]
        counts = Counter(verdicts.values())
        told = ", ".join(f"{verdict} {counts[verdict]}" for verdict in get_args(Verdict))
        return not silent, f"{change.file}: {told}: {change.what}" + (f" ({', '.join(silent)})" if silent else "")


# Changes.


def changes_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Every change of a file: what is changed, and what the file then holds."""
    data = path.read_bytes()
    if path.name.endswith((".json", ".jsonl")):
        lines = data.decode().splitlines(keepends=True)
        if path.suffix == ".jsonl":
            yield from line_changes(lines)
        else:
            for what, tree in json_changes(json.loads(data)):
                yield what, json_text(tree).encode()
        for place in {0, len(lines) // 2, max(0, len(lines) - 3)}:
            swapped = [*lines[:place], *lines[place : place + 2][::-1], *lines[place + 2 :]]
            yield f"lines {place + 1} and {place + 2} swapped", "".join(swapped).encode()
    elif path.name == "recipe.yaml":
        yield from recipe_changes(path)
    elif path.suffix == ".npz":
        yield from array_changes(path)
    elif path.suffix == ".safetensors":
        yield from tensor_changes(data)
    elif path.name in ("best", "latest", "done"):
        for step in (3, HALF, STEPS):
            yield f"step {step}", re.sub(rb"[0-9]+", lambda old, s=step: b"%0*d" % (len(old[0]), s), data)  # type: ignore[misc]
    elif data.isascii():
        if digits := [place for place, byte in enumerate(data) if chr(byte).isdigit()]:
            place = digits[len(digits) // 2]
            yield f"digit at {place}", data[:place] + b"%d" % ((data[place] - 47) % 10) + data[place + 1 :]
    else:
        letters = [place for place, byte in enumerate(data) if chr(byte).isalpha() and byte < 128]
        for place in sorted({len(data) // 5 * part for part in range(5)} | set(letters[:: max(1, len(letters) // 5)])):
            yield f"byte {place}", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def other_values(value: Any) -> list[Any]:
    """Values near a JSON value, of its type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 0.875 if value else 0.125]
    if isinstance(value, str) and value:
        last = value[-1]
        return [value[:-1] + ("1" if last != "1" else "2") if last.isdigit() or last in "abcdef" else value + "x"]
    return [1] if value is None else []


def json_changes(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """A JSON value with one of its leaves changed, one of its keys left out, or two items of a list swapped."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"{where}.{key} left out", {name: other for name, other in tree.items() if name != key}
            for what, changed in json_changes(value, f"{where}.{key}"):
                yield what, {**tree, key: changed}
    elif isinstance(tree, list):
        if tree[:2] != tree[1::-1]:
            yield f"{where}: two items swapped", tree[1::-1] + tree[2:]
        for place in sorted({0, len(tree) - 1} & set(range(len(tree)))):
            for what, changed in json_changes(tree[place], f"{where}[{place}]"):
                yield what, [*tree[:place], changed, *tree[place + 1 :]]
    else:
        for other in other_values(tree):
            yield where, other


def line_changes(lines: list[str]) -> Iterator[tuple[str, bytes]]:
    """Of the last line of each event every key; of all validations the loss; each kind of line left out."""
    events = [json.loads(line) for line in lines]
    last = {event["event"]: place for place, event in enumerate(events)}
    for name, place in last.items():
        yield f"{name} left out", "".join(lines[:place] + lines[place + 1 :]).encode()
        for what, changed in json_changes(events[place]):
            yield f"{name}{what}", "".join([*lines[:place], json.dumps(changed) + "\n", *lines[place + 1 :]]).encode()
    for place, event in enumerate(events):
        if event["event"] == "valid":
            changed = event | {"loss": event["loss"] * 0.875}
            yield (
                f"valid.loss at {event['step']}",
                "".join([*lines[:place], json.dumps(changed) + "\n", *lines[place + 1 :]]).encode(),
            )


def recipe_changes(path: Path) -> Iterator[tuple[str, bytes]]:
    """Every key, with the first value near its own with which the recipe is still possible."""
    recipe = load_recipe(path)
    types = {name: kind for name, _, kind in leaves(Recipe)}
    for key, value in flatten(recipe).items():
        for text in near(value, types[key]):
            try:
                changed = dump_recipe(load_recipe(path, [f"{key}={text}"]))
            except UserError:
                continue
            if changed != dump_recipe(recipe):
                yield key, changed.encode()
                break


def near(value: Any, kind: Any) -> Iterator[str]:
    """Texts of values near that of a recipe's key."""
    choices = [each for option in (kind, *get_args(kind)) for each in get_args(option) if isinstance(each, str)]
    if isinstance(value, bool):
        yield scalar_text(not value)
    elif isinstance(value, int):
        yield from map(str, (value + 1, value - 1, value * 2, value // 2))
    elif isinstance(value, float):
        yield from map(str, (value * 0.875, 0.5, 1.0, 2.0))
    elif isinstance(value, tuple):
        yield scalar_text(tuple(item * 0.875 if isinstance(item, float) else "1" for item in value))
    elif choices:
        yield from choices
    elif value is None:
        yield from ("100", "350", "0.5", "[0.5, 0.5]", "x", *(each for each in choices))
    else:
        yield f"{value}x"


def array_changes(path: Path) -> Iterator[tuple[str, bytes]]:
    """One entry of each array."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, array in arrays.items():
        if array.size and array.dtype.kind in "biuf":
            changed = array.copy()
            first = changed.reshape(-1)
            first[-1] = not first[-1] if array.dtype.kind == "b" else first[-1] + 1
            file = io.BytesIO()
            np.savez_compressed(file, **{**arrays, name: changed})
            yield name, file.getvalue()


def tensor_changes(data: bytes) -> Iterator[tuple[str, bytes]]:
    """One bit of each tensor, and the names of two of one shape swapped."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    shapes: dict[str, str] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        place = 8 + size + (start + stop) // 2 // 4 * 4
        yield name, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        shape = f"{entry['shape']}{entry['dtype']}"
        if twin := shapes.pop(shape, ""):
            other = header | {name: header[twin], twin: entry}
            text = json.dumps(other, separators=(",", ":")).encode().ljust(size)
            if len(text) == size:
                yield f"{name} and {twin} swapped", data[:8] + text + data[8 + size :]
        else:
            shapes[shape] = name


def table(trials: Sequence[str]) -> Table:
    """The files, and what the commands made of their changes, from what `Mutator.try_change` said of each."""
    rows: dict[str, Counter[str]] = {}
    for told in trials:
        name, counts, _ = told.split(": ", 2)
        found = rows.setdefault(re.sub(r"step-[0-9]+|cells/\w+[^/]*", lambda m: m[0].split("-")[0], name), Counter())
        found["changes"] += 1
        for count in counts.split(", "):
            verdict, many = count.split()
            found[verdict] += int(many)
    names = ("changes", *get_args(Verdict))
    columns = [Column("file"), *(number(name) for name in names[:-1]), number("silently different")]
    return Table(
        "Directed mutator", columns, [[file, *(found[name] for name in names)] for file, found in rows.items()]
    )
