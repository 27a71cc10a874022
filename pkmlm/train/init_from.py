"""What a run starts from: a model with initial weights, those of another run, or those of its own checkpoint."""

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch

from pkmlm.distributed import ProcessGroups
from pkmlm.errors import UserError
from pkmlm.model.init import initialise
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.dump import flatten, scalar_text
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.files import sha256_of
from pkmlm.train.checkpoint import check_shared, check_weights, load_shared
from pkmlm.train.integrity import FILES, damage_of
from pkmlm.train.job import Job
from pkmlm.train.tensor_files import stored_names

HEAD = "untied_head.weight"
# Keys that change what a model computes, and no shape of a tensor.
SHAPELESS = (
    *("model.heads", "model.residual", "model.activation", "model.rotary_fraction", "model.attention is"),
    *("model.memory.topk", "model.hash.temperature", "model.hash.score", "model.hash.activation"),
)
LAYER = re.compile(r"blocks\.(\d+)(?:\.(?:parts\.)?(.+))?")  # a path in the model: layer (from 0), and path in it


def starting_model(job: Job, device: torch.device, ranks: ProcessGroups, *, fresh: bool) -> Transformer:
    """The model with its initial weights: drawn from the seed, or those of `train.init_from`. If not `fresh`, without
    any: they are to be read from the run's checkpoint.
    """
    init_weights = fresh and job.recipe.train.init_from is None
    model = build_model(job.recipe, job.vocab_size, device, ranks, init_weights=init_weights)
    if fresh and not init_weights:
        take_initial(job, model)
    return model


@torch.no_grad()
def take_initial(job: Job, model: Transformer) -> None:
    """Fill a model with the weights of `train.init_from`, and draw those that it lacks."""
    source, path = initial_checkpoint(job)
    with explained(job, source):
        lacking, _ = differences(path, model)
        if lacking:
            initialise(model, job.recipe.train.seed)
        load_shared(path, model)
    if HEAD in lacking and model.untied_head is not None:  # the embedding was the head, too
        model.untied_head.weight.copy_(model.embedding.weight)


def check_initial(job: Job) -> list[str]:
    """Refuse a `train.init_from`, if there is one, whose weights do not fit this model; what to warn of where they are
    not all of it, or of more than it.

    Raises:
        UserError: as `initial_checkpoint`; or a tensor has another shape in this model, or it has none of them.
    """
    if job.recipe.train.init_from is None:
        return []
    source, path = initial_checkpoint(job)
    model = build_model(job.recipe, job.vocab_size, "meta")
    with explained(job, source):
        lacking, strange = differences(path, model)
        check_shared(path, model)
    taken = model.state_dict().keys() - lacking
    parts = []
    if HEAD in lacking:
        parts.append("untied_head starts as a copy of the embedding, the head there")
    if drawn := lacking - {HEAD}:
        parts.append(f"not in {source.path}, so starts anew: {by_module(drawn, taken)}")
    if strange:
        parts.append(f"has no place in this model, so left out: {by_module(strange, taken)}")
    with explained(job, source):
        if changed := [text for text in other_keys(job, source) if text.startswith(SHAPELESS)]:
            parts.append(f"its weights mean something else here: {', '.join(changed)}")
        same_text = source.facts().get("data_sha256") == job.corpus.sha256
        if same_text and source.recipe().train.seed == job.recipe.train.seed:
            parts.append("the text comes in the order that it was trained in; another train.seed gives another")
    return [f"train.init_from: {'; '.join(parts)}"] if parts else []


def differences(path: Path, model: Transformer) -> tuple[set[str], set[str]]:
    """The names of a model's tensors that a checkpoint lacks, and of those that it has and the model has not.

    Raises:
        UserError: they have none in common.
    """
    stored, own = stored_names(path / FILES[0]), model.state_dict().keys()
    if not stored & own:
        raise UserError(f"{path / FILES[0]} has no tensor of this model")
    return own - stored, stored - own


@contextmanager
def explained(job: Job, source: RunDirectory) -> Iterator[None]:
    """Name the key of the recipe in an error; where a shape is wrong, with the keys that make it so."""
    try:
        yield
    except UserError as error:
        hint = error.hint
        if error.exit_code == 2:
            differing = other_keys(job, source)
            shown = f"give the model its shapes: pkmlm recipe show {source.recipe_file}"
            hint = f"the recipes differ: {', '.join(differing)}" if differing else shown
        raise UserError(f"train.init_from: {error.message}", hint, error.exit_code) from None


def other_keys(job: Job, source: RunDirectory) -> list[str]:
    """The keys of the model in which the recipes differ; those that have an effect in one of the models alone, as the
    keys of a memory that only one has, are left out.
    """
    theirs, own = source.recipe(), job.recipe
    models = (theirs.model, own.model)
    idle = ["model.memory."] * any(model.memory.kind == "none" for model in models)
    idle += ["model.hash."] * any(model.projections == "dense" for model in models)
    idle += ["model.activation"] * any(model.projections == "hash" for model in models)
    idle += ["model.rotary_fraction"] * any(model.positions != "rotary" for model in models)
    before = flatten(theirs)
    return [
        f"{key} is {scalar_text(before[key])} there and {scalar_text(value)} here"
        for key, value in flatten(own).items()
        if key.startswith("model.") and not key.startswith(tuple(idle)) and value != before[key]
    ]


def by_module(names: Set[str], taken: Set[str]) -> str:
    """Tensors as a text that names the largest modules none of whose tensors are taken: "memory (layers 3-5)"."""
    kept = {".".join(words[:end]) for words in (name.split(".") for name in taken) for end in range(1, len(words))}
    layers: dict[str, list[int]] = {}
    in_order = sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(9), name))
    for words in (name.split(".") for name in in_order):
        paths = (".".join(words[:end]) for end in range(1, len(words)) if words[end - 1] not in ("blocks", "parts"))
        path = next((path for path in paths if path not in kept), ".".join(words))
        found = LAYER.fullmatch(path)
        numbers = layers.setdefault((found[2] or "") if found else path, [])
        if found and int(found[1]) + 1 not in numbers:
            numbers.append(int(found[1]) + 1)
    texts = []
    for path, numbers in layers.items():
        of = f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}"
        texts.append(f"{path} ({of})" if path and numbers else path or of)
    return ", ".join(texts)


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as a short text: "1-3, 5"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def check_shapes(path: Path, job: Job) -> None:
    """Refuse a checkpoint of other shapes than the recipe's, before anything of their size is allocated."""
    check_weights(path, build_model(job.recipe, job.vocab_size, "meta"))


def initial_checkpoint(job: Job) -> tuple[RunDirectory, Path]:
    """The run of `train.init_from`, and its checkpoint: the best, else the latest.

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
    if problem := damage_of(path, moments=False):
        raise UserError(f"train.init_from: {problem}", "start from another run, or copy that one again", exit_code=1)
    return source, path
