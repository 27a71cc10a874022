"""What `pkmlm cost` prints, as JSON and as tables."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pkmlm.console import Column, Table, number
from pkmlm.cost import ENTRY_BYTES, BlockCost, Cost, cost_of
from pkmlm.data.corpus import FILE, read_index
from pkmlm.errors import UserError
from pkmlm.recipe.schema import Recipe

MEGA, GIGA = 10**6, 10**9


def recipe_report(recipe: Recipe) -> tuple[dict[str, Any], list[Table]]:
    """A recipe's cost, as JSON and as tables.

    Raises:
        UserError: the vocabulary size is not known.
    """
    vocab_size = vocab_size_of(recipe)
    cost = cost_of(recipe, vocab_size)
    result = cost.as_json()
    whole = [
        ("parameters, dense (embeddings with them)", cost.dense),
        ("parameters, memory values and tables", cost.memory),
        ("parameters read per token", cost.read_per_token),
        (f"operations per token, with the head of {vocab_size:,}", cost.flops_per_token),
        (f"bytes of values and tables, at {ENTRY_BYTES} an entry", cost.memory * ENTRY_BYTES),
        ("bytes gathered from them per token", cost.gather_bytes_per_token),
    ]
    training = [(name, size / MEGA) for name, size in result["training_bytes"].items() if size]
    precision = "auto taken as fp32" if recipe.train.precision == "auto" else f"in {recipe.train.precision}"
    title = f"Memory to train, estimated: {recipe.train.micro_batch} sequences in a forward pass, {precision}"
    return result, [
        layer_table(recipe, cost),
        Table("The whole model", [Column("what"), number("number")], whole),
        Table(title, [Column("for"), number("MB", "{:,.1f}")], training),
    ]


def vocab_size_of(recipe: Recipe) -> int:
    """Rows of the embedding, from the recipe or from its tokens.

    Raises:
        UserError: neither the recipe nor its tokens give it.
    """
    if recipe.model.vocab_size is not None:
        return recipe.model.vocab_size
    folder = Path(recipe.data.folders[0]) if recipe.data.folders else None
    if folder and (folder / FILE).exists():
        return read_index(folder).vocab_size
    where = f"and there are no tokens in data.dir {folder}" if folder else "and neither is data.dir"
    raise UserError(f"model.vocab_size is not set, {where}", "add -s data.dir=DIR or -s model.vocab_size=8192")


def layer_table(recipe: Recipe, cost: Cost) -> Table:
    """What each layer costs; equal consecutive layers share a line, which gives the numbers of one of them."""
    with_paper = any(block.paper_flops is not None for block in cost.blocks)
    operations = ["GFLOP built", "w/o attn", *(["GFLOP paper", "w/o attn"] if with_paper else [])]
    columns = [Column("layers"), Column("made of"), number("dense"), number("memory")]
    columns += [number(name, "{:.3g}") for name in operations]
    rows = []
    for _, equal in groupby(cost.blocks, key=lambda block: replace(block, layer=0)):
        blocks: list[BlockCost] = list(equal)
        first, last = blocks[0], blocks[-1]
        layers = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
        own, attention = first.flops_without_attention / GIGA, first.attention_flops / GIGA
        row = [layers, " ".join(first.parts), first.dense, first.memory, own + attention, own]
        if with_paper:
            paper = None if first.paper_flops is None else first.paper_flops / GIGA
            row += [None, None] if paper is None else [paper + attention, paper]
        rows.append(row)
    model = recipe.model
    title = f"{recipe.name}: {model.layers} layers of {model.dim:,}, a sequence of {model.context:,} tokens"
    if any(table.layers > 1 for table in cost.tables):
        title += "; layers share a table"
    return Table(title, columns, rows)
