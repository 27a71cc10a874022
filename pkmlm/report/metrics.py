"""The one list of what is measured: what each number is called, how it is shown, where it is read and what it means.

Tables, plots, grids, the training log and its warnings take from here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from pkmlm.console import NATS, SHARE, Column, number
from pkmlm.evaluate.task_file import SUITES

Source = Literal["cost", "train", "eval", "usage", "tasks", "speed"]
TASKS = SUITES["memoryformer"]


@dataclass(frozen=True)
class Metric:
    """One number of a run, or of its memories.

    Attributes:
        path: the keys to it in the facts of a run (`compare.facts_of`; costs in a grid: `run.facts_of_cost`), with dots
            between; after "usage.", in a memory's entry of `usage-report --format json`.
        heading, format: of its column.
        label: what it is, in one line, with the unit; in a grid's figures, of its axis.
        source: what a grid needs for it: arithmetic, training, `eval`, `usage-report`, tasks, or timing all models.
            None: grids do not measure it.
        by_token: whether it can be compared only between models of one tokenizer.
        brief, brief_format, scale: its heading, format and factor in a grid, where they differ; the unit is that one's.
    """

    path: str
    heading: str
    format: str
    label: str
    source: Source | None = None
    brief: str = ""
    brief_format: str = ""
    scale: float = 1.0
    by_token: bool = False

    @property
    def column(self) -> Column:
        return number(self.heading, self.format)

    @property
    def seeded(self) -> bool:
        """Whether it differs between seeds."""
        return self.source not in ("cost", "speed")

    def read(self, facts: Mapping[str, Any]) -> float | None:
        """The number in the facts of a run, None where there is none; of memories, the mean over tables."""
        value = value_at(facts, self.path.split("."))
        return None if value is None else value * self.scale


def value_at(found: Any, path: Sequence[str]) -> float | None:
    """The number at a path of keys; in a list of memories, its mean over tables."""
    if isinstance(found, list):
        return mean(value_at(memory, path) for memory in by_table(found))
    return found if found is None or not path else value_at(found.get(path[0]), path[1:])


def by_table(usage: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The memories of a usage report, with a pool as one memory in place of the layers that read it."""
    return [memory for memory in usage if not memory.get("pool") or memory["layer"] is None]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


COUNT, WHOLE, TENTHS, TWO, FOUR, BITS = "{:,}", "{:,.0f}", "{:,.1f}", "{:,.2f}", "{:,.4g}", "{:.4f}"

METRICS: dict[str, Metric] = {
    "perplexity": Metric("test_token_ppl", "Test ppl", TWO, "test perplexity (token)", "eval", "ppl", by_token=True),
    "word_perplexity": Metric("test_word_ppl", "word ppl", TENTHS, "test perplexity (word)"),
    "bits_per_byte": Metric("test_bits_per_byte", "Test bits/byte", BITS, "bits per byte of test", "eval", "bits/byte"),
    "valid_loss": Metric(
        "valid_loss", "Valid (nats)", NATS, "validation loss (nats per token)", "train", "valid", by_token=True
    ),
    "valid_perplexity": Metric(
        "valid_token_ppl", "Valid ppl", TWO, "validation perplexity (token)", "train", "valid ppl", by_token=True
    ),
    "valid_bits_per_byte": Metric(
        "valid_bits_per_byte", "Valid bits/byte", BITS, "bits per byte of validation", "train", "valid bits/byte"
    ),
    "usage": Metric("usage.mass.usage", "Usage", SHARE, "slots used on test", "usage", "usage"),
    "kl": Metric("usage.mass.kl", "KL", NATS, "KL from uniform on test (nats)", "usage", "KL", "{:.2f}"),
    "gini": Metric("usage.mass.gini", "Gini", "{:.3f}", "Gini coefficient of the mass of slots"),
    "top50": Metric("usage.mass.top50", "50%", COUNT, "slots that hold 50 % of the mass"),
    "top90": Metric("usage.mass.top90", "90%", COUNT, "slots that hold 90 % of the mass"),
    "top99": Metric("usage.mass.top99", "99%", COUNT, "slots that hold 99 % of the mass"),
    "effective": Metric(
        "usage.effective", "Effective", "{:.1f}", "reads of equal weight that a head's are worth", "usage", "eff. reads"
    ),
    "top_weight": Metric(
        "usage.top_weight", "Top weight", SHARE, "share of a head's largest weight", "usage", "top weight"
    ),
    "speed": Metric(
        "scoring_tokens_per_second",
        "Scored tokens/s",
        WHOLE,
        "scoring (1,000 tokens per second)",
        "speed",
        "k tokens/s",
        "{:.1f}",
        1e-3,
    ),
    "seconds": Metric("seconds", "sec ~", WHOLE, "training (seconds)", "train", "train s", TENTHS),
    "step": Metric("step", "Steps", WHOLE, "steps of training"),
    "tokens": Metric("tokens", "Tokens", WHOLE, "training (million tokens)", "train", "M tokens", TWO, 1e-6),
    "tokens_per_second": Metric("tokens_per_second", "Tokens/s ~", WHOLE, "training (tokens per second)"),
    "lr": Metric("lr", "lr", "{:g}", "learning rate", "train"),
    "dim": Metric("dim", "dim", WHOLE, "width", "train"),
    "layers": Metric("layers", "layers", WHOLE, "layers", "train"),
    "dense": Metric("dense", "Dense", COUNT, "dense parameters (millions)", "cost", "dense M", TWO, 1e-6),
    "memory": Metric("memory", "Memory", COUNT, "in memory (million parameters)", "cost", "memory M", TWO, 1e-6),
    "total": Metric("total", "Total", COUNT, "parameters"),
    "read_per_token": Metric("read_per_token", "Read per token", COUNT, "parameters read per token"),
    "operations": Metric("operations", "M ops", TWO, "operations per token (millions)", "cost", scale=1e-6),
    "bytes": Metric("read", "MB read", TWO, "weights read per token (MB, fp32)", "cost", scale=4e-6),
    "block_flops": Metric("block_flops", "block G", FOUR, "operations of a block (G)", "cost", scale=1e-9),
    "map_flops": Metric("map_flops", "no attn G", FOUR, "of which not attention (G)", "cost", scale=1e-9),
    "table_mb": Metric("tables", "tables MB", TENTHS, "tables of a block (MB, 2 bytes an entry)", "cost", scale=2e-6),
    **{name: Metric(f"tasks.{name}.acc", name, "{:.3f}", f"accuracy on {name}", "tasks") for name in TASKS},
    "average_acc": Metric("average_acc", "average", "{:.3f}", "average accuracy", "tasks"),
}
EVENNESS = ("usage", "kl", "gini", "top50", "top90", "top99")  # of a memory's reads, by mass or by count
OVER_TOKENS = {  # the panels of the picture of runs over tokens, and the labels of their y axes
    "loss": "perplexity",
    "lead": "lead in perplexity (%)",
    "usage": "slots used (%)",
    "kl": "KL (nats)",
    "effective": "effective reads",
    "dead": "dead slots (%)",
}
FLOORED = ("usage", "kl")  # those that are also known of random reading, and at each validation

# What grids measure, with the headings and formats of their tables.
MEASURES = {
    name: replace(metric, heading=metric.brief or metric.heading, format=metric.brief_format or metric.format)
    for name, metric in METRICS.items()
    if metric.source
}
