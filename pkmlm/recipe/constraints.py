"""What must hold between a recipe's keys, and for the ranks that train it.

`schema.py` has the type and range of each key by itself. An error names the key, what was found and what was expected.
"""

import math
import re
from collections.abc import Mapping
from typing import NoReturn

from pkmlm.errors import UserError
from pkmlm.memory.spec import MAX_SLOTS, SpecError
from pkmlm.recipe.nodes import shorten
from pkmlm.recipe.schema import Model, Recipe

MAX_PARAMETERS = 2**40
TAKEN_NAMES = ("dense", "muon", "all")  # of what is no memory, and of all memories together


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
    check_attention(check, recipe)
    check_memories(check, recipe.model)
    check_sizes(check, recipe.model)
    check_training(check, recipe)
    check_finetuning(check, recipe)
    check_division(check, recipe)
    return recipe


def check_memories(check: Check, model: Model) -> None:
    """Memories have names, can be built, and do not compete for a place."""
    taken: dict[tuple[int, str], str] = {}
    for name, memory in model.memories.items():
        key = f"model.memories.{shorten(name)}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", name) or name in TAKEN_NAMES:
            expected = f"at most 40 letters, digits, _ and -, a letter first, and not {' or '.join(TAKEN_NAMES)}"
            check.fail(key, "found this name", expected)
        try:
            memory.check(model.dim)
            places = memory.layer_places(model.layers)
        except SpecError as error:
            others = (f"{key}.{other}" for other in (*error.others, "kind"))
            check.fail(f"{key}.{error.key}", error.found, error.expected, *others, "model.dim", "model.layers")
        in_heads = {"qkv", "values"}.intersection(*places.values()) if places else set()
        if in_heads and (model.value_heads < model.heads or model.heads * model.head_width != model.dim):
            message = "reads or writes heads of attention that are not dim / heads wide each, or fewer for values"
            check.fail(key, message, "model.kv_heads and model.head_dim null", "model.kv_heads", "model.head_dim")
        for layer, each in places.items():
            for place in set(each) & {"qkv", "ffn"}:
                if (other := taken.setdefault((layer, place), name)) != name:
                    what = "FFN" if place == "ffn" else "maps to queries, keys and values"
                    found = f"takes the place of the {what} of layer {layer}, and so does model.memories.{other}"
                    check.fail(f"{key}.layers", found, "one of the two there", f"{key}.kind")


def check_division(check: Check, recipe: Recipe) -> None:
    """`parallel.memory` divides every table into whole columns."""
    parts, model = recipe.parallel.memory, recipe.model
    widths = {
        table.width for memory in model.memories.values() for table in memory.tables(model.dim, model.vocab_size or 1)
    }
    if parts > 1 and not widths:
        check.fail("parallel.memory", f"{parts} ranks, but the model has no table to divide", "1", "model.memories")
    common = math.gcd(*widths)
    if widths and common % parts:
        *first, last = map(str, sorted(widths))
        columns = f"{', '.join(first)} and {last}" if first else last
        found = f"{parts} ranks cannot divide tables of {columns} columns"
        check.fail("parallel.memory", found, f"a divisor of {common}", "model.dim")


def check_ranks(recipe: Recipe, ranks: int, file: str) -> None:
    """Check that a number of processes can train a recipe together.

    Args:
        file: the recipe's file, for errors.

    Raises:
        UserError: a step does not divide into whole micro-batches on every rank, the ranks do not divide into groups
            of `parallel.memory`, or a memory has more slots than ranks can exchange.
    """
    model, parts = recipe.model, recipe.parallel.memory
    rows = {
        f"model.memories.{name}.{table.key}": table.rows
        for name, memory in model.memories.items()
        for table in memory.tables(model.dim, model.vocab_size or 1)
    }
    check = Check(dict.fromkeys(("parallel.memory", "train.micro_batch", *rows), file))
    for key, count in rows.items():
        if ranks > 1 and count > MAX_SLOTS:
            check.fail(key, f"{count:,} rows in a table", f"at most {MAX_SLOTS:,} with more than one process")
    if ranks % parts:
        check.fail(
            "parallel.memory", f"{parts} does not divide the number of processes, {ranks}", f"a divisor of {ranks}"
        )
    check_micro_batches(check, recipe, ranks)


def check_micro_batches(check: Check, recipe: Recipe, ranks: int = 1) -> None:
    """The sequences of a step fall into whole micro-batches on every rank."""
    sequences, micro_batch = recipe.sequences, recipe.train.micro_batch
    if sequences % (micro_batch * ranks):
        fits = f"for example -s train.micro_batch={math.gcd(micro_batch, sequences // ranks)}"
        divisible = f"a train.batch_tokens that {micro_batch * ranks * recipe.model.context} divides"
        check.fail(
            "train.micro_batch",
            f"the {sequences} sequences of a step (train.batch_tokens / model.context) do not fall into micro-batches "
            f"of {micro_batch}" + f" on each of {ranks} processes" * (ranks > 1),
            divisible if sequences % ranks else f"a divisor of {sequences // ranks}",
            "train.batch_tokens",
            "model.context",
            hint="" if sequences % ranks else fits,
        )


def check_sizes(check: Check, model: Model) -> None:
    """Each kind of tensor has at most 2^40 parameters over all layers: more is beyond any machine."""
    sizes = {
        "model.vocab_size": (model.vocab_size or 0) * model.dim,
        "model.context": model.context * model.dim,
        "model.dim": model.layers * 4 * model.dim**2,
        "model.ffn_dim": model.layers * (model.ffn_dim or 0) * model.dim,
        "model.head_dim": model.layers * (model.head_dim or 0) * model.heads * model.dim,
    }
    if model.attention == "performer":
        sizes["model.attention_options.features"] = model.layers * model.attention_options.features * model.dim
    for name, memory in model.memories.items():
        layers = len(memory.layer_places(model.layers))
        found = memory.sizes(model.dim, model.vocab_size or 0, layers)
        sizes |= {f"model.memories.{name}.{key}": size for key, size in found.items()}
    for key, size in sizes.items():
        if size > MAX_PARAMETERS:
            expected = f"at most 2^40 = {MAX_PARAMETERS:.1e}"
            check.fail(key, f"asks for {size:.1e} parameters", expected, "model.dim", "model.layers")


def check_attention(check: Check, recipe: Recipe) -> None:
    """Heads divide the width, positions fit the heads, and the kind of attention can do what is asked for."""
    model = recipe.model
    if model.head_dim is None and model.dim % model.heads:
        message = f"{model.heads} heads do not divide model.dim {model.dim}"
        check.fail("model.heads", message, f"a divisor of {model.dim}", "model.dim")
    if model.heads % model.value_heads:
        message = f"{model.value_heads} do not divide model.heads {model.heads}"
        check.fail("model.kv_heads", message, f"a divisor of {model.heads}", "model.heads")
    if model.attention != "softmax" and model.document_mask:
        found = f"found true, but {model.attention} attention sees all that stands before"
        check.fail("model.document_mask", found, "false", "model.attention")
    if model.attention != "softmax" and model.value_heads < model.heads:
        check.fail("model.kv_heads", f"{model.attention} attention has as many as heads", "null", "model.attention")
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
        width, turned = model.head_width, model.rotary_width
        pairs = model.rotary_fraction * width / 2
        if turned < 2 or turned % 2 or abs(turned - 2 * pairs) > 1e-6:
            message = f"{model.rotary_fraction:g} of a head of {width} is {2 * pairs:g}"
            others = ("model.heads", "model.dim", "model.positions")
            check.fail("model.rotary_fraction", message, "an even width of two or more", *others)
        scaling, key = model.rotary_scaling, "model.rotary_scaling"
        if scaling.kind == "llama3" and scaling.high <= scaling.low:
            check.fail(f"{key}.high", f"{scaling.high:g}", f"more than {key}.low, {scaling.low:g}", f"{key}.low")


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
    if context * micro_batch < 2 and any(memory.keeps_statistics for memory in recipe.model.memories.values()):
        check.fail("train.micro_batch", "a batch norm of queries sees one token", "2 or more", "model.context")
    check_micro_batches(check, recipe)
    if recipe.train.compile and not recipe.data.pack:
        message = "data.pack: false gives batches of many lengths, of which torch compiles only the first few"
        check.fail("train.compile", message, "false, or data.pack: true", "data.pack")
    for prefix, group in recipe.optim_groups.items():
        if group.schedule == "inverse-sqrt" and not group.warmup_steps:
            message = "found 0 with the inverse-sqrt schedule"
            check.fail(f"{prefix}.warmup_steps", message, "1 or more", f"{prefix}.schedule")


def check_finetuning(check: Check, recipe: Recipe) -> None:
    """There are values to train, and a background where one is needed; slots that are not chosen do not move."""
    chosen, only = recipe.finetune.slots, recipe.train.only
    for key, found in (("train.only", only), ("finetune.slots", chosen)):
        if found != "all" and not recipe.model.memories:
            check.fail(key, f"found {found} in a model without a memory", "all", "model.memories")
    if only == "gates" and all(memory.gate != "token" for memory in recipe.model.memories.values()):
        check.fail("train.only", "found gates, but no memory has one", "a memory with gate: token", "model.memories")
    if only == "gates" and chosen != "all":
        check.fail("finetune.slots", f"found {chosen}, but train.only: gates moves no slot", "all", "train.only")
    for name, memory in recipe.model.memories.items():
        if chosen != "all" and memory.table_optim.optimizer == "adam":
            message, key = (
                f"adam moves every row, but finetune.slots {chosen} only some",
                f"model.memories.{name}.optim",
            )
            check.fail(f"{key}.optimizer", message, "row-adam or row-sgd", f"{key}.kind", "finetune.slots")
    if chosen in ("tfidf", "kl") and recipe.finetune.background is None:
        hint = "pkmlm usage-report RUN --split train --background FILE writes one"
        check.fail("finetune.background", f"{chosen} compares with a background", "a file", "finetune.slots", hint=hint)
