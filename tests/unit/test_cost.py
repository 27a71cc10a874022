"""Costs: the papers' numbers to the printed digit, and the built model's own count."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pkmlm.cost import Cost, attention_flops, bytes_held, cost_of, row_gradient_bytes
from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.layer import HashLayer
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.peer.spec import PEERSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import Spec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.constraints import check_recipe
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import AttentionOptions, Parallel, Recipe, Train
from tests.conftest import model_2019, recipe_2019

RECIPES = Path(__file__).parents[2] / "recipes"
GIGA, MEGA = 1e9, 1e6


def preset(name: str, *overrides: str) -> Cost:
    recipe = load_recipe(RECIPES / name, overrides)
    assert recipe.model.vocab_size is not None
    return cost_of(recipe, recipe.model.vocab_size)


# MemoryFormer table 1, one block at 2,048 tokens, in G: by the block formula without and with attention, and
# the sum of the layers as built without attention. For MemoryFormer-small the paper prints 1.0 and 7.4, where
# its formula gives 0.91 and 7.35.
TABLE_1 = {
    "pythia/70m.yaml": (6.44, 10.74, 6.44),
    "memoryformer/tiny.yaml": (0.40, 4.70, 0.36),
    "pythia/160m.yaml": (14.50, 20.94, 14.50),
    "memoryformer/small.yaml": (0.91, 7.35, 0.80),
    "pythia/410m.yaml": (25.77, 34.36, 25.77),
    "memoryformer/base.yaml": (1.61, 10.20, 1.42),
}
PRINTED = {
    "pythia/70m.yaml": (6.4, 10.7),
    "memoryformer/tiny.yaml": (0.4, 4.7),
    "pythia/160m.yaml": (14.5, 20.9),
    "pythia/410m.yaml": (25.8, 34.4),
    "memoryformer/base.yaml": (1.6, 10.2),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_of_memoryformer(name: str) -> None:
    blocks = preset(name).as_json()["block"]
    assert all(block == {**blocks[0], "layer": number} for number, block in enumerate(blocks, 1))
    without, whole = (blocks[0]["paper"][key] / GIGA for key in ("flops_without_attention", "flops"))
    built = blocks[0]["flops_without_attention"] / GIGA
    assert (round(without, 2), round(whole, 2), round(built, 2)) == TABLE_1[name]
    if name in PRINTED:
        assert (round(without, 1), round(whole, 1)) == PRINTED[name]


def test_table_3_of_memoryformer() -> None:
    rows = {(4, 128, 512): (2.1, 0.14), (8, 64, 512): (16.8, 0.07), (10, 51, 512): (53.5, 0.05)}
    for (bits, tables, width), (megabytes, giga) in rows.items():  # the last prints 0.06 G for 0.054
        layer = HashLayer(bits * tables, width, bits=bits)
        flops = 2048 * layer.flops_per_token()
        assert (round(2 * layer.values.weight_KD.numel() / MEGA, 1), round(flops / GIGA, 2)) == (megabytes, giga)


def test_table_5_of_memoryformer() -> None:
    qkv = 64 * 2**8 * 3 * 512
    for extra, megabytes in ((0, 33.6), (1, 52.4), (2, 88.1), (3, 157.3)):
        cost = preset("memoryformer/tiny.yaml", f"model.memories.tables.extra_bits={extra}")
        block = cost.as_json()["block"][0]
        assert round((block["table_bytes"] - 2 * qkv) / MEGA, 1) == megabytes


def test_figure_1_of_memoryformer() -> None:
    shape = ["model.dim=2048", "model.heads=16"]
    ratio = [
        preset(name, *shape).as_json()["block"][0]["paper"]["flops"]
        for name in ("memoryformer/tiny.yaml", "pythia/70m.yaml")
    ]
    assert round(ratio[0] / ratio[1], 3) == 0.196


# One block of Pythia-410M in G, as built here; MemoryFormer's table 2 prints 26.1, 30.0 and 26.7.
TABLE_2 = {"linformer": 27.38, "cosformer": 26.70, "performer": 28.57}


@pytest.mark.parametrize("attention", TABLE_2)
def test_table_2_of_memoryformer(attention: str) -> None:
    block = preset(f"memoryformer/attention-{attention}.yaml").as_json()["block"][0]
    assert round(block["flops_without_attention"] / GIGA, 2) == 25.77
    assert round(block["flops"] / GIGA, 2) == TABLE_2[attention]
    assert block["paper"] is None


# Pythia's published counts: all parameters, and those beside the two embeddings, of 50,304 rows each: the 50,277 tokens
# of the GPT-NeoX tokenizer, padded to a multiple of 128.
PYTHIA = {
    "70m": (70_426_624, 18_915_328),
    "160m": (162_322_944, 85_056_000),
    "410m": (405_334_016, 302_311_424),
}


@pytest.mark.parametrize("name", PYTHIA)
def test_pythia_has_exactly_its_parameters(name: str) -> None:
    recipe = load_recipe(RECIPES / f"pythia/{name}.yaml")
    assert recipe.model.vocab_size == 50_304 == -(-50_277 // 128) * 128
    cost = cost_of(recipe, 50_304)
    assert (cost.dense, cost.dense - 2 * 50_304 * recipe.model.dim) == PYTHIA[name]
    assert cost.memory == 0


# Layers, width and memories of PKM table 1, with dense parameters and those of the values.
PKM = {
    (12, 1024, 0): (213_121_024, 0),
    (12, 1024, 1): (207_879_168, 268_435_456),
    (16, 1024, 0): (263_505_920, 0),
    (16, 1024, 2): (253_022_208, 536_870_912),
    (24, 1024, 0): (364_275_712, 0),
    (24, 1024, 1): (359_033_856, 268_435_456),
    (12, 1600, 0): (465_712_000, 0),
    (12, 1600, 1): (449_555_520, 419_430_400),
    (16, 1600, 0): (588_675_200, 0),
    (16, 1600, 1): (572_518_720, 419_430_400),
    (24, 1600, 0): (834_601_600, 0),
    (24, 1600, 1): (818_445_120, 419_430_400),
}


@pytest.mark.parametrize(("layers", "dim", "memories"), PKM)
def test_pkm_models_by_hand(layers: int, dim: int, memories: int) -> None:
    attention = 4 * (dim * dim + dim)  # q, k, v and the output, with biases
    ffn = dim * 4 * dim + 4 * dim + 4 * dim * dim + dim
    norms = 2 * 2 * dim  # two a block, each a weight and a bias
    queries = dim * 4 * 512 + 4 * 512 + 2 * 4 * 512  # 4 heads of 512: a map with its bias, and a batch norm
    keys = 4 * 2 * 512 * 256  # for each head two sets of 512 sub-keys of half a query
    blocks = layers * (attention + norms) + (layers - memories) * ffn + memories * (queries + keys)
    dense = 60_000 * dim + 512 * dim + blocks + 2 * dim  # tied embeddings, positions, blocks, the last norm
    assert (dense, memories * 512 * 512 * dim) == PKM[layers, dim, memories]
    name = f"pkm/{layers}-layers{'-1600' if dim == 1600 else ''}.yaml"
    cost = preset(name, *([] if memories else ["model.memories=null"]))
    assert (cost.dense, cost.memory) == PKM[layers, dim, memories]


def models() -> list[Recipe]:
    """A small model of each kind and option that changes the number of parameters."""
    kinds = product((None, "product-key", "flat-key"), (("qkv", "ffn"), ("qkv",)), ("linear", "mlp"))
    norms = ("batch", "layer", "rms", "none")
    found = []
    for number, (kind, parts, query) in enumerate(kinds):
        odd = number % 2 == 1
        memories: dict[str, Spec] = {}
        if kind:
            keys = {"num_keys": 6, "heads": 3, "topk": 4, "key_dim": 10, "query": query}
            memories["keys"] = SPECS[kind](layers=("1+", "3"), query_norm=norms[number % 4], **keys)
        if number % 4 > 1:
            memories["tables"] = HashSpec(bits=4, parts=parts, layers=("1", "2"))
        if number % 3 == 1:
            memories["ngrams"] = NGramSpec(layers=("1", "3"), heads=2, rows=11, row_dim=5, conv=odd)
        model = model_2019(
            dim=32,
            layers=3,
            heads=4,
            context=16,
            positions="rotary" if number % 3 else "learned",
            attention=("softmax", "linformer", "cosformer", "performer")[number % 4],
            attention_options=AttentionOptions(features=7, block=5, rank=2),
            ffn_dim=48 if number % 5 == 0 else None,
            bias="all" if odd else "none",
            tie_embeddings=number % 4 < 2,
            memories=memories,
        )
        found.append(check_recipe(recipe_2019(model=model, train=Train(batch_tokens=64, micro_batch=2))))
    return found


@pytest.mark.parametrize("recipe", models(), ids=range(12))
def test_the_built_model_has_as_many_parameters(recipe: Recipe) -> None:
    cost = cost_of(recipe, vocab_size=50)
    parameters = dict(build_model(recipe, 50, "meta").named_parameters())
    assert cost.dense + cost.memory == sum(p.numel() for p in parameters.values())
    assert cost.memory == sum(p.numel() for name, p in parameters.items() if "values" in name)


def key_memory_model(topk: int = 4, **changes: object) -> Recipe:
    pkm = ProductKeySpec(layers=("2",), num_keys=8, heads=2, topk=topk, key_dim=6)
    model = model_2019(dim=16, layers=2, heads=2, context=10, memories={"pkm": pkm}, ffn_dim=20)
    return recipe_2019(**{"model": model, "train": Train(batch_tokens=40, micro_batch=2, precision="fp32"), **changes})


def test_a_key_memory_by_hand() -> None:
    cost = cost_of(key_memory_model(), vocab_size=30)
    attention = 4 * 16 * 16
    search = 16 * 12 + 2 * 8 * 6 + 2 * 4 * 16  # the query map, two halves of 8 sub-keys of 3, 8 rows of 16
    first, second = cost.as_json()["block"]
    assert second["flops_without_attention"] == 10 * (attention + search)
    assert second["flops"] - second["flops_without_attention"] == 2 * 10 * 10 * 16
    assert first["flops_without_attention"] == 10 * (attention + 2 * 16 * 20)
    assert (first["paper"], second["paper"]) == (
        None,
        None,
    )  # an FFN of 20, and a memory: not the paper's blocks
    assert (first["table_bytes"], second["table_bytes"]) == (0, 64 * 16 * 2)
    assert cost.gather_bytes_per_token == 2 * 4 * 16 * 2
    assert cost.flops_per_token == sum(block["flops"] for block in cost.as_json()["block"]) // 10 + 30 * 16
    assert cost.read_per_token == cost.dense - 9 * 16 + 2 * 4 * 16  # tied: the embedding is read whole, as the head


def test_an_untied_model_reads_one_row_of_its_embedding() -> None:
    cost = cost_of(
        recipe_2019(model=model_2019(dim=16, layers=1, heads=2, context=10, tie_embeddings=False)), vocab_size=30
    )
    assert cost.read_per_token == cost.dense - 9 * 16 - 29 * 16


@pytest.mark.parametrize("context", [8, 64, 100, 192])
@pytest.mark.parametrize("attention", ["softmax", "linformer", "cosformer", "performer"])
def test_attention_costs_what_its_products_do(attention: str, context: int) -> None:
    """As torch counts the operations of the modules that are built; those of a fused softmax on no device alone."""
    device = "meta" if attention in ("softmax", "linformer") else "cpu"
    options = AttentionOptions(features=24, block=7, rank=3)
    model = model_2019(dim=32, layers=1, heads=4, context=context, attention=attention, attention_options=options)
    built = build_model(recipe_2019(model=model), 50, device).blocks[0].attention.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        built(torch.randn(1, context, 32, device=device), None, None)
    assert counted.get_total_flops() / 2 == 4 * context * 32 * 32 + attention_flops(model)


@pytest.mark.parametrize(
    "changes", [{}, {"query": "mlp"}, {"gate": "silu", "value_dim": 12}, {"key_norm": "rms"}], ids=str
)
@pytest.mark.parametrize("kind", ["product-key", "flat-key", "peer"])
def test_memories_cost_what_their_products_do(kind: str, changes: dict[str, object]) -> None:
    """torch counts maps and the scores of all keys; products with rows and their weighted sums are none of its own."""
    memory = SPECS[kind](layers=("1",), num_keys=8, heads=2, topk=4, key_dim=6, **changes)
    recipe = recipe_2019(model=model_2019(dim=16, layers=1, heads=2, context=40, memories={"keys": memory}))
    layer = build_model(recipe, 30).blocks[0].parts["memory_keys"]
    with FlopCounterMode(display=False) as counted:
        layer(torch.randn(1, 40, 16))
    attention, rows = 4 * 16 * 16, 2 * 4 * ((memory.value_dim or 16) + (16 if kind == "peer" else 0))
    block = cost_of(recipe, 30).blocks[0]
    assert counted.get_total_flops() / 2 == block.flops_without_attention - 40 * (attention + rows)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "ffn_dim": 20, "residual": "parallel"}])
def test_a_dense_model_costs_what_its_products_do(changes: dict[str, object]) -> None:
    recipe = recipe_2019(model=model_2019(**{"dim": 16, "layers": 2, "heads": 2, "context": 10, **changes}))
    with FlopCounterMode(display=False) as counted:
        build_model(recipe, 30, "meta")(torch.zeros(1, 10, dtype=torch.int64, device="meta"))
    assert counted.get_total_flops() / 2 == 10 * cost_of(recipe, 30).flops_per_token


@pytest.mark.parametrize(("bits", "extra"), [(4, 0), (4, 2)])
def test_hash_layers_cost_what_the_papers_formula_says(bits: int, extra: int) -> None:
    tables = HashSpec(bits=bits, extra_bits=extra)
    model = model_2019(dim=32, layers=1, heads=4, context=10, memories={"tables": tables})
    wide = 8 * (bits + extra)
    shapes = ((bits, 96), (bits, wide), (bits + extra, 32))  # tau and h; K = 8 tables, s = 10 tokens
    layers = [(8 * 2**tau * width, 10 * (tau + width) * 8) for tau, width in shapes]
    block = cost_of(recipe_2019(model=model), 30).blocks[0]
    assert block.memory == sum(parameters for parameters, _ in layers)
    assert block.flops_without_attention == sum(flops for _, flops in layers)


def test_memory_to_train_by_hand() -> None:
    recipe = key_memory_model()
    cost = cost_of(recipe, vocab_size=30)
    all_parameters = cost.dense + cost.memory
    assert cost.training["weights"] == 4 * all_parameters
    assert cost.training["moments"] == 8 * all_parameters
    tokens = recipe.train.batch_tokens
    assert cost.training["gradients"] == 4 * cost.dense + tokens * (2 * 4 * 40 + 4 * 16)
    few = key_memory_model(1, train=Train(batch_tokens=10, micro_batch=1))
    assert cost_of(few, 30).training["gradients"] == 4 * cost.dense + 10 * (2 * 40 + 4 * 16)
    assert cost.training["logits"] == 8 * 30 * (2 * 10 + 16)  # and of 512 tokens at most:
    long = cost_of(key_memory_model(train=Train(batch_tokens=1000, micro_batch=100)), vocab_size=5000)
    assert long.training["logits"] == 8 * 5000 * (512 + 16)
    assert cost.training["search"] == 4 * 2 * 10 * 2 * 8  # one head's scores of two sequences, in both halves
    many = cost_of(key_memory_model(train=Train(batch_tokens=4000, micro_batch=2, precision="fp32")), vocab_size=30)
    # One pass of 20 tokens, and twice the values: the sums of their 64 rows, and what turns into sums.
    assert many.training["gradients"] == 4 * cost.dense + 20 * (2 * 4 * 40 + 4 * 16) + 2 * 4 * 64 * 16
    # Of a rank that holds half of the columns: two ranks' tokens.
    assert row_gradient_bytes(many.blocks[1].tables[0], 4000, 20, 2) == 2 * 20 * (2 * 4 * 40 + 4 * 8) + 2 * 4 * 64 * 8


POOLED = ProductKeySpec(
    layers=("1", "2"), key_dim=64, query_norm="none", key_norm="rms", gate="silu", share_values=True
)


def test_a_pool_is_counted_once_and_read_in_each_layer() -> None:
    """128^2 slots of 64, for two layers; 4 * 32 reads of a token in each; 256 tokens per step, 64 a micro-batch."""
    recipes = []
    for shared in (True, False):
        plus = replace(POOLED, num_keys=128, share_values=shared)
        model = model_2019(dim=64, layers=3, heads=4, context=64, memories={"plus": plus})
        recipes.append(recipe_2019(model=model, train=Train(batch_tokens=256, micro_batch=1)))
    recipe, (cost, two) = recipes[0], (cost_of(each, 100) for each in recipes)
    assert (cost.memory, two.memory) == (128**2 * 64, 2 * 128**2 * 64)
    assert (cost.dense, cost.flops_per_token) == (two.dense, two.flops_per_token)
    assert cost.gather_bytes_per_token == two.gather_bytes_per_token
    assert cost.training["moments"] == 8 * (cost.dense + cost.memory)
    assert cost.training["gradients"] == two.training["gradients"] == 4 * cost.dense + 2 * 256 * (40 * 128 + 4 * 64)
    many = cost_of(replace(recipe, train=Train(batch_tokens=2**20, micro_batch=1)), 100)
    sums = 2 * 4 * 128**2 * 64  # beside which one layer's reads of one micro-batch are kept
    assert many.training["gradients"] == 4 * cost.dense + sums + 64 * (40 * 128 + 4 * 64)
    assert [block["table_bytes"] for block in cost.as_json()["block"]] == [2 * cost.memory, 2 * cost.memory, 0]


def saved_bytes(recipe: Recipe, vocab_size: int) -> int:
    """What autograd keeps of one micro-batch's forward, parameters and the loss left out."""
    model = build_model(recipe, vocab_size)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(recipe.train.micro_batch, recipe.model.context, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens)
    assert logits.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


TWO = {"layers": ("1", "2")}
BODIES = {
    "dense": {},
    "rotary": {"positions": "rotary", "rotary_fraction": 0.25},
    "hash": {"memories": {"tables": HashSpec()}},
    "product-key": {"memories": {"pkm": ProductKeySpec(**TWO, num_keys=32, key_dim=64)}},
    "flat-key": {"memories": {"flat": FlatKeySpec(**TWO, num_keys=8, key_dim=64)}},
    "memory-plus": {"memories": {"plus": replace(POOLED, num_keys=32)}},
    "peer": {"memories": {"experts": PEERSpec(**TWO, num_keys=32, key_dim=64)}},
    "ngram": {"memories": {"ngrams": NGramSpec(**TWO, rows=101)}},
    "ngram-lite": {"memories": {"ngrams": NGramSpec(**TWO, rows=101, fusion="add", row_dim=128)}},
    **{kind: {"attention": kind, "context": 256} for kind in ("linformer", "cosformer", "performer")},
}
BODIES["mixed"] = {
    "memories": BODIES["ngram"]["memories"] | BODIES["peer"]["memories"] | {"maps": HashSpec(parts=("qkv",))}
}


@pytest.mark.parametrize("body", BODIES)
def test_the_estimate_of_activations_is_near_what_autograd_keeps(body: str) -> None:
    model = model_2019(**{"dim": 128, "layers": 2, "heads": 4, "context": 64, **BODIES[body]})
    recipe = recipe_2019(model=model, train=Train(batch_tokens=4 * model.context, micro_batch=4, precision="fp32"))
    estimate = cost_of(recipe, vocab_size=64).training["activations"]
    assert estimate == pytest.approx(saved_bytes(recipe, 64), rel=0.1)


# What ranks need, by hand: a memory of 2^20 slots, 512 wide; 8,192 tokens per step; 4 * 32 reads of a token.
KEYS = ProductKeySpec(layers=("2",), num_keys=1024, heads=4, topk=32, key_dim=128, query_norm="layer")
MILLION = recipe_2019(
    model=model_2019(dim=512, layers=2, heads=8, memories={"pkm": KEYS}), train=Train(batch_tokens=8192, micro_batch=4)
)


def test_memory_is_divided_and_reads_are_held_by_all() -> None:
    cost = cost_of(MILLION, 1000)
    assert bytes_held(MILLION, cost) == cost.training
    halves = bytes_held(replace(MILLION, parallel=Parallel(memory=2)), cost)
    values = 2**20 * 512
    assert cost.training["weights"] - halves["weights"] == 4 * values // 2
    assert cost.training["moments"] - halves["moments"] == 8 * values // 2
    assert cost.training["gradients"] - halves["gradients"] == 8192 * 256 * 4
    assert halves["activations"] - cost.training["activations"] == 4 * 512 * 128 * 12
    half = replace(MILLION, train=replace(MILLION.train, precision="bf16"), parallel=Parallel(memory=2))
    copied = cost_of(half, 1000)
    assert copied.training["weights"] - cost.training["weights"] == 2 * (cost.dense + values)
    assert copied.training["weights"] - bytes_held(half, copied)["weights"] == 6 * values // 2


def test_ranks_that_train_gates_alone_hold_no_moments_of_tables() -> None:
    model = replace(MILLION.model, memories={"pkm": replace(KEYS, gate="token")})
    gates = replace(MILLION, model=model, train=replace(MILLION.train, only="gates"), parallel=Parallel(memory=2))
    cost = cost_of(gates, 1000)
    held = bytes_held(gates, cost)
    assert [held[key] for key in ("gradients", "moments")] == [4 * 513, 8 * 513]


def test_recomputation_keeps_the_inputs_of_blocks_and_one_block() -> None:
    cost = cost_of(MILLION, 1000)
    less = cost_of(replace(MILLION, train=replace(MILLION.train, recompute=True)), 1000)
    tokens, saved = 4 * 512, [block.saved for block in cost.blocks]
    assert cost.training["activations"] == tokens * 4 * (3 * 512 + sum(saved))
    assert less.training["activations"] == tokens * 4 * (3 * 512 + 2 * 512 + max(saved))
