"""`make torture`: every trial that is not on record yet, and the table.

Each trial is one line of torture/trials.jsonl when it has ended, so that a torture that was stopped goes on where it
was; one that lost something is tried again. `rm -r torture` begins again. Exit code 1 where anything was lost.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkmlm.console import Column, Table
from pkmlm.environment import source_commit
from tests.forks import ROOT, Forks
from tests.torture import crashes, damage, disks, kills, sizes, stops
from tests.torture.oracle import Ground

Trial = Callable[[], tuple[bool, str]]
TRAINING_DISK, TOKENIZING_DISK = 480 << 10, 144 << 10  # bytes that are enough


@dataclass(frozen=True, eq=False)
class Part:
    """One row of the table: its name, and its trials in order."""

    name: str
    trials: list[Trial]


def numbered(function: Callable[[Ground, int], tuple[bool, str]], ground: Ground, numbers: Any) -> list[Trial]:
    return [lambda number=number: function(ground, number) for number in numbers]  # type: ignore[misc]


def failures(ground: Ground, what: str, each: int = 1) -> Iterator[Part]:
    """One of so many operations of a command crashes; with EIO and ENOSPC in turn, which take one way through the code,
    half as many fail.
    """
    for how, first, every in (("crash", 1, each), ("EIO", 1, 4 * each), ("ENOSPC", 1 + 2 * each, 4 * each)):
        places = range(first, len(crashes.operations(ground, what)) + 1, every)
        trials = [lambda at=at, h=how: crashes.fail_at(ground, what, h, at) for at in places]  # type: ignore[misc]
        yield Part(f"{what}: {how} before file operations", trials)  # type: ignore[arg-type]


def parts(ground: Ground) -> Iterator[Part]:
    """Every row, cheap ones first."""
    for what in ("tokenize", "replace", "export"):
        yield from failures(ground, what)
    yield Part("damaged checkpoints", numbered(damage.spoil_checkpoint, ground, range(200)))
    yield Part("damaged tokens", numbered(damage.spoil_tokens, ground, range(200)))
    yield Part("training on a full disk", numbered(disks.fill_training, ground, range(4096, TRAINING_DISK, 8192)))
    yield Part("tokenizing on a full disk", numbered(disks.fill_tokenizing, ground, range(4096, TOKENIZING_DISK, 4096)))
    yield Part("SIGTERM while training", numbered(stops.stop_training, ground, range(50)))
    yield Part("SIGTERM while training the demo's model", numbered(stops.stop_demo, ground, range(10)))
    yield Part("SIGKILL while tokenizing", numbered(kills.kill_tokenizing, ground, range(100)))
    yield Part("SIGKILL while training", numbered(kills.kill_training, ground, range(200)))
    yield from failures(ground, "train", each=4)  # it saves and logs alike, many times
    yield Part("a line of 1 GB within 2 GiB", [lambda: sizes.one_long_line(ground)])


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    arguments.add_argument("--folder", type=Path, default=ROOT / "torture", help="where trials are done and recorded")
    arguments.add_argument("--minutes", type=float, default=120.0, help="begin no trial after so many")
    arguments.add_argument("--every", type=int, default=1, help="of each part, try every so many-th trial alone")
    arguments.add_argument("--only", default="", help="parts whose name holds this")
    given = arguments.parse_args()
    end = time.monotonic() + 60 * given.minutes
    with Forks(given.folder.resolve() / "said", "tests.torture.jobs") as forks:
        ground = Ground(given.folder.resolve(), forks).make()
        record = given.folder / "trials.jsonl"
        chosen = [part for part in parts(ground) if given.only in part.name]
        for part in chosen:
            survived_before = {number for number, trial in read(record, part).items() if trial["survived"]}
            for number, trial in enumerate(part.trials):
                if number in survived_before or number % given.every:
                    continue
                if time.monotonic() > end:
                    break
                began = time.monotonic()
                survived, what = trial()
                line = {"part": part.name, "number": number, "survived": survived, "what": what}
                line |= {"seconds": round(time.monotonic() - began, 3), "commit": source_commit()}
                with open(record, "a") as file:
                    file.write(json.dumps(line) + "\n")
                if not survived:
                    print(f"LOST {part.name} {number}: {what}", flush=True)
    return report({part: read(record, part) for part in chosen})


def read(record: Path, part: Part) -> dict[int, dict[str, Any]]:
    """The trials of a part by their numbers; the last of a number counts."""
    trials = map(json.loads, record.read_text().splitlines() if record.exists() else [])
    return {trial["number"]: trial for trial in trials if trial["part"] == part.name}


def report(results: dict[Part, dict[int, dict[str, Any]]]) -> int:
    """Print the table."""
    rows, lost = [], 0
    for part, trials in results.items():
        mine = trials.values()
        survived = sum(trial["survived"] for trial in mine)
        lost += len(mine) - survived
        seconds = sum(trial["seconds"] for trial in mine)
        rows.append((part.name, len(mine), len(part.trials), survived, len(mine) - survived, seconds))
    columns = [Column("part"), *(Column(head, "right", "{:,}") for head in ("trials", "of", "survived", "lost"))]
    date = time.strftime("%Y-%m-%d")
    print(Table(f"{date}, {platform.machine()}", [*columns, Column("s", "right", "{:,.0f}")], rows).render(), end="")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
