"""The models that are compared: a recipe's, with and without its memories, twice as deep, and as a MemoryFormer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pkmlm.bench import MODELS, short
from pkmlm.bench.peaks import step_operations
from pkmlm.bench.rounds import Timing
from pkmlm.console import Column, Table, number
from pkmlm.cost import Cost, cost_of
from pkmlm.cost_tables import vocab_size_of
from pkmlm.data.batches import Batch, Batches
from pkmlm.device import Precision, default_device, machine
from pkmlm.errors import UserError
from pkmlm.evaluate.generate import next_logits
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.spec import Spec, SpecError
from pkmlm.model.attention import KVCache
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.schema import Finetune, Model, Parallel, Recipe
from pkmlm.seeds import generator
from pkmlm.train.step import TrainState

FEWER = "choose some with --only, or a smaller model with -s"  # the hint if memory does not hold all models


@dataclass(frozen=True)
class Variant:
    """A model to time.

    Attributes:
        kind: of `pkmlm.bench.MODELS`.
    """

    kind: str
    name: str
    recipe: Recipe
    cost: Cost

    @property
    def read(self) -> int:
        """Bytes of weights that a token's forward reads, in fp32."""
        return 4 * self.cost.read_per_token

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "parameters": {"dense": self.cost.dense, "memory": self.cost.memory},
            "flops_per_token": self.cost.flops_per_token,
            "bytes_read_per_token": self.read,
        }


def variants(recipe: Recipe, vocab_size: int, num_keys: Sequence[int], kinds: Sequence[str]) -> list[Variant]:
    """The models of `kinds` that follow from a recipe: its shape with dense layers, the same with its memories, with
    twice the layers, and with hash tables in place of all maps.

    Args:
        num_keys: sub-keys of the memories that have any, one model for each; empty: the recipe's.
        kinds: of `pkmlm.bench.MODELS`.

    Raises:
        UserError: a model is not possible (one with memories, where the recipe has none).
    """
    own = recipe.model.memories
    if "memory" in kinds and not own:
        keys = "-s model.memories.pkm.kind=product-key -s model.memories.pkm.layers=auto:1"
        raise UserError("the recipe has no memory to time", f"add {keys}, or leave out --only memory")
    dense = replace(recipe.model, memories={}, vocab_size=vocab_size)
    with_memories = [replace(dense, memories=each) for each in ([resized(own, n) for n in num_keys] or [own])]
    models = {
        "dense": [(f"dense-{dense.layers}L", dense)],
        "memory": [(f"memory-{short(most_rows(each))}", each) for each in with_memories],
        "double": [(f"dense-{2 * dense.layers}L", replace(dense, layers=2 * dense.layers))],
        "hash": [(f"hash-{dense.layers}L", replace(dense, memories={"tables": HashSpec()}))],
    }
    return [variant(each, name, recipe, model) for each in kinds for name, model in models[each]]


def resized(memories: Mapping[str, Spec], num_keys: int) -> dict[str, Spec]:
    """Memories with so many sub-keys, where they have sub-keys."""
    return {name: memory.with_keys(num_keys) or memory for name, memory in memories.items()}


def most_rows(model: Model) -> int:
    """Rows of the largest table; 0 without memories."""
    sizes = (memory.tables(model.dim, model.vocab_size or 0) for memory in model.memories.values())
    return max((table.rows for tables in sizes for table in tables), default=0)


def variant(which: str, name: str, recipe: Recipe, model: Model) -> Variant:
    """The recipe with another model, for one process. Only memories of its own can be fine-tuned by slots."""
    recipe = replace(recipe, model=model, parallel=Parallel())
    if which != "memory":
        recipe = replace(recipe, train=replace(recipe.train, only="all"), finetune=Finetune())
    recipe = check_recipe(recipe)
    return Variant(which, name, recipe, cost_of(recipe, model.vocab_size or 0))


def chosen_models(recipe: Recipe, num_keys: Sequence[int], kinds: Sequence[str]) -> list[Variant]:
    """`variants` for the command line, where empty `kinds` means all that the recipe allows: no model with memories if
    it has none, and no MemoryFormer if its width does not allow one, or its own memories are in place of maps.
    """
    memories = recipe.model.memories
    possible = {"memory": bool(memories), "hash": hash_tables_fit(recipe.model)}
    kinds = [each for each in MODELS if (each in kinds if kinds else possible.get(each, True))]
    resizable = "memory" in kinds and any(memory.with_keys(1) for memory in memories.values())
    if num_keys and not resizable:
        raise UserError("--slots: no model here has a memory with sub-keys", "leave --slots out")
    return variants(recipe, vocab_size_of(recipe), num_keys, kinds)


def hash_tables_fit(model: Model) -> bool:
    """Whether a MemoryFormer of this shape can be built, and differs from the model itself."""
    try:
        HashSpec().check(model.dim)
    except SpecError:
        return False
    return not any("qkv" in places for layer in model.memory_places().values() for places in layer.values())


class RandomBatches(Batches):
    """Batches of uniformly random tokens, all targets scored: timing needs no text. All steps have the same batches."""

    def __init__(self, recipe: Recipe, vocab_size: int):
        self.vocab_size, self.context, self.batch = vocab_size, recipe.model.context, recipe.sequences

    def scored(self, step: int) -> int:
        return self.batch * self.context

    def micro_batch(self, step: int, index: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        tokens = random_tokens(self.vocab_size, size, self.context + 1, index)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def random_training(recipe: Recipe, precision: Precision) -> TrainState:
    """The training of a recipe from initial weights, on random tokens. If it chooses slots by a background, whose file
    may be gone, they are chosen by their counts instead, which takes as long.

    Args:
        recipe: with `model.vocab_size` set.
        precision: of the forward.
    """
    vocab_size, chosen = recipe.model.vocab_size or 0, recipe.finetune
    if chosen.background is not None:
        recipe = replace(recipe, finetune=replace(chosen, slots="count", background=None))
    model = build_model(recipe, vocab_size, default_device())
    return TrainState(recipe, model, RandomBatches(recipe, vocab_size), precision)


def random_tokens(vocab_size: int, sequences: int, length: int, index: int = 0) -> Tensor:
    """Uniform ids (sequences, length), int64: the same on every call, but different for each `index`."""
    return torch.randint(vocab_size, (sequences, length), generator=generator(1, "bench tokens", index))


@torch.no_grad()
def prefilled(model: Transformer, prompt_BT: Tensor) -> KVCache:
    """The cache of a model that has read a prompt."""
    cache = KVCache(model.context)
    model.hidden(prompt_BT, cache)
    return cache


@torch.no_grad()
def decode(model: Transformer, filled: KVCache, last_B1: Tensor, tokens: int) -> Tensor:
    """Continuations (B, tokens), each token the most likely one; `filled` keeps what it holds."""
    cache, found = replace(filled), []
    for _ in range(tokens):
        last_B1 = next_logits(model, last_B1, cache).argmax(-1, keepdim=True)
        found.append(last_B1)
    return torch.cat(found, 1)


@dataclass(frozen=True)
class ModelTimes:
    """Times of whole models.

    Attributes:
        times: by (what was timed, index of the model, sequences at once).
        timed: what was timed, by its name: its title, and the tokens of a sequence.
        facts: what else the JSON says.
        bandwidth: bytes per second, read and written, of a copy.
        peak: operations per second that the device can do at most in training; None: it is not known, or no training
            was timed.
    """

    models: list[Variant]
    times: dict[tuple[str, int, int], Timing]
    timed: dict[str, tuple[str, int]]
    facts: dict[str, Any]
    bandwidth: float
    peak: float | None = None

    def speed(self, what: str, model: int, batch: int) -> float:
        """Median tokens per second over all sequences of a batch."""
        return batch * self.timed[what][1] / self.times[what, model, batch].median

    def mfu(self, model: int) -> float | None:
        """The share of the device's peak that a model's step makes use of: the operations that its parameters ask for,
        whatever else the device does. None: the peak is not known, or the step moves only some parameters.
        """
        recipe = self.models[model].recipe
        if self.peak is None or recipe.train.only != "all":
            return None
        done = step_operations(self.models[model].cost, recipe.train.batch_tokens)
        return done / self.times["step", model, recipe.sequences].median / self.peak

    def as_json(self) -> dict[str, Any]:
        known = self.peak is not None
        found: list[dict[str, Any]] = [
            {**model.as_json(), **({"mfu": self.mfu(index)} if known else {}), "times": []}
            for index, model in enumerate(self.models)
        ]
        in_order = sorted(self.times.items(), key=lambda item: [*self.timed].index(item[0][0]))
        for (what, model, batch), timing in in_order:
            speed = {"tokens_per_second": self.speed(what, model, batch)}
            found[model]["times"].append({"what": what, "batch": batch, **speed, **timing.as_json()})
        return {"machine": machine(), **self.facts, "copy_bytes_per_second": self.bandwidth, "models": found}

    def tables(self) -> list[Table]:
        """A table of each thing that was timed, with times relative to the first model's; and, if single sequences were
        decoded, how fast one token reads the weights that it needs, beside a copy.
        """
        shared = [Column("model"), number("batch"), number("tokens/s", "{:,.0f}"), number("x first", "{:.2f}")]
        shared += [number(name, "{:,.1f}") for name in ("ms", "min", "max", "M ops", "MB read")]
        found = []
        for what, (title, _) in self.timed.items():
            used = what == "step" and self.peak is not None
            columns = [*shared, number("MFU", "{:.1%}")] if used else shared
            batches = sorted({batch for each, _, batch in self.times if each == what})
            rows = []
            for batch in batches:
                for index, model in enumerate(self.models):
                    timing = self.times[what, index, batch]
                    ratio = timing.median / self.times[what, 0, batch].median
                    sizes = [model.cost.flops_per_token / 1e6, model.read / 1e6]
                    speed = self.speed(what, index, batch)
                    share = [self.mfu(index)] if used else []
                    rows.append([model.name, batch, speed, ratio, *timing.milliseconds(), *sizes, *share])
            found.append(Table(f"{self.models[0].recipe.name}: {title}", columns, rows))
        if ("decode", 0, 1) in self.times:
            columns = [Column("model"), number("MB read", "{:,.1f}"), number("ms", "{:,.2f}")]
            columns += [number("GB/s", "{:,.1f}"), number("of a copy", "{:.0%}")]
            rows = []
            for index, model in enumerate(self.models):
                seconds = 1 / self.speed("decode", index, 1)
                speed = model.read / seconds
                rows.append([model.name, model.read / 1e6, seconds * 1e3, speed / 1e9, speed / self.bandwidth])
            copy = f"{self.bandwidth / 1e9:.1f} GB/s"
            found.append(Table(f"One token of one sequence; a copy: {copy}", columns, rows))
        return found
