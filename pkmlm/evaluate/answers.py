"""Answers that a model gives to the prompts of a split, compared with those that the split has."""

from collections.abc import Callable, Mapping
from itertools import accumulate, islice
from typing import Any

import numpy as np

from pkmlm.data.corpus import Corpus
from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import TextChoice, open_split
from pkmlm.evaluate.generate import Sampling, generate, stream_text
from pkmlm.evaluate.load import LoadedRun
from pkmlm.recipe.constraints import require_softmax

ROOM = 8  # tokens that an answer may take beyond twice those of the right one


def open_answers(run: LoadedRun, choice: TextChoice) -> tuple[Corpus, dict[int, int]]:
    """The split that the options of a command choose; and how many tokens the answers of its documents have, without
    their ends, by the numbers of those that have a prompt.

    Raises:
        UserError: it cannot be read or has no prompts; or the model cannot generate.
    """
    require_softmax(run.recipe.model, run.name, "generate")
    corpus = open_split(choice.token_folders(run.path, run.recipe), choice.split or "test", run.tokenizer)
    learnt = corpus.answer_lengths(0, corpus.documents)
    with_prompt = (learnt < np.diff(corpus.boundaries(0, corpus.documents))).nonzero()[0]
    if not len(with_prompt):
        hint = "tokenize rows with --prompt FIELD --answer FIELD"
        raise UserError(f"--answers: {corpus.name} has no prompts in its {corpus.split} split", hint)
    return corpus, {int(i): int(learnt[i]) - 1 for i in with_prompt}


def score_answers(
    run: LoadedRun, corpus: Corpus, lengths: Mapping[int, int], advance: Callable[[int], object], world: World
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Continue every prompt with the most likely tokens until the document ends, and compare the text with the answer;
    white space around both does not count.

    Args:
        corpus, lengths: from `open_answers`.
        advance: called with the tokens of right answers whose prompts are done.
        world: ranks that take turns at the prompts.

    Returns:
        "n" answers, and the share that is exactly right, "exact_match"; and a sample of each: the number of its
        document, "prompt", right "answer", "given" answer, and whether that is an "exact_match".
    """
    tokenizer = run.tokenizer
    samples: list[dict[str, Any]] = []
    ends = zip(lengths.items(), accumulate(lengths.values()), strict=True)
    for (i, length), end in islice(ends, world.rank, None, world.size):
        ids = corpus.document(i).tolist()
        prompt, answer = [run.prefix, *ids[: len(ids) - length]], ids[len(ids) - length :]
        drawn = generate(run.model, prompt, Sampling(temperature=0), 2 * length + ROOM, tokenizer.size)
        asked, right = (tokenizer.decode(part) for part in (ids[: len(ids) - length], answer))
        given = "".join(stream_text(tokenizer, prompt, drawn))
        sample = {"document": i, "prompt": asked, "answer": right, "given": given}
        samples.append(sample | {"exact_match": given.strip() == right.strip()})
        advance(end)
    gathered = (sample for of_rank in world.gather_objects(samples) for sample in of_rank)
    samples = sorted(gathered, key=lambda sample: int(sample["document"]))
    right_ones = sum(sample["exact_match"] for sample in samples)
    return {"n": len(samples), "exact_match": right_ones / len(samples)}, samples
