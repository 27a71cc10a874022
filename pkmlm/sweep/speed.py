"""How fast the models of a grid score text: timed interleaved in one process, so that load falls on all alike."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pkmlm.bench.generate import score
from pkmlm.bench.rounds import interleaved
from pkmlm.data.batches import Batches
from pkmlm.device import default_device, is_out_of_memory
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import open_split
from pkmlm.evaluate.load import load_run
from pkmlm.sweep.grid import Point

TOKENS = 4096  # scored at once
ROUNDS = 7


def time_scoring(runs: Mapping[Point, tuple[Path, str]], say: Callable[[str], None]) -> dict[Point, list[float]]:
    """Tokens a second that each run's model scores of the test split, one number for each round.

    Args:
        runs: the run directory of each point, and the folder of its tokens.
        say: prints a line on the progress.

    Raises:
        UserError: a run or the test split cannot be read; (exit code 1) memory does not hold all models together.
    """
    actions: dict[Point, Callable[[], object]] = {}
    counted: dict[Point, int] = {}
    try:
        for point, (path, tokens) in runs.items():
            run = load_run(path)
            context = run.recipe.model.context
            sequences = max(1, TOKENS // context)
            corpus = open_split(tokens, "test", run.tokenizer)
            tokens_BT = Batches(corpus, context, sequences, 1).micro_batch(1, 0, sequences)[0].to(run.device)
            counted[point] = tokens_BT.numel()
            actions[point] = partial(score, run.model, tokens_BT)
        times = interleaved(actions, ROUNDS, default_device(), say)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError("memory does not hold all models together", exit_code=1) from None
        raise
    return {point: [counted[point] / seconds for seconds in timing.seconds] for point, timing in times.items()}
