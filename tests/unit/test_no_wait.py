"""A step of training on a GPU reads no number of the device: the same code, on tensors that have no numbers.

Torch's device "meta" has shapes alone, so that each operation that would make the host wait is an error there:
`item`, `tolist`, `nonzero`, an index by a mask, a copy to the host.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.kernels import backend, matmul, ops, reference
from pkmlm.memory.row_adam import RowSGD
from pkmlm.model import loss
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.train import step
from pkmlm.train.step import TrainState, queue_step

triton = pytest.importorskip("triton", reason="triton is not installed (the CUDA kernels need it)")
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from pkmlm.kernels import cuda  # noqa: E402

KINDS = ("dense", "product-key", "flat-key", "memory-plus", "peer", "ngram", "hash", "modern", "mixed")


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that are launched, which do nothing; all that is called for CUDA is called on meta."""
    names: list[str] = []

    def note(kernel, grid):
        return lambda *arguments, **options: names.append(kernel.__name__)

    monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", note)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", note)
    monkeypatch.setattr(backend, "of", lambda x: cuda)
    monkeypatch.setattr(cuda, "SMALL_BYTES", 0)
    for sizes in (matmul.SCORES, loss.LOGITS):
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])
    monkeypatch.setattr(step, "autocast", lambda *settings: nullcontext())  # of which meta knows nothing
    monkeypatch.setattr(torch, "autocast", lambda *settings, **options: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: None)  # torch's, which refuses meta when fused
    return names


def state_of(recipe) -> TrainState:
    corpus = Corpus(recipe.data.dir, "train")
    return TrainState(recipe, build_model(recipe, corpus.vocab_size, "meta"), Batches.of(corpus, recipe), "fp32")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_nothing(tmp_path, write_recipe, launched, kind):
    state = state_of(load_recipe(write_recipe(tmp_path, kind), ["train.micro_batch=4", "model.dropout=0.1"]))
    for number in (1, 2):
        taken = queue_step(state, number)
    assert ("_row_adam" in launched) is ("_squared_norms" in launched) is (kind != "dense")
    assert ("_bucket_reads" in launched) is ("_bucket_gradient" in launched) is (kind in ("hash", "mixed"))
    with pytest.raises(RuntimeError):  # so it would be if a step read
        taken.result()


@pytest.mark.parametrize(
    "keys",
    [
        ("train.micro_batch=1",),  # reads are folded into sums of rows
        ("train.micro_batch=1", "model.memories.pkm.optim.optimizer=adam"),
        ("model.memories.pkm.optim.optimizer=row-sgd",),
        ("train.recompute=true",),
        ("model.kv_heads=1", "model.document_mask=true"),
        ("train.only=values",),
        ("model.memories.pkm.query_norm=layer", "optim.clip=0"),
    ],
)
def test_nor_does_it_in_other_ways_to_train(tmp_path, write_recipe, launched, keys):
    state = state_of(load_recipe(write_recipe(tmp_path, "product-key"), list(keys)))
    for number in (1, 2):
        queue_step(state, number)
    assert ("_row_sgd" if isinstance(state.param_groups[-1].optimizer, RowSGD) else "_row_adam") in launched


def test_rows_that_many_tokens_read_are_summed_once(tmp_path, write_recipe, launched):
    """In both blocks the tables of 4 bits, not those of 6: 256 tokens read 16 or 64 buckets."""
    state = state_of(load_recipe(write_recipe(tmp_path, "hash"), ["train.micro_batch=8"]))
    queue_step(state, 1)
    assert [launched.count(name) for name in ("_segment_add", "_squared_norms", "_row_adam")] == [4, 6, 6]


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_in_8_and_4_bits_read_nothing(launched, bits):
    table = reference.quantize(torch.zeros(20, 5, device="meta"), bits)
    slots, weights = torch.zeros(2, 3, dtype=torch.int64, device="meta"), torch.zeros(2, 3, device="meta")
    out = ops.quantized_row_sum(table, slots, weights)
    assert ops.quantized_row_products(table, out, slots).shape == (2, 3)
    assert launched == ["_quantized_row_sum", "_quantized_row_products"]


def test_a_layer_without_an_optimizer_of_rows_reads_nothing(tmp_path, write_recipe, launched):
    """Its gradient is dense."""
    recipe = load_recipe(write_recipe(tmp_path, "peer"))
    model = build_model(replace(recipe, train=replace(recipe.train, micro_batch=4)), 64, "meta")
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model.loss(tokens, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
