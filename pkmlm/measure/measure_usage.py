"""One pass over a text that counts what a run's memories read, for usage reports and for single slots."""

from collections.abc import Callable, Mapping

from pkmlm.distributed import World
from pkmlm.evaluate.documents import Documents
from pkmlm.evaluate.load import LoadedRun
from pkmlm.evaluate.perplexity import score
from pkmlm.measure.counters import Listeners, UsageCounters
from pkmlm.measure.ngrams import NGrams
from pkmlm.measure.usage import MemoryUsage
from pkmlm.memory.base import UsageTap


def measure_usage(
    run: LoadedRun,
    documents: Documents,
    advance: Callable[[int], bool] | None,
    world: World | None,
    ngrams: Mapping[str, NGrams],
    taps: list[UsageTap] | None = None,
    others: Listeners = (),
) -> list[MemoryUsage]:
    """What a run's memories read at the scored positions of documents, each position once.

    Args:
        run: whose model reads.
        documents: the text, for one pass.
        advance: see `score`.
        world: the processes that share the pass; the counts are those of all.
        ngrams: receive the n-grams that the model sees at these positions.
        taps: of the memories whose reads count; None: all.
        others: see `UsageCounters`.

    Returns:
        As `UsageCounters.memories`.
    """
    others = [*others, *((each.tap, each.add) for each in ngrams.values())]
    with UsageCounters(run.model, taps, others=others) as counters:
        score(run.model, documents, run.prefix, watch=counters.only, advance=advance, world=world)
    for each in ngrams.values():
        each.gather(world or World())
    return counters.memories(world)
