"""What a run starts from: a model with initial weights, those of another run, or those of its own checkpoint."""

from pathlib import Path

import torch

from pkmlm.errors import UserError
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.runtime.distributed import Ranks
from pkmlm.runtime.files import sha256_of
from pkmlm.runtime.rundir import RunDirectory
from pkmlm.train.checkpoint import check_weights, load_weights
from pkmlm.train.integrity import damage_of
from pkmlm.train.job import Job


def starting_model(job: Job, device: torch.device, ranks: Ranks, *, fresh: bool) -> Transformer:
    """The model with its initial weights: drawn from the seed, or those of `train.init_from`. If not `fresh`, without
    any: they are to be read from the run's checkpoint.
    """
    draw = fresh and job.recipe.train.init_from is None
    model = build_model(job.recipe, job.vocab_size, device, ranks, draw=draw)
    if fresh and not draw:
        load_weights(initial_checkpoint(job), model)
    return model


def check_initial(job: Job) -> None:
    """Refuse a `train.init_from` whose weights are not this model's.

    Raises:
        UserError: as `initial_checkpoint`; or its tensors have other shapes.
    """
    path = initial_checkpoint(job)
    try:
        check_shapes(path, job)
    except UserError as error:
        hint = f"give the model its shapes: pkmlm recipe show {job.recipe.train.init_from}/recipe.yaml"
        raise UserError(f"train.init_from: {error.message}", error.hint or hint, error.exit_code) from None


def check_shapes(path: Path, job: Job) -> None:
    """Refuse a checkpoint of other shapes than the recipe's, before anything of their size is allocated."""
    check_weights(path, build_model(job.recipe, job.vocab_size, "meta"))


def initial_checkpoint(job: Job) -> Path:
    """The checkpoint of `train.init_from`: the best, else the latest.

    Raises:
        UserError: there is no such run, it has another tokenizer (exit code 2), or the checkpoint is damaged (1).
    """
    try:
        source = RunDirectory.existing(str(job.recipe.train.init_from))
    except UserError as error:
        raise UserError(f"train.init_from: {error.message}", error.hint) from None
    if sha256_of(source.tokenizer_file) != job.tokenizer.sha256:
        raise UserError(
            f"train.init_from: run {source.path} has another tokenizer than {job.recipe.data.dir}",
            f"tokenize again with --tokenizer {source.tokenizer_file}",
        )
    path = source.checkpoint(source.resolve("best" if source.best() is not None else "latest"))
    if problem := damage_of(path):
        raise UserError(f"train.init_from: {problem}", "start from another run, or copy that one again", exit_code=1)
    return path
