"""Validation during training: perplexity, usage and a sample of text, from the model as it is."""

from collections.abc import Callable
from typing import Any

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.device import autocast
from pkmlm.evaluate.documents import documents_of_split, open_split
from pkmlm.evaluate.generate import Sampling, generate, stream_text
from pkmlm.evaluate.perplexity import score
from pkmlm.measure.counters import UsageCounters
from pkmlm.signals import StopRequest
from pkmlm.train.step import TrainState

SAMPLE_TOKENS = 48


def validator(
    state: TrainState, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Callable[[StopRequest], dict[str, Any] | None]:
    """The function that measures the model on the valid split, as `pkmlm eval --split valid` would (but in the
    precision of training). It returns the numbers of a "valid" event, or None where a stop request cut it short.

    All ranks that train together call it and get the same numbers: the groups of ranks that divide the tables take
    turns at the batches, and none stops before the end.

    Args:
        say: gets a line with the sample of text that `eval.sample` asks for.

    Raises:
        UserError: there is no valid split, it is damaged, or it was made with another tokenizer.
    """
    recipe, model, groups = state.recipe, state.model, state.process_groups
    alone = groups.world.size == 1
    corpus = open_split(recipe.data.folders, "valid", tokenizer)

    def validate(stop: StopRequest) -> dict[str, Any] | None:
        if not alone and stop.agreed() is not None:
            return None
        model.eval()
        documents = documents_of_split(corpus, tokenizer, recipe.eval.tokens)
        with UsageCounters(model, overlap=False) as counters, autocast(state.device, state.precision):
            result = score(
                model,
                documents,
                tokenizer.begin,
                batch=recipe.train.micro_batch,
                watch=counters.only,
                advance=(lambda tokens: stop.agreed() is None) if alone else None,
                world=groups.data,
            )
        if result is None:
            return None
        if (prompt := recipe.eval.sample) is not None:  # the same draws each time
            ids = [tokenizer.begin, *tokenizer.encode(prompt)]
            drawn = generate(model, ids, Sampling(temperature=0.8, top_p=0.95), SAMPLE_TOKENS, tokenizer.size)
            say(f"sample: {prompt}{''.join(stream_text(tokenizer, ids, drawn))}")
        return {
            "loss": result.nats_per_token,
            "token_ppl": result.token_ppl,
            "word_ppl": result.word_ppl,
            "bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "usage": [memory.as_event() for memory in counters.memories(groups.data)],
        }

    return validate
