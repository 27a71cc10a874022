"""`train.init_from`: a new run starts from the weights of another run, as far as both models have them."""

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch

from pkmlm.errors import UserError
from pkmlm.files import sha256_of
from pkmlm.memory.init import initialise
from pkmlm.memory.table import table_ranks
from pkmlm.model.transformer import Transformer, build_model, streams
from pkmlm.recipe.schema import Model, Recipe, differences
from pkmlm.runs.checkpoint import check_weights, load_weights, verify
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import checkpoint_digest, read_progress
from pkmlm.train.job import Job

HEAD = "untied_head.weight"
IDS = "token_ids."  # which the tokenizer gives where a checkpoint has none
SHAPELESS = {
    *("model.heads", "model.kv_heads", "model.head_dim", "model.attention", "model.document_mask", "model.residual"),
    *("model.norm", "model.norm_eps", "model.ffn"),
}


@torch.no_grad()
def load_init_from(job: Job, model: Transformer, step: int) -> Set[str]:
    """Fill a model with the weights of `train.init_from`, and draw those that it lacks; return the names of these.

    Args:
        step: the step of their checkpoint, as returned by `check_init_from`; the same on all ranks.

    Raises:
        UserError: a tensor cannot be read (exit code 1).
    """
    source = RunDirectory(str(job.recipe.train.init_from))  # which `check_init_from` has verified
    path = source.checkpoint(step)
    with _naming_the_key(job, source):
        weights, tables = model.state_dict(), table_ranks(model)
        missing, _ = check_weights(path, weights, tables)
        if missing:
            initialise(model, job.recipe.train.seed, streams(model))
        load_weights(path, weights, tables, strict=False)
    if HEAD in missing and model.untied_head is not None:  # the embedding was the head, too
        model.untied_head.weight.copy_(model.embedding.weight)
    return missing


def check_init_from(job: Job) -> tuple[int | None, list[str]]:
    """Check that the weights of `train.init_from`, if there is one, fit this model. Return the step of its checkpoint,
    the best or else the latest, and a warning if weights are missing there, have no place here or mean something else
    here, or if the data is read in the same order again.

    Raises:
        UserError: there is no such run, it has another tokenizer, a tensor has another shape in this model, or they
            have no tensor in common (exit code 2); its checkpoint is damaged (1).
    """
    if job.recipe.train.init_from is None:
        return None, []
    source, path, step = _source_checkpoint(job)
    model = build_model(job.recipe, job.vocab_size, "meta")
    with _naming_the_key(job, source):
        missing, unexpected = check_weights(path, model.state_dict(), table_ranks(model))
        differing = _differing_keys(job, source)
        before = source.recipe().train
    loaded = model.state_dict().keys() - missing
    missing, unexpected = ({name for name in names if not name.startswith(IDS)} for names in (missing, unexpected))
    parts = []
    if HEAD in missing:
        parts.append("untied_head starts as a copy of the embedding, which is the head there")
    if drawn := missing - {HEAD}:
        parts.append(f"new here, not in {source.path}: {_modules(drawn, loaded)}")
    if unexpected:
        parts.append(f"has no place in this model, so left out: {_modules(unexpected, loaded)}")
    if job.background is not None and job.background.checkpoint != checkpoint_digest(path):
        parts.append(f"{path} is another checkpoint than that of finetune.background, which may read other slots")
    changed = [text for key, text in differing.items() if key in _shapeless(job.recipe.model)]
    if changed:
        parts.append(f"the same weights are used differently here: {', '.join(changed)}")
    if read_progress(path).data.get("train") == job.corpus.sha256 and before.seed == job.recipe.train.seed:
        parts.append("it reads the same batches in the same order as that run; set train.seed for another order")
    return step, [f"train.init_from: {'; '.join(parts)}"] if parts else []


def _source_checkpoint(job: Job) -> tuple[RunDirectory, Path, int]:
    """The run of `train.init_from`, its best checkpoint (or else its latest), and the step of that checkpoint."""
    try:
        source = RunDirectory.existing(str(job.recipe.train.init_from))
    except UserError as error:
        raise UserError(f"train.init_from: {error.message}", error.hint) from None
    if sha256_of(source.tokenizer_file) != job.tokenizer.sha256:
        raise UserError(
            f"train.init_from: run {source.path} has another tokenizer than {job.corpus.name}",
            f"tokenize again with --tokenizer {source.tokenizer_file}",
        )

    def verified(path: Path) -> tuple[Path, int]:
        verify(path, optimizer=False)
        return path, read_progress(path).step

    try:
        path, step = source.of("latest" if source.best() is None else "best", verified)
    except UserError as error:
        hint = "start from another run, or copy that one again"
        raise UserError(f"train.init_from: {error.message}", hint, error.exit_code) from None
    return source, path, step


@contextmanager
def _naming_the_key(job: Job, source: RunDirectory) -> Iterator[None]:
    """Name `train.init_from` in an error; where a shape is wrong, name also the keys that make it so."""
    try:
        yield
    except UserError as error:
        hint = error.hint
        if error.exit_code == 2:
            differing = ", ".join(_differing_keys(job, source).values())
            hint = f"the recipes differ: {differing}" if differing else ""
            hint = hint or f"give the model its shapes: pkmlm recipe show {source.recipe_file}"
        raise UserError(f"train.init_from: {error.message}", hint, error.exit_code) from None


def _differing_keys(job: Job, source: RunDirectory) -> dict[str, str]:
    """The keys of the model that both recipes have, and in which they differ, each with a text that says how."""

    def in_full(recipe: Recipe) -> Recipe:
        of, norm_eps = recipe.model, recipe.model.epsilon(recipe.model.norm)
        widths = replace(of, kv_heads=of.value_heads, head_dim=of.head_width, ffn_dim=of.inner, norm_eps=norm_eps)
        return replace(recipe, model=widths)

    before, now = source.recipe(), job.recipe
    written = differences(before, now)  # a width that follows from another key would be named beside that
    return {
        key: f"{key} is {there} there and {here} here"
        for key, (there, here) in differences(in_full(before), in_full(now)).items()
        if key.startswith("model.") and key in written and ".optim." not in key and "absent" not in (there, here)
    }


def _shapeless(model: Model) -> set[str]:
    """Keys that change what a model computes from its weights, but not the shape of a tensor."""
    rotary = {"model.rotary_fraction", "model.rotary_base"}
    rotary |= {f"model.rotary_scaling.{key.name}" for key in fields(model.rotary_scaling)}
    of_memories = {
        f"model.memories.{name}.{key}" for name, memory in model.memories.items() for key in ("kind", *memory.shapeless)
    }
    return SHAPELESS | of_memories | (rotary if model.positions == "rotary" else set())


def _modules(names: Set[str], loaded: Set[str]) -> str:
    """Names of tensors as a text, such as "pkm (layers 3, 4)": a part of a block stands for its tensors where none of
    them is loaded.
    """
    layers: dict[str, list[str]] = {}
    for name in sorted(names):
        within = re.fullmatch(r"(blocks\.(\d+)\.(?:(?:before|values|parts|gates)\.)?(?:memory_)?)(([^.]+).*)", name)
        if within is None:
            layers[name.replace("pools.memory_", "")] = []
            continue
        above, number, tensor, part = within.groups()
        label = tensor if any(other.startswith(f"{above}{part}.") for other in loaded) else part
        layer = str(int(number) + 1)
        if layer not in layers.setdefault(label, []):
            layers[label].append(layer)
    return ", ".join(
        f"{label} (layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)})" if numbers else label
        for label, numbers in layers.items()
    )
