"""Perplexity as lm-evaluation-harness defines it for rolling tasks: documents never share context.

B: windows of a batch; T: positions; N: both; D: model width; M: scored positions of a batch.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pkmlm.distributed import World
from pkmlm.errors import NotFinite, UserError
from pkmlm.evaluate.documents import Documents
from pkmlm.evaluate.likelihood import Window, score_targets
from pkmlm.model.language_model import LanguageModel
from pkmlm.runs.results import perplexity

BATCH = 16  # windows of a forward pass


@dataclass(frozen=True)
class Perplexity:
    """The negative log-likelihood of documents and what follows from it.

    Attributes:
        tokens: scored tokens: all but the end-of-document tokens.
        nll: the sum of their -log p, in nats.
        token_ppl, word_ppl, byte_ppl: exp(nll / count); None if that overflows a float, as for a text without white
            space, which is a single word.
        bits_per_byte: nll / bytes / log 2.
    """

    split: str
    tokens: int
    words: int
    bytes: int
    nll: float
    token_ppl: float | None
    word_ppl: float | None
    byte_ppl: float | None
    bits_per_byte: float

    @property
    def nats_per_token(self) -> float:
        return self.nll / self.tokens


def windows(ids: np.ndarray, prefix: int, context: int, stride: int, unscored: int = 0) -> Iterator[Window]:
    """Cut a document (integers, (n,), which may be on disk) into windows in which each token is scored once, except the
    first `unscored`.

    The first window scores up to `context` tokens after the prefix token; each later one the next `stride`, with as
    much context before them as fits. With stride = context this is the harness's rule: only the last window overlaps
    another.
    """
    done = 0
    while done < len(ids):
        stop = min(len(ids), done + (context if done == 0 else stride))
        tokens = ids[stop - 1 - context : stop - 1] if stop > context else np.concatenate([[prefix], ids[: stop - 1]])
        if stop > unscored:
            yield Window(tokens.astype(np.int64), ids[max(done, unscored) : stop].astype(np.int64))
        done = stop


@torch.no_grad()
def score(
    model: LanguageModel,
    documents: Documents,
    prefix: int,
    *,
    stride: int | None = None,
    batch: int = BATCH,
    watch: Callable[[Tensor], None] | None = None,
    advance: Callable[[int], bool] | None = None,
    world: World | None = None,
) -> Perplexity | None:
    """Score documents with a model in evaluation mode; in the model's own precision, sums in float64.

    Args:
        prefix: the token that is put before every document, `LoadedRun.prefix`.
        stride: tokens scored by each window after a document's first; None: the context.
        batch: windows of a forward pass.
        watch: called before each forward pass with the positions that are scored, a bool tensor (B * T,).
        advance: called after each forward pass with the tokens scored so far; ends the evaluation by returning False.
        world: ranks that take turns at the batches, each with all documents; each gets the result, the same as that of
            a single process. None: this process alone.

    Returns:
        None if `advance` ended it.

    Raises:
        UserError: stride outside 1 ... context; no tokens; a score that is not finite (NotFinite, exit code 1).
    """
    stride, world = stride or model.context, world or World()
    if not 1 <= stride <= model.context:
        raise UserError(f"--stride {stride} is out of range (expected 1 to the model's context, {model.context})")
    tokens = 0
    sums: list[float] = []  # one per batch: added up in order, they give the same bits in any world
    stream = (
        window
        for ids, prompt in documents.with_prompts()
        for window in windows(ids, prefix, model.context, stride, prompt)
    )
    while group := list(itertools.islice(stream, batch)):
        tokens += sum(len(window.targets) for window in group)
        if len(sums) % world.size != world.rank:
            sums.append(0.0)
            continue
        sums.append(sum(float(nll.sum()) for nll in score_windows(model, group, watch)))
        if advance is not None and not advance(tokens):
            return None
    total = sum(world.all_sum(torch.tensor(sums, dtype=torch.float64)).tolist())
    if not math.isfinite(total):
        raise NotFinite(f"the model's scores on {documents.name} are not finite", exit_code=1)
    if tokens == 0:
        raise UserError(f"{documents.name} holds no tokens")
    words, size = documents.words, documents.bytes
    token_ppl, word_ppl, byte_ppl = (perplexity(total / count) for count in (tokens, words, size))
    bits = total / size / math.log(2)
    return Perplexity(documents.name, tokens, words, size, total, token_ppl, word_ppl, byte_ppl, bits)


def score_windows(
    model: LanguageModel, group: list[Window], watch: Callable[[Tensor], None] | None = None
) -> list[Tensor]:
    """-log p of the targets of each window of a batch, in float64; a causal model does not see the padding, which is
    on the right.
    """
    device = next(model.parameters()).device
    longest = max(len(window.tokens) for window in group)
    tokens_BT = np.zeros((len(group), longest), dtype=np.int64)
    scored_BT = np.zeros((len(group), longest), dtype=bool)
    for row, window in enumerate(group):
        tokens_BT[row, : len(window.tokens)] = window.tokens
        scored_BT[row, len(window.tokens) - len(window.targets) : len(window.tokens)] = True
    mask_N = torch.from_numpy(scored_BT).flatten().to(device)
    if watch is not None:
        watch(mask_N)
    h_MD = model.hidden(torch.from_numpy(tokens_BT).to(device)).flatten(0, 1)[mask_N]
    targets_M = torch.from_numpy(np.concatenate([window.targets for window in group])).to(device)
    return list(score_targets(model, h_MD, targets_M)[0].cpu().split([len(window.targets) for window in group]))
