"""What a grid can measure of its cells: where each number comes from and how it is printed."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from pkmlm.evaluate.task_file import SUITES

Source = Literal["cost", "train", "eval", "usage", "tasks", "speed"]
TASKS = SUITES["memoryformer"]


@dataclass(frozen=True)
class Measure:
    """One number of a run.

    Attributes:
        heading: of its column; label: of a plot's axis, with the unit.
        format: of the number.
        source: what it needs: arithmetic, training, `eval`, `usage-report`, tasks, or timing all models.
        read: takes it from the facts of a run (`cells.facts_at_end`), or from a point's "cost" (`facts_of_cost`) and
            "speed" (tokens per second).
    """

    heading: str
    label: str
    format: str
    source: Source
    read: Callable[[Mapping[str, Any]], float | None]


def fact(*path: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads the number at a path of keys; None where there is none."""

    def read(facts: Mapping[str, Any]) -> float | None:
        value: Any = facts
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value * scale if isinstance(value, int | float) else None

    return read


def of_tables(*path: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Reads a number of the usage report: the mean over tables, so that a pool counts once."""
    return lambda facts: mean(map(fact(*path), by_table(facts.get("usage") or [])))


def suite_accuracy(facts: Mapping[str, Any]) -> float | None:
    """The mean over the paper's tasks; None if one was not scored. A run's other tasks do not count."""
    tasks = facts.get("tasks") or {}
    found = [tasks.get(name, {}).get("acc") for name in TASKS]
    return None if None in found else mean(found)


MEASURES: dict[str, Measure] = {
    "perplexity": Measure("ppl", "test perplexity (token)", "{:,.2f}", "eval", fact("test_token_ppl")),
    "bits_per_byte": Measure("bits/byte", "bits per byte of test", "{:.4f}", "eval", fact("test_bits_per_byte")),
    "valid_loss": Measure("valid", "validation loss (nats per token)", "{:.4f}", "train", fact("valid_loss")),
    "usage": Measure("usage", "slots used on test", "{:.1%}", "usage", of_tables("mass", "usage")),
    "kl": Measure("KL", "KL from uniform on test (nats)", "{:.2f}", "usage", of_tables("mass", "kl")),
    "effective": Measure(
        "eff. reads", "reads of equal weight that a head's are worth", "{:.1f}", "usage", of_tables("effective")
    ),
    "top_weight": Measure("top weight", "share of a head's largest weight", "{:.1%}", "usage", of_tables("top_weight")),
    "speed": Measure("k tokens/s", "scoring (1,000 tokens per second)", "{:.1f}", "speed", fact("speed", scale=1e-3)),
    "valid_perplexity": Measure(
        "valid ppl", "validation perplexity (token)", "{:,.2f}", "train", fact("valid_token_ppl")
    ),
    "seconds": Measure("train s", "training (seconds)", "{:,.1f}", "train", fact("seconds")),
    "lr": Measure("lr", "learning rate", "{:g}", "train", fact("lr")),
    "dim": Measure("dim", "width", "{:,.0f}", "train", fact("dim")),
    "layers": Measure("layers", "layers", "{:,.0f}", "train", fact("layers")),
    "dense": Measure("dense M", "dense parameters (millions)", "{:,.2f}", "cost", fact("cost", "dense", scale=1e-6)),
    "memory": Measure(
        "memory M", "in memory (million parameters)", "{:,.2f}", "cost", fact("cost", "memory", scale=1e-6)
    ),
    "operations": Measure(
        "M ops", "operations per token (millions)", "{:,.2f}", "cost", fact("cost", "operations", scale=1e-6)
    ),
    "bytes": Measure(
        "MB read", "weights read per token (MB, fp32)", "{:,.2f}", "cost", fact("cost", "read", scale=4e-6)
    ),
    "block_flops": Measure(
        "block G", "operations of a block (G)", "{:,.4g}", "cost", fact("cost", "block_flops", scale=1e-9)
    ),
    "map_flops": Measure(
        "no attn G", "of which not attention (G)", "{:,.4g}", "cost", fact("cost", "map_flops", scale=1e-9)
    ),
    "table_mb": Measure(
        "tables MB", "tables of a block (MB, 2 bytes an entry)", "{:,.1f}", "cost", fact("cost", "tables", scale=2e-6)
    ),
    **{name: Measure(name, f"accuracy on {name}", "{:.3f}", "tasks", fact("tasks", name, "acc")) for name in TASKS},
    "average_acc": Measure("average", "average accuracy", "{:.3f}", "tasks", suite_accuracy),
}


def by_table(usage: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The memories of a usage report, with a pool as one memory in place of the layers that read it."""
    return [memory for memory in usage if not memory.get("pool") or memory["name"] == "pool"]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
