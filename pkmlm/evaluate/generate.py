"""Continuing a text, one token at a time, with a cache of keys and values.

B: sequences; T: new positions; V: vocabulary.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.model.attention import KVCache
from pkmlm.model.language_model import LanguageModel

NARROW = 256  # up to this width, a CPU computes a token before a second thread has woken (`pkmlm help speed`)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; None: all.
        top_p: keep the most likely tokens that together reach this probability; None: all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: list[int], sampling: Sampling, max_tokens: int, vocab_size: int
) -> Iterator[int]:
    """Yield the ids that continue a prompt, one at a time, even past the model's context.

    The cache holds the context; when it is full, the model reads the later half of it again and continues from there.

    Args:
        prompt: ids, at least one; if they exceed the context, only the last of them are read.
        sampling: how each token is drawn.
        max_tokens: how many ids are drawn.
        vocab_size: only ids below it are drawn: a model may have more rows than its tokenizer has pieces.

    Raises:
        UserError: (exit code 1) a logit is not finite.
    """
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed(sampling.seed)
    ids, cache = list(prompt), KVCache(model.context)
    pending = ids[-model.context :]
    for _ in range(max_tokens):
        if cache.length + len(pending) > model.context:
            cache, pending = KVCache(model.context), ids[-max(1, model.context // 2) :]
        logits_1V = next_logits(model, torch.tensor([pending], device=device), cache)
        token = sample_token(logits_1V[0, :vocab_size].float(), sampling, random)
        ids.append(token)
        pending = [token]
        yield token


def next_logits(model: LanguageModel, tokens_BT: Tensor, cache: KVCache) -> Tensor:
    """Logits (B, V) of what follows new tokens, in the dtype of the model's head.

    Args:
        tokens_BT: int64, below V.
        cache: keys and values of the tokens before; the new ones are added to it.

    Raises:
        ValueError: the cache has no room for the new tokens.
    """
    threads = torch.get_num_threads()
    if tokens_BT.numel() == 1 and model.embedding.embedding_dim <= NARROW:
        torch.set_num_threads(1)
    try:
        return model.head(model.hidden(tokens_BT, cache)[:, -1])
    finally:
        torch.set_num_threads(threads)


def sample_token(logits_V: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """One token id by temperature, then top-k, then top-p.

    Raises:
        UserError: (exit code 1) a logit is not finite.
    """
    if not torch.isfinite(logits_V).all():
        raise UserError("the model's scores for the next token are not finite", "use another step of the run", 1)
    if sampling.temperature < torch.finfo(logits_V.dtype).tiny:  # dividing by it would give NaN
        return int(logits_V.argmax())
    logits_V = (logits_V - logits_V.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        kept_k = logits_V.topk(sampling.top_k).indices  # of equal logits, no more than fit
        logits_V = torch.full_like(logits_V, float("-inf")).index_copy(0, kept_k, logits_V[kept_k])
    chance_V = logits_V.softmax(-1)
    if sampling.top_p is not None:
        sorted_V, order_V = chance_V.sort(descending=True, stable=True)
        beyond_V = sorted_V.cumsum(-1) - sorted_V >= sampling.top_p
        beyond_V[0] = False  # the most likely token stays, even where top_p rounds to 0 in fp32
        chance_V[order_V[beyond_V]] = 0
    return int(torch.multinomial(chance_V, 1, generator=random))


def stream_text(tokenizer: Tokenizer, prompt: list[int], ids: Iterable[int]) -> Iterator[str]:
    """Yield the text that `ids` add to `prompt`, as it comes; a character waits for all of its bytes.

    Ends before the end-of-document token.
    """
    seen = list(prompt[-8:])  # enough to decode what follows: a character has at most four byte pieces
    shown = len(tokenizer.decode(seen))
    for token in ids:
        if token == tokenizer.eos:
            break
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            seen = seen[-8:]
            shown = len(tokenizer.decode(seen))
    yield tokenizer.decode(seen)[shown:]
