"""What single slots hold and who reads them: the facts of a slot, the patterns in its contexts, and their tables."""

from collections import Counter
from collections.abc import Sequence
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pkmlm.analysis.usage import MemoryUsage
from pkmlm.console import Column, Table, number
from pkmlm.errors import UserError

JUDGED, LEAST = 10, 3  # contexts that are looked at for a pattern, and that it needs at least
DEALS = 100  # of shuffled contexts
SEED = 0  # of the shuffling


class Word(NamedTuple):
    """A token and what a slot's value adds to its logit, relative to the mean token."""

    token: str
    logit: float


class Context(NamedTuple):
    """A position of a text that reads a slot.

    Attributes:
        position: scored positions before it in the text; document: documents before it.
        place: in the window that the model read, from 0.
        weight: of the slot's value in the memory's answer, summed over heads.
        before, token, after: the text that leads up to it, the token that it reads, and what follows.
        previous, next: the tokens before and after `token`; "" where nothing is before.
    """

    position: int
    document: int
    place: int
    weight: float
    before: str
    token: str
    after: str
    previous: str
    next: str


class Pattern(NamedTuple):
    """What at least half (and at least LEAST) of a slot's JUDGED strongest contexts have in common.

    Attributes:
        kind: "token" (the one read), "next", "previous" or "place" (in the model's window); what: which.
        shared: contexts that have it; contexts: of how many.
    """

    kind: str
    what: str
    shared: int
    contexts: int

    def __str__(self) -> str:
        what = self.what if self.kind == "place" else quoted(self.what)
        return f"{self.kind} {what} {self.shared}/{self.contexts}"


def pattern_of(contexts: Sequence[Context]) -> Pattern | None:
    """What most of the JUDGED strongest contexts share (of equals the first: token, next, previous, place); None: not
    enough of them share anything.
    """
    contexts = contexts[:JUDGED]
    best = None
    for kind in ("token", "next", "previous", "place"):
        counts = Counter(getattr(context, kind) for context in contexts)
        what, shared = counts.most_common(1)[0] if counts else ("", 0)
        if shared >= max(LEAST, len(contexts) / 2) and (best is None or shared > best.shared):
            best = Pattern(kind, str(what), shared, len(contexts))
    return best


class Slot(NamedTuple):
    """What is known of one slot.

    Attributes:
        name: see `slot_name`.
        at: {"subkeys": [i, j]} of a product key, {"table": t, "bucket": b} of a hash table (tables from 1), or {}.
        reads, mass: on the text, over heads; heads: (head, reads, mass) of those that read it, most reads first.
        share: of the memory's mass.
        raises, lowers: None where the value does not reach the output.
        contexts: that read it most, strongest first.
    """

    slot: int
    name: str
    at: dict[str, Any]
    reads: int
    mass: float
    share: float
    heads: list[tuple[int, int, float]]
    raises: list[Word] | None
    lowers: list[Word] | None
    pattern: Pattern | None
    contexts: list[Context]

    @classmethod
    def of(
        cls,
        usage: MemoryUsage,
        slot: int,
        raises: list[Word] | None,
        lowers: list[Word] | None,
        contexts: list[Context],
    ) -> "Slot":
        heads: list[tuple[int, int, float]] = []
        if usage.shared:
            pairs = zip(usage.counts_HK[:, slot].tolist(), usage.masses_HK[:, slot].tolist(), strict=True)
            heads = [(head, reads, mass) for head, (reads, mass) in enumerate(pairs, start=1) if reads]
            heads.sort(key=lambda entry: -entry[1])
        reads, mass = int(usage.counts_S[slot]), float(usage.masses_S[slot])
        share = mass / max(float(usage.masses_S.sum()), 1e-300)
        where = slot, usage.kind, usage.slots, usage.heads
        return cls(
            slot,
            slot_name(*where),
            address(*where),
            reads,
            mass,
            share,
            heads,
            raises,
            lowers,
            pattern_of(contexts),
            contexts,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "name": self.name,
            **self.at,
            "reads": self.reads,
            "mass": self.mass,
            "share": self.share,
            "heads": [{"head": head, "reads": reads, "mass": mass} for head, reads, mass in self.heads],
            "raises": None if self.raises is None else [word._asdict() for word in self.raises],
            "lowers": None if self.lowers is None else [word._asdict() for word in self.lowers],
            "pattern": None if self.pattern is None else self.pattern._asdict(),
            "contexts": [context._asdict() for context in self.contexts],
        }


def address(slot: int, kind: str, slots: int, heads: int) -> dict[str, Any]:
    """Where a slot lies: its sub-keys (from 0), or its table (from 1) and bucket (from 0)."""
    if kind == "product-key":
        return {"subkeys": list(divmod(slot, isqrt(slots)))}
    if kind == "hash":
        table, bucket = divmod(slot, slots // heads)
        return {"table": table + 1, "bucket": bucket}
    return {}


def slot_name(slot: int, kind: str, slots: int, heads: int) -> str:
    """A slot as `--slot` takes it: 17:4 for sub-keys, 2:40 for table and bucket."""
    at = address(slot, kind, slots, heads)
    return ":".join(map(str, at.get("subkeys") or at.values())) or str(slot)


def slot_number(name: str, kind: str, slots: int, heads: int) -> int:
    """The slot that a name (see `slot_name`) or a number stands for.

    Raises:
        UserError: there is none.
    """
    parts = name.split(":")
    numbers = [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 19]
    found = -1
    if len(numbers) == len(parts) == 1:
        found = numbers[0]
    elif len(numbers) == len(parts) == 2 and kind != "flat-key":
        width = isqrt(slots) if kind == "product-key" else slots // heads
        first = numbers[0] - (kind == "hash")
        found = first * width + numbers[1] if first >= 0 and numbers[1] < width else -1
    if not 0 <= found < slots:
        last = slot_name(slots - 1, kind, slots, heads)
        either = f" or {slot_name(0, kind, slots, heads)} to {last}" if ":" in last else ""
        raise UserError(f"--slot {name}: no such slot (expected 0 to {slots - 1}{either})")
    return found


class Holding(NamedTuple):
    """What a page shows of single slots of one memory.

    Attributes:
        slots: the most read ones, with words and contexts.
        first_S: int64 (slots,), which of `tokens` each slot's value raises most; -1: it is not read; None: values do
            not reach the output.
    """

    slots: list[Slot]
    first_S: NDArray[np.int64] | None
    tokens: list[str]


def patterned(slots: Sequence[Slot]) -> dict[str, Any]:
    """How many of some slots have a pattern, of which kind, and how many would if their contexts were dealt at random
    among them (mean of DEALS deals).
    """
    found = Counter(slot.pattern.kind for slot in slots if slot.pattern is not None)
    pool = [context for slot in slots for context in slot.contexts]
    random, hits = np.random.default_rng(SEED), 0
    for _ in range(DEALS if pool else 0):
        dealt = iter(random.permutation(len(pool)).tolist())
        for slot in slots:
            hits += pattern_of([pool[next(dealt)] for _ in slot.contexts]) is not None
    return {"slots": len(slots), "patterned": found.total(), "kinds": dict(found), "shuffled": hits / DEALS}


def quoted(token: str) -> str:
    """A token in quotation marks, so that its spaces show."""
    return f'"{token}"'


def most_read(usage: MemoryUsage, most: int) -> list[int]:
    """The slots of a memory that hold most mass, in falling order, without those that hold none; ties by number."""
    order = np.argsort(-usage.masses_S, kind="stable")[:most]
    return [int(slot) for slot in order if usage.masses_S[slot] > 0]


def words_line(words: Sequence[Word] | None, most: int) -> str | None:
    return None if words is None else " ".join(quoted(word.token) for word in words[:most])


def slots_table(title: str, slots: Sequence[Slot]) -> Table:
    """The most read slots: how much, by whom, what they say, and what their contexts share."""
    columns = [
        Column("Slot"),
        number("Reads"),
        number("Mass", "{:.2%}"),
        Column("Head"),
        Column("Raises"),
        Column("Pattern"),
    ]
    rows = [
        [
            slot.name,
            slot.reads,
            slot.share,
            main_head(slot),
            words_line(slot.raises, 2),
            None if slot.pattern is None else str(slot.pattern),
        ]
        for slot in slots
    ]
    return Table(title, columns, rows)


def reading_table(title: str, tokens: Sequence[dict[str, Any]]) -> Table:
    """Each token of a text with its strongest slots; entries as in `pkmlm slots RUN PROMPT --json`."""
    columns = [Column("Token"), Column("Slot"), number("Weight", "{:.3f}"), Column("Raises")]
    rows = [
        [
            "" if rank else quoted(entry["token"]),
            slot["name"],
            slot["weight"],
            None if slot["raises"] is None else " ".join(quoted(word["token"]) for word in slot["raises"][:4]),
        ]
        for entry in tokens
        for rank, slot in enumerate(entry["slots"])
    ]
    return Table(title, columns, rows)


def main_head(slot: Slot) -> str | None:
    """The head that reads a slot most, with its share of the reads."""
    if not slot.heads:
        return None
    head, reads, _ = slot.heads[0]
    return f"{head} {reads / slot.reads:.0%}"


def slot_tables(title: str, slot: Slot, note: str) -> list[Table]:
    """One slot: how it is read, its words (with `note` on how far they can be trusted), its contexts."""
    heads = ", ".join(f"{head}: {reads / slot.reads:.0%}" for head, reads, _ in slot.heads[:8]) or None
    columns = [number("Reads"), number("Mass", "{:.3%}"), Column("By heads"), Column("Pattern")]
    row = [slot.reads, slot.share, heads, None if slot.pattern is None else str(slot.pattern)]
    tables = [Table(title, columns, [row])]
    if slot.raises is not None and slot.lowers is not None:
        words = [
            [quoted(up.token), up.logit, quoted(down.token), down.logit]
            for up, down in zip(slot.raises, slot.lowers, strict=True)
        ]
        columns = [Column("Raises"), number("logit", "{:+.2f}"), Column("Lowers"), number("logit", "{:+.2f}")]
        tables.append(Table(f"What its value says{note}", columns, words))
    contexts = [[c.weight, c.document, c.place, f"{c.before}[{c.token}]{c.after}"] for c in slot.contexts]
    columns = [number("Weight", "{:.3f}"), number("Doc"), number("Place"), Column("Context")]
    where = (
        "Read with the largest weights at [ ]"
        if contexts
        else "Not read in this text: its value may be old or untouched"
    )
    return [*tables, Table(where, columns, contexts)]
