"""What must hold between a recipe's keys, and for the ranks that train it.

`schema.py` has the type and range of each key by itself. An error names the key, what was found and what was expected.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import NoReturn

from pkmlm.errors import UserError
from pkmlm.recipe.schema import Model, Recipe

MAX_PARAMETERS = 2**40
MAX_SLOTS = 2**31  # with more than one rank: ranks exchange slot numbers as int32


class Check:
    """Fails with an error that names the place where a key was given."""

    def __init__(self, places: Mapping[str, str]):
        self.places = places

    def fail(self, key: str, message: str, expected: str, *others: str, hint: str = "") -> NoReturn:
        """Raise an error about `key`, at its place; if it was not given, at that of one of the other keys."""
        place = next((f"{self.places[name]}: " for name in (key, *others) if name in self.places), "")
        raise UserError(f"{place}{key}: {message} (expected {expected})", hint)


def check_recipe(recipe: Recipe, places: Mapping[str, str] | None = None) -> Recipe:
    """Return the recipe unchanged if everything in it can be built and trained.

    Args:
        places: dotted key -> where it was given, for the errors.

    Raises:
        UserError: something in it is not possible.
    """
    check = Check(places or {})
    if not re.fullmatch(r"\w[\w.+-]{0,99}", recipe.name):
        expected = "at most 100 letters, digits and . _ + -, not beginning with . + or -"
        check.fail("name", f"found {recipe.name!r}", expected)
    check_sizes(check, recipe.model)
    check_attention(check, recipe)
    check_training(check, recipe)
    if recipe.model.projections == "hash":
        check_hash(check, recipe.model)
        if recipe.train.compile:
            check.fail("train.compile", "hash tables leave nothing dense to compile", "false", "model.projections")
    if recipe.model.memory.kind != "none":
        check_memory(check, recipe.model)
    if recipe.model.ngram.layers:
        check_ngram(check, recipe.model)
    check_finetuning(check, recipe)
    check_division(check, recipe)
    if recipe.parallel.shard and recipe.train.compile:
        check.fail("parallel.shard", "found true with train.compile", "one of the two", "train.compile")
    if recipe.parallel.shard and recipe.train.precision == "fp16":
        check.fail("parallel.shard", "found true with train.precision fp16", "bf16 or fp32", "train.precision")
    return recipe


def check_division(check: Check, recipe: Recipe) -> None:
    """`parallel.memory` divides every table into whole columns."""
    parts, model = recipe.parallel.memory, recipe.model
    widths = set(model.table_widths)
    if model.projections == "hash":
        widths.add(model.dim)
        if has_ffn(model):
            widths.add((model.hash.bits + model.hash.extra_bits) * (model.dim // model.hash.bits))
    if model.ngram.layers:
        widths.add(model.ngram.row_dim)
    if parts > 1 and not widths:
        check.fail("parallel.memory", f"{parts} ranks, but the model has no table to divide", "1", "model.memory.kind")
    common = math.gcd(*widths)
    if widths and common % parts:
        check.fail(
            "parallel.memory",
            f"{parts} ranks cannot divide tables of {' and '.join(map(str, sorted(widths)))} columns",
            f"a divisor of {common}",
            "model.memory.value_dim",
            "model.ngram.row_dim",
            "model.dim",
        )


def check_ranks(recipe: Recipe, ranks: int, file: str) -> None:
    """Check that a number of processes can train a recipe together.

    Args:
        file: the recipe's file, for errors.

    Raises:
        UserError: a step does not divide into whole micro-batches on every rank, the ranks do not divide into groups
            of `parallel.memory`, or a memory has more slots than ranks can exchange.
    """
    check = Check(dict.fromkeys(("parallel.memory", "train.micro_batch", "model.memory.num_keys"), file))
    memory, parts = recipe.model.memory, recipe.parallel.memory
    if ranks > 1 and memory.kind != "none" and memory.slots > MAX_SLOTS:
        message = f"found {memory.num_keys}, {memory.slots:.2g} slots"
        check.fail("model.memory.num_keys", message, f"at most {math.isqrt(MAX_SLOTS)} with more than one process")
    if ranks % parts:
        check.fail(
            "parallel.memory", f"{parts} does not divide the number of processes, {ranks}", f"a divisor of {ranks}"
        )
    check_micro_batches(check, recipe, ranks)


def check_micro_batches(check: Check, recipe: Recipe, ranks: int = 1) -> None:
    """The sequences of a step fall into whole micro-batches on every rank."""
    sequences, micro_batch = recipe.sequences, recipe.train.micro_batch
    if sequences % (micro_batch * ranks):
        divisible = f"a train.batch_tokens that {micro_batch * ranks * recipe.model.context} divides"
        check.fail(
            "train.micro_batch",
            f"the {sequences} sequences of a step (train.batch_tokens / model.context) do not fall into micro-batches "
            f"of {micro_batch}" + f" on each of {ranks} processes" * (ranks > 1),
            divisible if sequences % ranks else f"a divisor of {sequences // ranks}",
            "train.batch_tokens",
            "model.context",
        )


def check_sizes(check: Check, model: Model) -> None:
    """Each kind of tensor has at most 2^40 parameters over all layers: more is beyond any machine."""
    memory = model.memory
    sizes = {
        "model.vocab_size": (model.vocab_size or 0) * model.dim,
        "model.context": model.context * model.dim,
        "model.dim": model.layers * 4 * model.dim**2,
        "model.ffn_dim": model.layers * (model.ffn_dim or 0) * model.dim,
    }
    if memory.kind != "none":
        sizes["model.memory.num_keys"] = memory.slots * sum(model.table_widths)
        sizes["model.memory.key_dim"] = memory.heads * memory.key_dim * max(memory.key_rows, model.dim)
    if model.attention == "performer":
        sizes["model.attention_options.features"] = model.layers * model.attention_options.features * model.dim
    if model.projections == "hash":
        tables, rows = model.dim // model.hash.bits, 2 ** (model.hash.bits + model.hash.extra_bits)
        sizes["model.hash.bits"] = model.layers * tables * rows * model.dim
    if model.ngram.layers:
        ngram = model.ngram
        sizes["model.ngram.rows"] = len(ngram.layers) * ngram.tables * ngram.rows * ngram.row_dim
        sizes["model.ngram.row_dim"] = len(ngram.layers) * 2 * ngram.tables * ngram.row_dim * model.dim
    for key, size in sizes.items():
        if size > MAX_PARAMETERS:
            expected = f"at most 2^40 = {MAX_PARAMETERS:.1e}"
            check.fail(key, f"asks for {size:.1e} parameters", expected, "model.dim", "model.layers")


def check_attention(check: Check, recipe: Recipe) -> None:
    """Heads divide the width, positions fit the heads, and the kind of attention can do what is asked for."""
    model = recipe.model
    if model.dim % model.heads:
        message = f"{model.heads} heads do not divide model.dim {model.dim}"
        check.fail("model.heads", message, f"a divisor of {model.dim}", "model.dim")
    if model.attention == "linformer":
        block, rank, keys = model.attention_options.block, model.attention_options.rank, "model.attention_options"
        if block >= model.context:
            message = f"a block of {block} leaves no earlier one in a context of {model.context} (model.context)"
            check.fail(f"{keys}.block", message, f"less than {model.context}", "model.context", "model.attention")
        if rank > block:  # projecting would make blocks larger
            message = f"{rank} rows for a block of {block} tokens ({keys}.block)"
            check.fail(f"{keys}.rank", message, f"at most {block}", f"{keys}.block", "model.attention")
    if model.attention != "softmax" and recipe.eval.sample is not None:
        check.fail("eval.sample", f"{model.attention} attention cannot generate", "null", "model.attention")
    if model.positions == "rotary":
        width, turned = model.dim // model.heads, model.rotary_width
        pairs = model.rotary_fraction * width / 2
        if turned < 2 or turned % 2 or abs(turned - 2 * pairs) > 1e-6:
            message = f"{model.rotary_fraction:g} of a head of {width} is {2 * pairs:g}"
            others = ("model.heads", "model.dim", "model.positions")
            check.fail("model.rotary_fraction", message, "an even width of two or more", *others)


def require_softmax(model: Model, place: str, task: str) -> None:
    """Refuse a model whose attention cannot do what was asked for: `task`, such as "generate".

    Raises:
        UserError: its attention is not softmax; `place` says whose.
    """
    if model.attention != "softmax":
        raise UserError(f"{place}: {model.attention} attention cannot {task} (expected model.attention: softmax)")


def check_training(check: Check, recipe: Recipe) -> None:
    """An optimizer step is a whole number of sequences, in whole micro-batches; learning rates are not always 0."""
    context, tokens, micro_batch = recipe.model.context, recipe.train.batch_tokens, recipe.train.micro_batch
    if tokens % context:
        check.fail(
            "train.batch_tokens",
            f"{tokens} tokens are not a whole number of sequences of {context} (model.context)",
            f"a multiple of {context}",
            "model.context",
        )
    memory = recipe.model.memory
    if memory.kind != "none" and memory.query_norm == "batch" and context * micro_batch < 2:
        check.fail("train.micro_batch", "a batch norm of queries sees one token", "2 or more", "model.context")
    check_micro_batches(check, recipe)
    for prefix, group in recipe.optim_groups.items():
        if group.schedule == "inverse-sqrt" and group.warmup_steps < 1:
            message = "found 0 with the inverse-sqrt schedule"
            check.fail(f"{prefix}.warmup_steps", message, "1 or more", f"{prefix}.schedule")
        if group.schedule == "relative" and not any(group.times):
            message = "found [0, 0], with which values never learn"
            check.fail(f"{prefix}.times", message, "one above 0", f"{prefix}.schedule")


def check_hash(check: Check, model: Model) -> None:
    """Bits of a code divide the width, and codes have at most 16 bits."""
    bits, extra = model.hash.bits, model.hash.extra_bits
    if model.dim % bits:
        message = f"{bits} bits do not divide model.dim {model.dim}"
        expected = f"a divisor of {model.dim}, at most 16"
        check.fail("model.hash.bits", message, expected, "model.dim", "model.projections")
    if bits + extra > 16:
        message = f"{bits} + {extra} bits make tables of 2^{bits + extra} rows"
        check.fail("model.hash.extra_bits", message, "at most 16 bits in all", "model.hash.bits", "model.projections")


def check_memory(check: Check, model: Model) -> None:
    """A memory's sizes fit one another, and it has a layer."""
    memory = model.memory
    if memory.topk > memory.key_rows:
        what = "num_keys" if memory.halved else "the slots"
        others = ("model.memory.num_keys", "model.memory.kind")
        check.fail("model.memory.topk", f"found {memory.topk}", f"at most {memory.key_rows}, {what}", *others)
    if memory.halved and memory.key_dim % 2:
        check.fail("model.memory.key_dim", f"{memory.key_dim} has no half for a sub-key", "an even width")
    if not memory.layers:
        check.fail(
            "model.memory.layers",
            f"no layer for the {memory.kind} memory",
            f"layers from 1 to {model.layers}, such as [{max(1, model.layers - 1)}]",
            "model.memory.kind",
            hint="without a memory: model.memory.kind: none",
        )
    memory_layers(model, check)


def check_ngram(check: Check, model: Model) -> None:
    """N-gram memories are in layers of the model; their tables have a prime number of rows, of a width that fits."""
    ngram = model.ngram
    for layer in ngram.layers:
        if layer > model.layers or ngram.layers.count(layer) > 1:
            expected = f"layers from 1 to {model.layers}, each once"
            check.fail("model.ngram.layers", f"found layer {layer}", expected, "model.layers")
    if not ngram.orders or len(set(ngram.orders)) < len(ngram.orders):
        check.fail("model.ngram.orders", f"found {list(ngram.orders)}", "one order or more, each once")
    if ngram.rows > 1 and (prime := next_prime(ngram.rows)) > ngram.rows:
        check.fail("model.ngram.rows", f"found {ngram.rows}", f"a prime, such as {prime}")
    if ngram.tables * ngram.rows > MAX_SLOTS:
        message = f"{ngram.tables} tables of {ngram.rows} rows"
        check.fail("model.ngram.rows", message, "at most 2^31 rows in a layer", "model.ngram.heads")
    if ngram.fusion == "add" and ngram.row_dim != model.dim:
        others = ("model.ngram.fusion", "model.dim")
        check.fail("model.ngram.row_dim", f"found {ngram.row_dim}, but fusion add adds rows", f"{model.dim}", *others)


def next_prime(number: int) -> int:
    """The smallest prime that is not less than `number`, which is above 1."""
    return next(n for n in itertools.count(number) if all(n % each for each in range(2, math.isqrt(n) + 1)))


def check_finetuning(check: Check, recipe: Recipe) -> None:
    """There are values to train, and a background where one is needed; slots that are not chosen do not move."""
    chosen, only = recipe.finetune.slots, recipe.train.only
    for key, found in (("train.only", only), ("finetune.slots", chosen)):
        if found != "all" and recipe.model.memory.kind == "none":
            check.fail(key, f"found {found} in a model without a memory", "all", "model.memory.kind")
    if only == "values" and recipe.eval.recalibrate:
        message = f"found {recipe.eval.recalibrate}, but train.only: values keeps all statistics"
        check.fail("eval.recalibrate", message, "0", "train.only")
    if chosen != "all" and recipe.optim.values.optimizer == "adam":
        message = f"adam moves every slot, but finetune.slots {chosen} only some"
        check.fail("optim.values.optimizer", message, "row-adam or row-sgd", "finetune.slots")
    if chosen in ("tfidf", "kl") and recipe.finetune.background is None:
        hint = "pkmlm usage-report RUN --split train --background FILE writes one"
        check.fail("finetune.background", f"{chosen} compares with a background", "a file", "finetune.slots", hint=hint)


def has_ffn(model: Model) -> bool:
    """Whether any layer has an FFN or Memory Block, rather than a memory in its place."""
    memories = memory_layers(model)
    return any(layer not in memories or memories[layer] for layer in range(1, model.layers + 1))


def memory_layers(model: Model, check: Check | None = None) -> dict[int, bool]:
    """The layers with a memory, counted from 1 and in order; the value says whether it is beside the FFN.

    `5` replaces the FFN of layer 5, `5+` adds beside it. `auto:N` spreads N memories at equal distances, over
    layers i * ceil(L / (N + 1)), i = 1 ... N, which for L = 16 and N = 2 gives 6 and 12 (PKM section 4.3); if these
    go beyond the last, over i * (L + 1) / (N + 1), rounded.
    Empty if the kind is none.

    Args:
        check: knows where the recipe gives the layers, for errors.

    Raises:
        UserError: an entry is not a layer, is beyond the model, or is given twice.
    """
    if model.memory.kind == "none":
        return {}
    check = check or Check({})
    beside: dict[int, bool] = {}
    for text in model.memory.layers:
        match = re.fullmatch(r"(auto:)?([0-9]{1,9})(\+?)", text)
        if not match:
            expected = "a layer such as 5, 5+ or auto:2, or a list: [4, 6+]"
            check.fail("model.memory.layers", f"found {text!r}", expected)
        number = int(match[2])
        layers = [number]
        if match[1]:
            if not 1 <= number <= model.layers:
                check.fail("model.memory.layers", f"found {text}", f"auto:1 to auto:{model.layers}", "model.layers")
            step = math.ceil(model.layers / (number + 1))
            layers = [i * step for i in range(1, number + 1)]
            if layers[-1] > model.layers:
                layers = [math.floor(i * (model.layers + 1) / (number + 1) + 0.5) for i in range(1, number + 1)]
        for layer in layers:
            if not 1 <= layer <= model.layers:
                expected = f"layers from 1 to {model.layers}"
                check.fail("model.memory.layers", f"found layer {layer}", expected, "model.layers")
            if layer in beside:
                check.fail("model.memory.layers", f"layer {layer} is named twice", "each layer once")
            beside[layer] = bool(match[3])
    return dict(sorted(beside.items()))
