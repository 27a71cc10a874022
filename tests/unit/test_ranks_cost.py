"""What several ranks need and send: formulas by hand. (What the engine sends: tests/distributed/test_cost.py.)"""

from dataclasses import replace
from pathlib import Path

import pytest

from pkmlm.model.cost import cost_of
from pkmlm.model.ranks_cost import bytes_held, bytes_sent, divisions, exchange_bytes, most_keys, rank_cost
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Hash, Memory, Model, Parallel, Recipe, Train

KEYS = Memory(kind="product-key", layers=("2",), num_keys=1024, heads=4, topk=32, key_dim=128, query_norm="layer")
# A memory of 2^20 slots, 512 wide; 8,192 tokens a step; 4 * 32 reads of a token.
MILLION = Recipe(model=Model(dim=512, layers=2, heads=8, memory=KEYS), train=Train(batch_tokens=8192, micro_batch=4))
HASHED = Recipe(
    model=Model(dim=64, layers=1, heads=4, context=64, projections="hash", hash=Hash(bits=8, extra_bits=2)),
    train=Train(batch_tokens=512, micro_batch=1),
)


def test_a_million_slots_of_512_by_hand():
    cost = cost_of(MILLION, 1000)
    alone, halves = (bytes_sent(MILLION, cost, 2, memory) for memory in (1, 2))
    assert alone == {
        "dense": 4 * cost.dense,
        "reads": 0,
        "gradients": 4096 * (128 * 8 + 512 * 4),  # one other rank; slots and weights of reads, gradients of outputs
        "statistics": 0,
    }
    # 4,096 tokens: slots, weights and their gradients; outputs and their gradients, half of which stay.
    assert halves["reads"] == 4096 * (128 * 12 + 2 * 256 * 4)
    assert halves["gradients"] == 0
    dense_values = 2**20 * 512 * 4
    assert halves["reads"] < 0.05 * dense_values
    assert alone["gradients"] < 0.05 * dense_values


def test_small_tables_are_summed_and_large_ones_told_read_by_read():
    assert exchange_bytes(100, 8, rows=10, width=4, ranks=4) == (3 * 100 * (64 + 16), 2 * 3 * 10 * 17 // 4)
    cost = cost_of(HASHED, 100)
    sent = bytes_sent(HASHED, cost, 4, 1)
    # qkv: 8 tables of 256 rows, 192 wide, 8 reads; ffn1: 80 wide; ffn2: 8 tables of 1,024 rows, 64 wide; 128 tokens
    reads = [3 * 128 * (8 * 8 + 4 * width) for width in (192, 80, 64)]
    rows = [2 * 3 * 8 * size * (4 * width + 1) // 4 for size, width in ((256, 192), (256, 80), (1024, 64))]
    assert sent["gradients"] == sum(map(min, zip(reads, rows, strict=True)))
    few = replace(HASHED, train=Train(batch_tokens=64 * 512, micro_batch=1))
    assert bytes_sent(few, cost_of(few, 100), 4, 1)["gradients"] == sum(rows)


def test_batch_statistics_grow_with_forwards_not_with_tokens():
    batch = replace(MILLION, model=replace(MILLION.model, memory=replace(KEYS, query_norm="batch")))
    cost = cost_of(batch, 1000)
    features = 4 * 128
    assert bytes_sent(batch, cost, 2, 1)["statistics"] == 2 * (2 * features * 4 + 2 * features * 4)  # two forwards


def test_memory_is_divided_and_reads_are_held_by_all():
    cost = cost_of(MILLION, 1000)
    assert bytes_held(MILLION, cost, 2, 1) == cost.training
    halves = bytes_held(MILLION, cost, 2, 2)
    values = 2**20 * 512
    assert cost.training["weights"] - halves["weights"] == 4 * values // 2
    assert cost.training["moments"] - halves["moments"] == 8 * values // 2
    assert cost.training["gradients"] - halves["gradients"] == 8192 * 256 * 4
    assert halves["activations"] - cost.training["activations"] == 4 * 512 * 128 * 12
    half = replace(MILLION, train=replace(MILLION.train, precision="bf16"))
    copied = cost_of(half, 1000)
    assert copied.training["weights"] - cost.training["weights"] == 2 * (cost.dense + values)
    assert copied.training["weights"] - bytes_held(half, copied, 2, 2)["weights"] == 6 * values // 2


def test_dense_parameters_are_divided_too():
    shard = replace(MILLION, parallel=Parallel(shard=True))
    cost = cost_of(shard, 1000)
    keys, blocks = 4 * 128 * 1024, sum(block.dense for block in cost.blocks)
    inside, outside = blocks - keys, 1000 * 512 + 512 * 512 + 2 * 512  # outside: embedding, positions, last norm
    assert cost.dense == blocks + outside
    whole, parts = (bytes_held(recipe, cost, 4, 2) for recipe in (MILLION, shard))
    away = inside + outside - (inside + outside) // 4
    assert whole["moments"] - parts["moments"] == 8 * away
    assert whole["gradients"] - parts["gradients"] == 4 * away
    largest = max(block.dense for block in cost.blocks)
    assert whole["weights"] - parts["weights"] == 4 * away - 4 * (outside + 2 * largest)
    assert bytes_held(shard, cost, 1, 1) == cost.training, "one rank has none to divide with"
    sent = bytes_sent(shard, cost, 2, 1)  # two forwards
    assert sent["dense"] == 2 * (3 * inside + 2 * outside) * 4 // 2 + 2 * keys * 4 // 2


def test_recomputation_keeps_the_inputs_of_blocks_and_one_block():
    cost = cost_of(MILLION, 1000)
    less = cost_of(replace(MILLION, train=replace(MILLION.train, recompute=True)), 1000)
    tokens, saved = 4 * 512, [sum(part.saved for part in block.parts) for block in cost.blocks]
    assert cost.training["activations"] == tokens * 4 * (3 * 512 + sum(saved))
    assert less.training["activations"] == tokens * 4 * (3 * 512 + 2 * 512 + max(saved))


def test_recomputation_repeats_all_but_the_last_table_of_each_block():
    """Block 2 ends with a memory: its last hash table is repeated, the last one of block 1, its like, is not."""
    model = replace(HASHED.model, layers=2, memory=replace(KEYS, num_keys=16, layers=("2+",), topk=4))
    recipe = replace(HASHED, model=model, train=replace(HASHED.train, recompute=True))
    cost = cost_of(recipe, 100)
    parts = [part for block in cost.blocks for part in block.parts if part.memory]
    last = 2 * model.dim
    outputs = 3 * sum(part.width for part in parts) - last  # sent, as gradients, and again
    slots = sum(20 * part.reads for part in parts)
    assert bytes_sent(recipe, cost, 2, 2)["reads"] == 256 * (slots + 4 * outputs // 2)


def test_every_division_that_is_possible():
    assert divisions(cost_of(MILLION, 1000), 12) == [1, 2, 4]
    assert divisions(cost_of(HASHED, 100), 32) == [1, 2, 4, 8, 16]  # 192, 80 and 64 columns
    dense = Recipe(model=Model(dim=64, layers=1, heads=4))
    assert divisions(cost_of(dense, 100), 8) == [1]


@pytest.mark.parametrize("memory", [1, 4])
@pytest.mark.parametrize("limit", [10**9, 40 * 10**9])
def test_the_largest_memory_fits_and_the_next_does_not(memory, limit):
    num_keys = most_keys(MILLION, 1000, 4, memory, limit)

    def needed(keys):
        recipe = replace(MILLION, model=replace(MILLION.model, memory=replace(KEYS, num_keys=keys)))
        return rank_cost(recipe, cost_of(recipe, 1000), 4, memory).bytes

    assert needed(num_keys) <= limit < needed(num_keys + 1)


def test_no_memory_fits_or_there_is_none():
    assert most_keys(MILLION, 1000, 1, 1, 10**6) == 0
    assert most_keys(HASHED, 100, 1, 1, 10**9) is None
    assert most_keys(MILLION, 1000, 8, 8, 10**18) == 46340  # slots are told in 31 bits


def test_a_recipe_in_half_precision_sends_half_of_its_outputs():
    half = replace(MILLION, train=replace(MILLION.train, precision="bf16"))
    full, less = (bytes_sent(recipe, cost_of(recipe, 1000), 2, 2)["reads"] for recipe in (MILLION, half))
    assert full - less == 4096 * 2 * 256 * 2


def test_the_papers_recipe_loads():
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/pkm/16-layers.yaml", ())
    assert divisions(cost_of(recipe, 1000), 8) == [1, 2, 4, 8]
