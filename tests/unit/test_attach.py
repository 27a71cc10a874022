"""A memory attached to models of transformers: what it leaves as it was, what it computes, and how it trains."""

import copy
import json
import math
import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import permutations, product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils import is_accelerate_available

import pkmlm
from pkmlm.attach.hosted import Hosted, load_host
from pkmlm.attach.places import base_parameters
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.files import write_json
from pkmlm.measure.slots import LogitLens
from pkmlm.memory.registry import SPECS

SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTARY = {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 99}
GPT2_SIZES = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**GPT2_SIZES, pad_token_id=0, bos_token_id=99, eos_token_id=99, **NO_DROPOUT)
    ),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**ROTARY)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ROTARY, num_key_value_heads=1)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**ROTARY, num_key_value_heads=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**ROTARY, num_key_value_heads=1, head_dim=16)),
}
KEYS = {"kind": "product-key", "num_keys": 16, "heads": 2, "topk": 4, "key_dim": 16}
NGRAMS = {"kind": "ngram", "orders": [2, 3], "heads": 2, "rows": 101, "row_dim": 8, "canonical": False}
MEMORIES = {
    "product-key": KEYS,
    "flat-key": {**KEYS, "kind": "flat-key", "query_norm": "layer"},
    "memory-plus": {**KEYS, "share_values": True, "gate": "silu", "key_norm": "rms", "value_dim": 24},
    "peer": {**KEYS, "kind": "peer"},
    "ngram": NGRAMS,
    "ngram-lite": {**NGRAMS, "fusion": "add", "row_dim": 32},
}
HASH = {"kind": "hash", "parts": ["ffn"], "bits": 4, "extra_bits": 1}
IN_PLACE = {
    **{name: memory for name, memory in MEMORIES.items() if memory["kind"] != "ngram"},
    "hash": HASH,
}
IDS = torch.randint(1, 99, (3, 20), generator=torch.Generator().manual_seed(0))


def base(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(1)
    return ARCHITECTURES[name]().eval()


def logits(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**{"input_ids": IDS, **inputs}).logits


def grown(attachment):
    """As training leaves it: every number changed."""
    random_ = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in attachment.module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=random_))
    return attachment


def train(model, attachment, steps=5, lr=0.01, ids=IDS):
    optimizer = attachment.optimizer(lr)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()
    return optimizer


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *product(ARCHITECTURES, ("product-key", "ngram")),
        *product(["llama"], ("flat-key", "memory-plus", "peer", "ngram-lite")),
    ],
)
def test_a_new_memory_changes_no_bit_and_a_trained_one_comes_back(name, memory, tmp_path):
    model = base(name)
    before = logits(model)
    attachment = pkmlm.attach(model, MEMORIES[memory], layers=[1, 2])
    assert torch.equal(logits(model), before)
    grown(attachment)
    after = logits(model)
    assert (after - before).abs().max() > 0.01
    attachment.save(tmp_path / "saved")
    attachment.detach()
    assert torch.equal(logits(model), before)
    assert model.state_dict().keys() == base(name).state_dict().keys()
    again = pkmlm.attach(base(name), tmp_path / "saved")
    assert torch.equal(logits(again.model), after)
    other = pkmlm.attach(model, MEMORIES[memory], layers=[1, 2], seed=7)
    other.load(tmp_path / "saved")
    assert torch.equal(logits(model), after)
    assert torch.equal(logits(copy.deepcopy(model)), after)


def test_hash_tables_in_the_place_of_the_ffn(tmp_path):
    model = base()
    before = logits(model)
    attachment = pkmlm.attach(model, HASH, layers=[1, 2], mode="replace")
    train(model, attachment)
    after = logits(model)
    assert [(each.layer, each.part) for each in attachment.usage([IDS])] == [*product((1, 2), ("ffn1", "ffn2"))]
    attachment.save(tmp_path / "saved")
    attachment.detach()
    assert torch.equal(logits(model), before)
    assert torch.equal(logits(pkmlm.attach(model, tmp_path / "saved").model), after)


def left_on(model):
    """What attaching could leave on a model: its modules, and what is set on each of them."""
    parts = {name: part for name, part in model.named_modules() if "pkmlm" not in name}
    return {
        name: {key: value for key, value in vars(part).items() if value or key[0] != "_"}
        for name, part in parts.items()
    }


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_several_attachments_are_saved_and_detached_each_by_itself(order, tmp_path):
    model = base()
    before, fresh = logits(model), left_on(model)
    hows = [
        ({"memory": KEYS, "layers": [1, 2]}, "keys"),
        ({"memory": {**KEYS, "kind": "peer"}, "layers": [2]}, "peer"),
        ({"memory": NGRAMS, "layers": [2]}, "ngrams"),
    ]
    every = [grown(pkmlm.attach(model, **how)) for how, _ in hows]
    assert [each.usage([IDS])[0].memory for each in every] == ["memory", "memory-2", "memory-3"]
    assert not any(parameter.requires_grad for _, parameter in base_parameters(model))
    after = logits(model)
    for each, (_, name) in zip(every, hows, strict=True):
        each.save(tmp_path / name)
    alone = {name: logits(pkmlm.attach(base(), tmp_path / name).model) for _, name in hows}
    for gone, number in enumerate(order):
        every[number].detach()
        assert any(parameter.requires_grad for _, parameter in base_parameters(model)) == (gone == 2)
        if gone == 1:
            assert torch.equal(logits(model), alone[hows[order[2]][1]])
    assert torch.equal(logits(model), before)
    assert left_on(model) == fresh
    for _, name in hows:
        pkmlm.attach(model, tmp_path / name)
    assert torch.equal(logits(model), after)


def test_several_attachments_train_each_by_itself():
    model = base()
    first, second = (pkmlm.attach(model, KEYS, layers=[1]) for _ in range(2))
    drawn = [
        next(each for name, each in attached.module.named_parameters() if "subkeys" in name)
        for attached in (first, second)
    ]
    assert not torch.equal(*drawn), "or one would stay a copy of the other"
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, first)
    own = {id(parameter) for parameter in first.module.parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, start[name]) == (id(parameter) not in own), name
    train(model, second)
    assert first.step == second.step == 5


def test_what_is_frozen_has_no_optimizer():
    model = base()
    attached = pkmlm.attach(model, KEYS, layers=[1])
    model.requires_grad_(False)  # as peft does when it wraps a model
    with pytest.raises(UserError, match="frozen"):
        attached.optimizer(1e-2)
    attached.module.requires_grad_(True)
    attached.optimizer(1e-2)


def test_two_n_gram_memories_keep_apart_what_they_have_seen():
    model = base()
    for orders in ([2, 3], [4]):
        grown(pkmlm.attach(model, {**NGRAMS, "orders": orders}, layers=[1]))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": 2}
    cached, plain = (model.generate(IDS[:, :8], use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


def test_an_ffn_is_replaced_once_and_can_have_a_memory_beside_it():
    model = base()
    replaced = grown(pkmlm.attach(model, KEYS, layers=[1], mode="replace"))
    alone = logits(model)
    with pytest.raises(UserError, match="block 1 is replaced"):
        pkmlm.attach(model, KEYS, layers=[1, 2], mode="replace")
    beside = grown(pkmlm.attach(model, KEYS, layers=[1, 2]))
    assert not torch.equal(logits(model), alone)
    replaced.detach()
    beside.detach()
    assert torch.equal(logits(model), logits(base()))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", [pkmlm.ProductKeyMemory, pkmlm.FlatKeyMemory, pkmlm.PEER])
@pytest.mark.parametrize("mode", ["add", "replace"])
def test_a_layer_that_the_user_made(kind, mode, tmp_path):
    arguments = {key: value for key, value in KEYS.items() if key != "kind"} | {"query_norm": "layer", "value_dim": 24}
    more = {"expert": "relu"} if kind is pkmlm.PEER else {}
    layer = kind(32, **arguments, **more, start="zero" if mode == "add" else "drawn")
    model, start = base(), {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    before = logits(model)
    attachment = pkmlm.attach(model, layer, layers=[2], mode=mode)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, start[name])
    assert torch.equal(logits(model), before) == (mode == "add")
    assert (layer.tap.layer, attachment.usage([IDS])[0].layer) == (2, 2)
    assert layer.tap.name == "memory"
    train(model, attachment)
    attachment.save(tmp_path / "saved")
    assert torch.equal(logits(pkmlm.attach(base(), tmp_path / "saved").model), logits(model))
    attachment.detach()
    again = pkmlm.attach(base(), layer, layers=[1])
    train(again.model, again)  # with another optimizer
    drawn = pkmlm.attach(base(), kind(32, **arguments, **more), layers=[2])
    assert not torch.equal(logits(drawn.model), before)


def test_an_n_gram_layer_that_the_user_made(tmp_path, tokens):
    arguments = {"orders": (2, 3), "heads": 2, "rows": 101, "row_dim": 8}
    layer = pkmlm.NGramMemory(32, **arguments, canonical=False)
    model = base()
    attachment = pkmlm.attach(model, layer, layers=[1])
    train(model, attachment)
    attachment.save(tmp_path / "saved")
    again = pkmlm.attach(base(), tmp_path / "saved")
    assert torch.equal(logits(again.model), logits(model))
    assert not again.module.spec.canonical
    for tokenizer, says in ((None, "need the model's tokenizer"), (tokens, "at most 100")):
        with pytest.raises(UserError, match=says):
            pkmlm.attach(base(), pkmlm.NGramMemory(32, **arguments), layers=[1], tokenizer=tokenizer)


def test_a_layer_that_does_not_fit_is_refused_and_left_alone():
    made = pkmlm.ProductKeyMemory
    small = {key: value for key, value in KEYS.items() if key != "kind"} | {"query_norm": "rms"}
    for layer, layers, says in (
        (made(32, **small), [1, 2], "one block"),
        (made(16, **small), [1], "width 16"),
        (pkmlm.TokenMemory(32, vocab_size=16), [1], "has 16 rows (expected 100"),
        (made(32, **{**small, "query_norm": "batch"}), [1], "padding"),
        (made(32, **small).bfloat16(), [1], "bfloat16"),
        (pkmlm.HashLayer(32, 32, bits=4), [1], "kind hash takes the place of qkv and ffn"),
    ):
        model = base()
        fresh = left_on(model)
        with pytest.raises(UserError) as error:
            pkmlm.attach(model, layer, layers=layers)
        assert says in error.value.message + error.value.hint
        assert left_on(model) == fresh
        assert layer.tap.layer == 1


def test_threads_and_nested_calls_keep_their_ids():
    model = base()
    grown(pkmlm.attach(model, NGRAMS, layers=[1, 2]))
    texts = [IDS[row : row + 1] for row in range(3)]
    alone = [logits(model, input_ids=ids) for ids in texts]
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda number: logits(model, input_ids=texts[number % 3]), range(60))]
    assert all(torch.equal(each, alone[number % 3]) for number, each in enumerate(found))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = [model.generate(ids, **options) for ids in texts]
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda number: model.generate(texts[number % 3], **options), range(6))]
    assert all(torch.equal(each, written[number % 3]) for number, each in enumerate(found))
    inner = []

    def call_again(*_):
        if not inner:
            inner.append(None)
            inner.append(logits(model, input_ids=texts[1]))

    hook = model.model.layers[0].register_forward_hook(call_again)
    assert torch.equal(logits(model, input_ids=texts[0]), alone[0])
    hook.remove()
    assert torch.equal(inner[1], alone[1])


def replica_of(model):
    """As torch's DataParallel makes one for each GPU: modules of their own, with the hooks of the original's."""
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for name, child in module.named_children():
            replica._modules[name] = replicas[child]
        for name, tensor in module._parameters.items():
            replica.__dict__[name] = tensor if tensor is None else tensor.detach().clone()
    return replicas[model]


@pytest.mark.parametrize(
    ("memory", "mode"), [(KEYS, "add"), (KEYS, "replace"), (NGRAMS, "add"), ({"kind": "token"}, "add")]
)
def test_replicas_of_data_parallel_are_refused(memory, mode):
    """They would read, and train, the tables of the original."""
    model = base()
    assert torch.equal(logits(replica_of(model)), logits(model))
    grown(pkmlm.attach(model, memory, layers=[1], mode=mode))
    expected = logits(model)
    with pytest.raises(UserError, match="DataParallel"):
        logits(replica_of(model))
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(("memory", "mode"), [(KEYS, "add"), (KEYS, "replace"), (NGRAMS, "add")])
def test_copies_of_a_model_are_apart(memory, mode, tmp_path):
    model = base()
    before, attachment = logits(model), grown(pkmlm.attach(model, memory, layers=[1], mode=mode))
    expected = logits(model)
    torch.save(model, tmp_path / "whole.pt")
    assert torch.equal(logits(torch.load(tmp_path / "whole.pt", weights_only=False)), expected)
    copied = copy.deepcopy(attachment)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(copied.model), expected)
    copied.detach()
    assert torch.equal(logits(copied.model), before)
    assert torch.equal(logits(model), expected)


class Wrapped(nn.Module):
    """A block as libraries wrap it, to recompute or to shard it."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **options):
        return self.block(*args, **options)


def replace_mlp(blocks):
    blocks[0].mlp = copy.deepcopy(blocks[1].mlp)


def swap(blocks):
    blocks[0], blocks[1] = blocks[1], blocks[0]


def replace_block(blocks):
    blocks[0] = base().model.layers[0]


@pytest.mark.parametrize(
    ("memory", "mode", "change"),
    [
        *product([KEYS], ["add", "replace"], [swap, replace_block, replace_mlp]),
        *product([NGRAMS], ["add"], [swap, replace_block]),
    ],
)
def test_blocks_that_were_changed_after_attaching_are_refused(memory, mode, change):
    """The model would run without the memory."""
    model = base()
    attachment = grown(pkmlm.attach(model, memory, layers=[1], mode=mode))
    expected = logits(model)
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = Wrapped(block)
    assert torch.equal(logits(model), expected)
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = block.block
    change(model.model.layers)
    with pytest.raises(UserError, match=r"block 1 .*replaced"):
        logits(model)
    attachment.detach()
    logits(model)


@pytest.mark.parametrize("left", [0, 1])
def test_a_block_that_was_cut_off_after_attaching_is_refused(left):
    model = base()
    attachment = pkmlm.attach(model, KEYS, layers=[2])
    kept = model.model.layers
    model.model.layers = kept[:1] if left else None
    with pytest.raises(UserError, match=r"block 2 .*replaced"):
        logits(model)
    model.model.layers = kept
    attachment.detach()


@pytest.mark.parametrize("memory", [KEYS, NGRAMS, {"kind": "token"}])
def test_new_tokens_after_attaching(memory):
    """A memory that reads the stream knows no tokens; another has rows, or ids, for those that there were."""
    model = base()
    grown(pkmlm.attach(model, memory, layers=[1]))
    expected = logits(model)
    if memory is not KEYS:
        with pytest.raises(UserError, match=r"input_ids has ids from 7 to 100 \(expected 0 to 99"):
            logits(model, input_ids=IDS + 4)
    model.resize_token_embeddings(105, mean_resizing=False)
    with nullcontext() if memory is KEYS else pytest.raises(UserError, match=r"105 tokens \(expected 100"):
        torch.testing.assert_close(logits(model)[..., :100], expected)
        assert logits(model, input_ids=IDS + 4).isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("memory", [KEYS, NGRAMS])
def test_a_layer_on_another_device_than_its_block(memory):
    model = base()
    grown(pkmlm.attach(model, memory, layers=[1]))
    expected = logits(model)
    kept = model.pkmlm
    del model.pkmlm
    model.cuda()
    model.add_module("pkmlm", kept)
    torch.testing.assert_close(logits(model, input_ids=IDS.cuda()).cpu(), expected, atol=1e-4, rtol=1e-4)


def test_an_interrupted_call_leaves_no_ids():
    model = base()
    grown(pkmlm.attach(model, NGRAMS, layers=[1]))
    expected = logits(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    hook.remove()
    with pytest.raises(UserError, match="apart from its model"):
        model.model.layers[0](torch.zeros(3, 20, 32))
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("memory", ["ngram", "ngram-lite"])
@pytest.mark.parametrize("rows", [1, 2])
def test_n_grams_do_not_reach_over_positions_that_start_again(memory, rows):
    model = base()
    grown(pkmlm.attach(model, MEMORIES[memory], layers=[1, 2]))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = logits(model, input_ids=IDS[:rows], position_ids=positions, use_cache=False)
    parts = [logits(model, input_ids=ids, use_cache=False) for ids in IDS[:rows].split([8, 12], 1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), atol=2e-5, rtol=1e-4)
    whole = logits(model, input_ids=IDS[:rows], use_cache=False)
    assert (packed - whole)[:, 8:].abs().max() > 1e-3


def test_saving_the_network_warns_and_the_memory_can_be_brought_back(tmp_path):
    model = base()
    attachment = grown(pkmlm.attach(model, KEYS, layers=[1, 2]))
    expected = logits(model)
    with pytest.warns(UserWarning, match="attached"):
        model.save_pretrained(tmp_path / "whole")
    with pytest.warns(UserWarning, match="attached"):
        model.base_model.save_pretrained(tmp_path / "body")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(logits(back), logits(base()))
    again = pkmlm.attach(back, KEYS, layers=[1, 2])
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    name = "pkmlm.memory."
    own = {key.removeprefix(name): tensor for key, tensor in stored.items() if key.startswith(name)}
    again.module.load_state_dict(own)
    assert torch.equal(logits(back), expected)
    attachment.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "alone")
        model.base_model.save_pretrained(tmp_path / "alone")


def test_weights_in_few_bits_do_not_say_in_which_numbers_a_block_computes():
    model = base()
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight.to(torch.int8), requires_grad=False)
    attachment = pkmlm.attach(model, KEYS, layers=[1])
    assert attachment.module.places["1"].layer.values.weight_KD.dtype == torch.float32


def test_a_device_without_kernels_is_refused(tmp_path):
    pkmlm.attach(base(), KEYS, layers=[1]).save(tmp_path / "saved")
    with pytest.raises(UserError, match="device mps is not supported"):
        pkmlm.load_run(tmp_path / "saved", device="mps", base=tmp_path)


def test_a_pool_is_on_one_device():
    model = base()
    model.model.layers[1].to("meta")
    with pytest.raises(UserError, match="cpu and meta"):
        pkmlm.attach(model, {**KEYS, "share_values": True}, layers=[1, 2])
    pkmlm.attach(model, KEYS, layers=[1, 2])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_memory_in_the_place_of_the_ffn(name):
    model = base(name)
    before = logits(model)
    attachment = pkmlm.attach(model, KEYS, layers=[2], mode="replace")
    ffn = model.base_model.h[1].mlp if name == "gpt2" else model.base_model.layers[1].mlp
    replaced = logits(model)
    with torch.no_grad():  # the FFN is not in the way of the result
        for parameter in ffn.parameters():
            parameter.add_(1.0)
    assert torch.equal(logits(model), replaced)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.sub_(1.0)
    x_BTD = torch.randn(2, 3, 32)
    assert torch.equal(ffn(x_BTD), attachment.module.places["2"].layer(x_BTD))
    attachment.detach()
    torch.testing.assert_close(logits(model), before)
    own = ffn.forward
    ffn.forward = lambda x: 2 * own(x)  # as libraries patch a single module
    doubled = logits(model)
    pkmlm.attach(model, KEYS, layers=[2], mode="replace").detach()
    assert torch.equal(logits(model), doubled)
    assert not torch.allclose(doubled, before)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("memory", ["product-key", "ngram"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generation_with_a_cache_is_that_without(name, memory, beams):
    model = base(name)
    grown(pkmlm.attach(model, MEMORIES[memory], layers=[1, 2]))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, :5] = 0  # the second text is padded on the left
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": beams}
    cached, plain = (
        model.generate(IDS[:2, :8] * mask, attention_mask=mask, use_cache=use, **options) for use in (True, False)
    )
    assert cached.shape == (2, 20)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *product(ARCHITECTURES, ({**KEYS, "query_norm": "rms"}, NGRAMS)),
        *product(["llama"], ({**KEYS, "query_norm": norm} for norm in ("layer", "none"))),
    ],
)
def test_padding_on_the_left_does_not_leak(name, memory):
    model = base(name)
    grown(pkmlm.attach(model, memory, layers=[1, 2]))
    lengths = [20, 13, 5]
    mask = torch.stack([torch.arange(20) >= 20 - length for length in lengths]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = logits(model, input_ids=IDS * mask, attention_mask=mask, position_ids=positions)
    for row, length in enumerate(lengths):
        alone = logits(model, input_ids=IDS[row : row + 1, 20 - length :])
        torch.testing.assert_close(padded[row, 20 - length :], alone[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_base_stays_frozen_to_the_bit_and_every_other_tensor_moves(memory):
    model = base()
    attachment = pkmlm.attach(model, MEMORIES[memory], layers=[1, 2])
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, attachment)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, start[name]) != name.startswith("pkmlm."), name
    assert attachment.step == 5


def test_a_base_that_is_not_frozen_trains_too_and_what_was_frozen_before_stays_so():
    model = base()
    model.model.embed_tokens.requires_grad_(False)
    attachment = pkmlm.attach(model, KEYS, layers=[2], freeze=False)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, attachment)
    still = {name for name, parameter in model.named_parameters() if torch.equal(parameter, start[name])}
    assert still == {"model.embed_tokens.weight"}
    attachment.detach()
    frozen = pkmlm.attach(model, KEYS, layers=[2])
    assert {id(p) for p in frozen.parameters()} == {id(p) for p in frozen.module.parameters()}
    frozen.detach()
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_attached_computes_in_fp32_inside_a_half_precision_base(dtype, autocast):
    model = base().to(dtype)
    attachment = grown(pkmlm.attach(model, KEYS, layers=[1]))
    exact = copy.deepcopy(attachment.module.places["1"])
    model.to(dtype).half().to(dtype)  # the base goes back and forth, what is attached loses nothing
    place = attachment.module.places["1"]
    assert {parameter.dtype for parameter in place.parameters()} == {torch.float32}
    x_BTD = torch.randn(2, 5, 32).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out_BTD = place(x_BTD)
        assert logits(model).isfinite().all()
    assert out_BTD.dtype == dtype
    assert torch.equal(out_BTD, exact(x_BTD.float()).to(dtype))


def test_the_optimizer_is_adamw_and_row_adam_and_resumes_to_the_bit():
    one, two = (base() for _ in range(2))
    first, second = (pkmlm.attach(model, KEYS, layers=[1]) for model in (one, two))
    optimizer = train(one, first, steps=3)
    # Beside: torch's AdamW for all but the values, and our RowAdam.
    values = second.module.places["1"].layer.values
    rows = pkmlm.RowAdam([values], lr=0.04)
    adamw = torch.optim.AdamW(
        [p for p in second.parameters() if p is not values.weight_KD], lr=0.01, betas=(0.9, 0.98), weight_decay=0.0
    )
    two.train()
    for _ in range(3):
        adamw.zero_grad()
        two(input_ids=IDS, labels=IDS).loss.backward()
        adamw.step()
        rows.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    state = copy.deepcopy(optimizer.state_dict())
    third = pkmlm.attach(base(), KEYS, layers=[1])
    third.module.load_state_dict(first.module.state_dict())
    resumed = third.optimizer(lr=9.0)
    resumed.load_state_dict(state)
    for model, each in ((one, optimizer), (third.model, resumed)):
        model.train()
        each.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        each.step()
    for a, b in zip(first.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.step == third.step == 4
    resumed.load_state_dict({key: part for key, part in state.items() if key != "attached_steps"})
    assert third.step == 4
    with pytest.raises(UserError, match="an optimizer already"):
        third.optimizer(lr=0.1)


def test_hooks_run_once_a_step_whatever_else_the_process_has_made():
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # torch wraps its `step`
    model = base()
    optimizer = pkmlm.attach(model, KEYS, layers=[1]).optimizer(0.1)
    ran = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert ran == ["before", "after"]


@pytest.mark.parametrize(
    "how", [{"lr": -1.0}, {"lr": "1e-3"}, {"values_lr": math.nan}, {"values_betas": (2.0, 2.0)}, {"weight_decay": -1.0}]
)
def test_impossible_settings_are_refused_and_leave_room_for_an_optimizer(how):
    attachment = pkmlm.attach(base(), KEYS, layers=[1])
    with pytest.raises(ValueError, match="is"):
        attachment.optimizer(**{"lr": 0.1, **how})
    attachment.optimizer(lr=0.1)


def test_what_was_detached_does_nothing_any_more(tmp_path):
    model = base()
    first = grown(pkmlm.attach(model, KEYS, layers=[1]))
    optimizer = first.optimizer(0.01)
    first.save(tmp_path / "first")
    first.detach()
    second = pkmlm.attach(model, tmp_path / "first")
    before = logits(model)
    for use in (
        *(first.detach, optimizer.step, lambda: first.load(tmp_path / "first"), lambda: first.save(tmp_path / "other")),
        *(lambda: first.optimizer(0.1), lambda: first.usage([IDS]), lambda: first.slots([IDS], str)),
    ):
        with pytest.raises(UserError, match="detached"):
            use()
    assert torch.equal(logits(model), before)
    assert not any(parameter.requires_grad for _, parameter in base_parameters(model))
    assert first.step == 0
    assert not (tmp_path / "other").exists()
    second.detach()
    assert torch.equal(logits(model), logits(base()))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (IDS[0], "(20,)"),
        (IDS / 2, "float32"),
        ({"labels": IDS}, "NoneType"),
        ("text", "str"),
        (IDS + 1000, "0 to 99"),
        ({"input_ids": IDS, "attention_mask": IDS[:, 1:]}, "(3, 19)"),
    ],
)
def test_a_batch_that_is_none_is_told_what_was_found(batch, says):
    attachment = pkmlm.attach(base(), KEYS, layers=[1])
    for use in (lambda: attachment.usage([batch]), lambda: attachment.slots([batch], str)):
        with pytest.raises(UserError) as error:
            use()
        assert says in error.value.message


def test_a_gradient_scaler_is_refused():
    model = base()
    optimizer = pkmlm.attach(model, KEYS, layers=[1]).optimizer(0.01)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
    with pytest.raises(UserError, match="scaled"):
        scaler.step(optimizer)


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers' Trainer needs accelerate")
def test_the_trainer_of_transformers_trains_it(tmp_path):
    ids = IDS[:1].repeat(3, 1)  # the Trainer shuffles

    def trained(by_trainer: bool):
        attachment = pkmlm.attach(base(), KEYS, layers=[1, 2])
        if not by_trainer:
            train(attachment.model, attachment, steps=4, ids=ids)
            return attachment
        optimizer = attachment.optimizer(0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        arguments = TrainingArguments(
            tmp_path, max_steps=4, per_device_train_batch_size=3, max_grad_norm=0, report_to=[], save_strategy="no"
        )
        rows = [{"input_ids": ids[0], "labels": ids[0]}] * 12
        Trainer(attachment.model, arguments, train_dataset=rows, optimizers=(optimizer, schedule)).train()
        return attachment

    one, other = trained(True), trained(False)
    assert one.step == other.step == 4
    for (name, a), b in zip(one.module.named_parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize(
    ("memory", "mode"),
    [*((memory, "add") for memory in MEMORIES.values()), *((memory, "replace") for memory in IN_PLACE.values())],
    ids=[*(f"{name}-add" for name in MEMORIES), *(f"{name}-replace" for name in IN_PLACE)],
)
def test_the_dense_control_has_as_many_operations_and_the_same_handle(memory, mode, tmp_path):
    like = pkmlm.attach(base(), memory, layers=[1, 2], mode=mode)
    model = base()
    before = logits(model)
    control = pkmlm.attach_dense(model, like=like)
    assert abs(control.flops_per_token() - like.flops_per_token()) <= 2 * 3 * 32 / 2
    assert torch.equal(logits(model), before) == (mode == "add")
    train(model, control)
    control.save(tmp_path / "control")
    again = pkmlm.attach(base(), tmp_path / "control")
    assert torch.equal(logits(again.model), logits(model))


def test_attachments_say_what_they_are():
    model = base()
    attachment = pkmlm.attach(model, KEYS, layers=[1, 2])
    train(model, attachment, steps=2)
    weights = sum(parameter.numel() for parameter in attachment.module.parameters())
    for part in ("product-key", "256 slots", "2 heads", "read 4", f"{weights:,} parameters", "1, 2", "Llama", "step 2"):
        assert part in repr(attachment)
    assert "SwiGLU" in repr(pkmlm.attach_dense(base(), like=attachment))


def test_operations_are_counted_by_hand():
    attachment = pkmlm.attach(base(), KEYS, layers=[1, 2])
    # A layer: queries 32 x (2 * 16); 2 heads of 2 * 16 sub-keys of width 8; 2 * 4 rows of width 32.
    assert attachment.flops_per_token() == 2 * (32 * 32 + 2 * 2 * 16 * 8 + 8 * 32)


def test_ddp_sums_the_tables_of_what_is_attached_next():
    model = base()
    first = pkmlm.attach(model, KEYS, layers=[1])
    first.optimizer(0.01)
    first.detach()
    pkmlm.attach(model, KEYS, layers=[1])  # trains with an optimizer that knows nothing of tables
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


def test_looking_leaves_each_part_in_its_mode():
    """A dropout that is off stays off while the rest trains."""
    model = base("gpt2").train()
    for block in model.transformer.h:
        block.mlp.dropout.eval()
    attachment = pkmlm.attach(model, KEYS, layers=[1])
    modes = [part.training for part in model.modules()]
    attachment.usage([IDS])
    assert [part.training for part in model.modules()] == modes


def test_usage_counts_what_is_no_padding():
    attachment = pkmlm.attach(base(), MEMORIES["memory-plus"], layers=[1, 2])
    mask = torch.ones_like(IDS)
    mask[0, :15] = 0
    found = attachment.usage([{"input_ids": IDS, "attention_mask": mask}, IDS])
    assert [(each.layer, each.tokens) for each in found[:2]] == [(1, 105), (2, 105)]
    assert found[0].counts_HK.sum() == 105 * 2 * 4
    assert len(found) == 3  # and the table that both share


@pytest.mark.parametrize("memory", ["product-key", "ngram"])
def test_the_strongest_slots_and_the_tokens_that_read_them(memory):
    attachment = grown(pkmlm.attach(base(), MEMORIES[memory], layers=[1, 2]))
    mask = torch.ones_like(IDS)
    mask[1, :15] = 0
    batches = [{"input_ids": IDS, "attention_mask": mask}, IDS[2:, :7]]
    found = attachment.slots(batches, lambda ids: " ".join(map(str, ids)), top=5)
    usage = attachment.usage(batches)[1]
    masses_K = usage.masses_HK.sum(0) if memory == "product-key" else usage.masses_HK.reshape(-1)
    assert [each["mass"] for each in found] == sorted(masses_K, reverse=True)[:5]
    # Beside: which ids read each slot, in the order in which they stand.
    reads = []
    tap, rows = attachment.module.places["2"].layer.tap, [IDS[0], IDS[1, 15:], IDS[2], IDS[2, :7]]
    hook = tap.register_forward_hook(lambda tap, inputs, out: reads.append(out))
    for batch, seen in zip(batches, (mask.bool(), None), strict=True):
        attachment.model(**batch) if seen is not None else attachment.model(input_ids=batch)
        reads[-1] = [each if seen is None else each[seen.flatten()] for each in reads[-1]]
    hook.remove()
    slots_NHk, weights_NHk = (torch.cat(each) for each in zip(*reads, strict=True))
    ids_N = torch.cat(rows)
    for each in found:
        weight_N = (weights_NHk * (slots_NHk == each["slot"])).sum((1, 2))
        contexts = each["contexts"]
        assert len(contexts) == min(10, int((slots_NHk == each["slot"]).any(2).any(1).sum()))
        at = [context["position"] for context in contexts]
        assert len(set(at)) == len(at)
        found_c, best_c = weight_N[at], weight_N.sort(descending=True).values[: len(at)]
        torch.testing.assert_close(found_c, best_c)
        for context in contexts:
            row = rows[context["document"]].tolist()
            assert context["token"] == str(int(ids_N[context["position"]])) == str(row[context["place"]])
            assert context["previous"] == (str(row[context["place"] - 1]) if context["place"] else "")
            assert context["after"] == " ".join(map(str, row[context["place"] + 1 :][:6]))
    # What a value says: by hand.
    layer, model = attachment.module.places["2"].layer, attachment.model
    v_D = layer.answer(torch.tensor([found[0]["slot"]]))[0].detach()
    v_D = (v_D - v_D.mean()) / v_D.var(correction=0).sqrt() * model.model.norm.weight.detach()
    logits_V = v_D @ model.lm_head.weight.detach().T
    assert found[0]["raises"][0]["token"] == str(int(logits_V.argmax()))
    assert [each["slot"] for each in attachment.slots(batches, str, layer=1, top=3)] != found[:3]
    with pytest.raises(UserError, match=r"no memory .*3"):
        attachment.slots(batches, str, layer=3)
    model = base("gpt2").train()
    model.transformer.drop.p = 0.5  # of no effect on what is measured
    attachment = grown(pkmlm.attach(model, MEMORIES[memory], layers=[1]))
    assert attachment.slots([IDS], str) == attachment.slots([IDS], str)
    assert model.training


def test_only_what_is_attached_is_saved(tmp_path):
    attachment = grown(pkmlm.attach(base(), KEYS, layers=[2]))
    attachment.save(tmp_path / "a")
    values = 256 * 32 * 4
    assert values < sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < values + 20_000
    with pytest.raises(UserError, match="not empty"):
        attachment.save(tmp_path / "a")
    attachment.save(tmp_path / "a", replace=True)
    (tmp_path / "a" / "optimizer.pt").write_text("mine")
    with pytest.raises(UserError, match=r"also holds optimizer\.pt"):
        attachment.save(tmp_path / "a", replace=True)
    assert (tmp_path / "a" / "optimizer.pt").read_text() == "mine"
    half = pkmlm.attach(base().bfloat16(), KEYS, layers=[2])
    half.save(tmp_path / "half")  # a base in bf16 and the same numbers in fp32 are one base
    pkmlm.attach(base().bfloat16().float(), tmp_path / "half")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        attachment.save(tmp_path / "weights", replace=True)


def test_another_base_a_changed_folder_and_another_memory_are_refused(tmp_path):
    attachment = grown(pkmlm.attach(base(), KEYS, layers=[2]))
    attachment.save(tmp_path / "a")
    other = base()
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-3
    before = logits(other)
    with pytest.raises(UserError, match="another network"):
        pkmlm.attach(other, tmp_path / "a")
    assert torch.equal(logits(other), before)
    assert not hasattr(other, "pkmlm")
    tabled, same, changed = (base() for _ in range(3))
    for each, code in ((tabled, 1), (same, 1), (changed, 2)):  # an export's tables in few bits are no parameters
        each.register_buffer("codes_KC", torch.tensor([code], dtype=torch.uint8))
    pkmlm.attach(tabled, KEYS, layers=[2]).save(tmp_path / "tabled")
    pkmlm.attach(same, tmp_path / "tabled")
    with pytest.raises(UserError, match="another network"):
        pkmlm.attach(changed, tmp_path / "tabled")
    with pytest.raises(UserError, match="layers is"):
        pkmlm.attach(base(), KEYS, layers=[1]).load(tmp_path / "a")
    with pytest.raises(UserError, match="topk is 4"):
        pkmlm.attach(base(), {**KEYS, "topk": 3}, layers=[2]).load(tmp_path / "a")
    for name in ("attached.safetensors", "attached.json"):
        attachment.save(tmp_path / name)
        content = bytearray((tmp_path / name / name).read_bytes())
        content[random.Random(0).randrange(len(content))] ^= 1
        (tmp_path / name / name).write_bytes(content)
        with pytest.raises(UserError, match="sha256"):
            pkmlm.attach(base(), tmp_path / name)
    for wrong in ({"mode": "replace"}, {"tokenizer": "."}, {"seed": 2}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} is"):
            pkmlm.attach(base(), tmp_path / "a", **wrong)
    for path in (tmp_path, tmp_path / "none", tmp_path / "a" / "attached.json"):
        with pytest.raises(UserError, match="not the folder of an attached memory"):
            pkmlm.attach(base(), path)
        with pytest.raises(UserError, match=r"is not empty|is a file") if path.exists() else nullcontext():
            attachment.save(path, replace=True)
    with pytest.raises(UserError, match="like is"):
        pkmlm.attach_dense(base(), like=tmp_path / "a")
    for layers in ([], 2, [3], [1, 1]):
        with pytest.raises(UserError, match="layers is"):
            pkmlm.attach_dense(base(), layers, like=attachment)
    described = json.loads((tmp_path / "a" / "attached.json").read_text())
    assert described["base"]["architecture"] == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_of_a_base_names_no_code_on_the_hub(name, tmp_path):
    (model := base(name)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for named in ("kernels-community/flash-attn2", {"": "somebody/kernels:attention"}, "flash_attention_2"):
        for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            write_json(tmp_path / "config.json", {**config, key: named})
            host = load_host(tmp_path, "float32")
            assert host.config._attn_implementation in ("sdpa", "eager")
            assert torch.equal(logits(host), logits(model))


def test_a_base_that_lacks_weights_is_refused(tmp_path):
    """Transformers would draw them, and only warn."""
    base().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.down_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lack model\.layers\.1\.mlp\.down_proj"):
        load_host(tmp_path, "float32")


@pytest.mark.parametrize(
    ("memory", "how", "says"),
    [
        ({**KEYS, "query_norm": "batch"}, {"layers": [1]}, "padding"),
        ({**KEYS, "kind": "none"}, {"layers": [1]}, ", ".join(SPECS)),
        ({**KEYS, "kind": ["peer"]}, {"layers": [1]}, ", ".join(SPECS)),
        ({**KEYS, "kind": "peer", "num_keys": 46000}, {"layers": [1, 2]}, "not enough memory"),
        ({**KEYS, "num_kyes": 3}, {"layers": [1]}, "num_kyes (did you mean num_keys?)"),
        (5, {"layers": [1]}, "memory is 5"),
        ({**KEYS, "topk": 300}, {"layers": [1]}, "topk"),
        ({**KEYS, "topk": 0}, {"layers": [1]}, "topk"),
        (KEYS, {"layers": [3]}, "from 1 to 2"),
        (KEYS, {"layers": []}, "from 1 to 2"),
        (KEYS, {"layers": 2}, "layers is 2 (expected a list"),
        (KEYS, {"layers": ["2+"]}, "from 1 to 2"),
        (KEYS, {"layers": [True]}, "from 1 to 2"),
        (KEYS, {"layers": [2, 2]}, "each block once"),
        (KEYS, {}, "layers is missing"),
        (KEYS, {"layers": [1], "mode": "beside"}, "add or replace"),
        (KEYS, {"layers": [1], "freeze": "no"}, "freeze is 'no' (expected True or False)"),
        ({**KEYS, "optim": {"lr": 1e-3}}, {"layers": [1]}, "`optimizer`"),
        ({**KEYS, "expert": "relu"}, {"layers": [1]}, "unknown key expert"),
        (KEYS, {"layers": [1], "tokenizer": "."}, "no canonical ids"),
        (HASH, {"layers": [1]}, "expected replace"),
        ({**HASH, "parts": ["qkv"]}, {"layers": [1], "mode": "replace"}, "kind hash takes the place of qkv"),
        ({**HASH, "bits": 5}, {"layers": [1], "mode": "replace"}, "a divisor of 32"),
        (NGRAMS, {"layers": [1], "mode": "replace"}, "expected add"),
        ({**NGRAMS, "rows": 100}, {"layers": [1]}, "a prime, such as 101"),
        ({**NGRAMS, "fusion": "add"}, {"layers": [1]}, "row_dim"),
        ({**NGRAMS, "topk": 3}, {"layers": [1]}, "topk"),
        ({**NGRAMS, "canonical": True}, {"layers": [1], "tokenizer": object()}, "tokenizer has type object"),
        ({**NGRAMS, "canonical": True}, {"layers": [1]}, "tokenizer=DIR"),
    ],
)
def test_what_cannot_be_attached_says_why_and_leaves_the_model_alone(memory, how, says):
    model = base()
    before = logits(model)
    with pytest.raises(UserError) as error:
        pkmlm.attach(model, memory, **how)
    assert says in error.value.message + error.value.hint
    if sys.version_info >= (3, 11):  # under a traceback, in Python
        assert getattr(error.value, "__notes__", []) == [f"hint: {error.value.hint}"] * bool(error.value.hint)
    assert torch.equal(logits(model), before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def opt() -> PreTrainedModel:
    torch.manual_seed(1)
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**SIZES, **sizes, pad_token_id=0, bos_token_id=99, eos_token_id=99)).eval()


def mamba() -> PreTrainedModel:
    torch.manual_seed(1)
    sizes = {key: value for key, value in SIZES.items() if key != "num_attention_heads"}
    return MambaForCausalLM(MambaConfig(**sizes, bos_token_id=99, eos_token_id=99, pad_token_id=0)).eval()


@pytest.mark.parametrize("make", [opt, mamba])
def test_blocks_without_an_ffn_get_what_the_hint_says(make):
    model = make()
    with pytest.raises(UserError, match=r"block 1, a \w+, has") as error:
        pkmlm.attach(model, KEYS, layers=[1])
    assert "ngram or token" in error.value.hint
    before = logits(model)
    for memory in (NGRAMS, {"kind": "token"}):
        attachment = pkmlm.attach(model, memory, layers=[1, 2])
        assert torch.equal(logits(model), before)
        grown(attachment)
        whole, options = logits(model), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        assert (whole - before).abs().max() > 0.01
        cached, plain = (model.generate(IDS[:2, :8], use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached, plain)
        unseen = attachment.detach() or model(input_ids=IDS[:, :8], use_cache=True)
        past = next(name for name in ("cache", "past_key_values") if name in unseen)  # until transformers 5.23
        attachment = pkmlm.attach(model, memory, layers=[1])
        with pytest.raises(UserError, match=r"holds .* of which the memory has seen 0"):
            logits(model, input_ids=IDS[:, 8:9], **{past: unseen[past]})
        with pytest.raises(UserError, match="cache is a tuple"):
            logits(model, input_ids=IDS, **{past: ((),)})
        attachment.detach()


def test_a_recurrent_state_that_is_no_cache_is_refused():
    """The memory could not see the tokens before."""
    sizes = {key: value for key, value in SIZES.items() if key != "num_attention_heads"}
    model = RwkvForCausalLM(RwkvConfig(**sizes, bos_token_id=99, eos_token_id=99, pad_token_id=0)).eval()
    attachment = pkmlm.attach(model, NGRAMS, layers=[1])
    whole = model(input_ids=IDS, use_cache=True)
    with pytest.raises(UserError, match="cache is a list") as error:
        logits(model, input_ids=IDS[:, :1], state=whole.state)
    assert "use_cache=False" in error.value.hint
    attachment.detach()
    logits(model, input_ids=IDS[:, :1], state=whole.state)


def bloom() -> PreTrainedModel:
    torch.manual_seed(1)
    config = BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=2, bos_token_id=99, eos_token_id=99)
    return BloomForCausalLM(config).eval()


def test_beside_an_ffn_that_adds_the_residual_itself(tmp_path):
    model = bloom()
    with pytest.raises(UserError, match="takes residual") as error:
        pkmlm.attach(model, KEYS, layers=[1], mode="replace")
    assert "mode='add'" in error.value.hint
    before, mlp = logits(model), model.transformer.h[1].mlp
    attachment = pkmlm.attach(model, KEYS, layers=[2])
    assert torch.equal(logits(model), before)
    train(model, grown(attachment))
    after, (x, residual) = logits(model), torch.randn(2, 1, 5, 32).unbind()
    torch.testing.assert_close(mlp(x, residual=residual), mlp.forward(x, residual) + attachment.module.places["2"](x))
    torch.testing.assert_close(mlp(hidden_states=x, residual=residual), mlp(x, residual))
    attachment.save(tmp_path / "saved")
    assert torch.equal(logits(pkmlm.attach(bloom(), tmp_path / "saved").model), after)


def test_a_model_that_is_not_understood_is_told_what_was_found():
    with pytest.raises(UserError, match="config"):
        pkmlm.attach(nn.Linear(3, 3), KEYS, layers=[1])
    two = base()
    two.extra = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(UserError, match=r"model.layers of 2, extra of 2"):
        pkmlm.attach(two, KEYS, layers=[1])


def stream_of(model, attachment, ids):
    """What the n-gram memory of layer 1 adds, of a model whose stream there knows of no other token."""
    found = []
    hook = attachment.module.places["1"].register_forward_hook(lambda place, inputs, out: found.append(out))
    logits(model, input_ids=ids)
    hook.remove()
    return found[0]


def test_n_grams_do_not_reach_over_the_token_that_begins_a_document():
    model = base()
    model.config.bos_token_id = 7
    attachment = grown(pkmlm.attach(model, {**NGRAMS, "orders": [2, 4]}, layers=[1]))
    for begin, closed in ((99, True), (7, True), (8, False), (0, False)):  # of which the config names two
        one, other = IDS[:1].clone(), IDS[1:2].clone()
        one[0, 10], other[0, 10] = begin, begin
        one[0, 11:] = other[0, 11:]
        a, b = (stream_of(model, attachment, ids)[0] for ids in (one, other))
        assert torch.equal(a[10:], b[10:]) == closed
        assert not torch.equal(a[9], b[9])
    found = attachment.module.token_ids.ids_V.tolist()
    assert [token for token, each in enumerate(found) if each == 0] == [7, 99]
    assert len(set(found)) == 99  # token 0 is a word like any other


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_n_grams_are_read_on_from_a_cache_and_never_guessed(name):
    model = base(name)
    unseen = model(input_ids=IDS[:, :8], use_cache=True)
    attachment = grown(pkmlm.attach(model, NGRAMS, layers=[1, 2]))
    whole = logits(model)
    cache, parts, past = None, [], "cache" if "cache" in unseen else "past_key_values"  # until transformers 5.23
    for ids in IDS.split([8, 1, 7, 4], 1):
        with torch.no_grad():
            found = model(input_ids=ids, use_cache=True, **{past: cache})
        parts.append(found.logits)
        cache = found[past]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)
    with pytest.raises(UserError, match="holds 8 positions, of which the memory has seen 0"):
        logits(model, input_ids=IDS[:, 8:], **{past: unseen[past]})
    with pytest.raises(UserError, match="input_ids is None"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(UserError, match="attention_mask is"):
        logits(model, attention_mask=torch.ones(3, 1, 20, 20, dtype=torch.bool))
    with pytest.raises(UserError, match="a StaticCache"):
        model.generate(IDS[:, :8], cache_implementation="static", max_new_tokens=2, disable_compile=True)
    attachment.detach()
    model(inputs_embeds=torch.zeros(1, 3, 32))


def test_n_grams_in_a_model_whose_head_calls_an_inner_network():
    model = opt()
    grown(pkmlm.attach(model, NGRAMS, layers=[2]))
    whole, past, parts = logits(model), None, []
    for ids in IDS.split([8, 1, 11], 1):
        with torch.no_grad():
            found = model(input_ids=ids, use_cache=True, past_key_values=past)
        parts.append(found.logits)
        past = found.past_key_values
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)


HOSTS = {
    **ARCHITECTURES,
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**ROTARY, num_key_value_heads=1, head_dim=16)),
    "olmo": lambda: OlmoForCausalLM(OlmoConfig(**ROTARY)),
}


@pytest.mark.parametrize("name", HOSTS)
def test_the_lens_is_the_hosts_norm_and_head_of_a_large_value(name):
    torch.manual_seed(1)
    model = HOSTS[name]().eval()
    attachment = grown(pkmlm.attach(model, KEYS, layers=[1]))
    hosted, memory = Hosted(model), attachment.module.places["1"].layer
    slots = torch.arange(0, 256, 37)
    found = LogitLens(hosted, memory, 100, str).logits(slots)
    body, final = model.base_model, []
    hook = hosted.norm.register_forward_hook(lambda norm, inputs, out: final.append(out))
    body(input_ids=IDS)
    hook.remove()
    assert len(final) == 1, "the norm that the host calls last, once a forward"
    with torch.no_grad():
        at = hosted.norm(1e4 * memory.answer(slots)) - hosted.norm(torch.zeros(1, 32))
        said = model.get_output_embeddings()(at)
    torch.testing.assert_close(found, said - said.mean(1, keepdim=True), atol=1e-4, rtol=1e-3)
    assert found.std() > 1e-3


def test_more_groups_of_parameters_leave_the_tables_theirs():
    model = base()
    attachment = pkmlm.attach(model, KEYS, layers=[1])
    optimizer = attachment.optimizer(lr=0.01)
    optimizer.add_param_group({"params": [*model.model.norm.parameters()], "lr": 1e-9})
    values = attachment.module.places["1"].layer.values.weight_KD
    before = values.detach().clone()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert (values - before).abs().max() > 1e-3


def test_n_grams_and_gradient_checkpointing():
    def gradients(checkpoints):
        model = base()
        attachment = grown(pkmlm.attach(model, NGRAMS, layers=[1, 2]))
        if checkpoints:
            model.gradient_checkpointing_enable()
        grown(pkmlm.attach(model, KEYS, layers=[1]))
        model.train()
        with pkmlm.UsageCounters(model) as reads:
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        assert [each.tokens for each in reads.memories()] == [60] * 3
        return model, [parameter.grad for parameter in attachment.parameters()]

    (model, again), (_, plain) = gradients(True), gradients(False)
    for one, other in zip(again, plain, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="apart from its model"):  # as transformers before 5.24 let it run again
        model.model.layers[0](torch.zeros(1, 2, 32))


def test_an_n_gram_memory_computes_in_fp32_inside_a_half_precision_base():
    model = base().bfloat16()
    attachment = grown(pkmlm.attach(model, NGRAMS, layers=[1, 2]))
    model.half().bfloat16()
    assert {parameter.dtype for parameter in attachment.module.parameters()} == {torch.float32}
    out = {}
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out[autocast] = stream_of(model, attachment, IDS)
    assert out[True].dtype == torch.bfloat16
    assert torch.equal(out[True], out[False])


def test_canonical_ids_are_those_of_the_models_tokenizer(tmp_path, tokens):
    own = Tokenizer.load(tokens / "tokenizer.model")
    config = LlamaConfig(**{**ROTARY, "vocab_size": own.size + 3, "eos_token_id": own.eos}, num_key_value_heads=1)
    memory = {**NGRAMS, "canonical": True}
    model = LlamaForCausalLM(config)
    attachment = pkmlm.attach(model, memory, layers=[1], tokenizer=tokens)
    found = attachment.module.token_ids.ids_V
    one, other = (own.encode(text)[0] for text in ("The", "the"))
    assert one != other
    assert found[one] == found[other]
    assert found[own.eos] == 0
    grown(attachment).save(tmp_path / "memory")
    attachment.detach()
    again = pkmlm.attach(copy.deepcopy(model), tmp_path / "memory")  # without the tokenizer
    assert torch.equal(again.module.token_ids.ids_V, found)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.model").write_bytes(own.model_bytes)
    beside = pkmlm.attach(LlamaForCausalLM.from_pretrained(tmp_path / "model"), memory, layers=[1])
    assert torch.equal(beside.module.token_ids.ids_V, found)
    with pytest.raises(UserError, match="at most 100, as in the model"):
        pkmlm.attach(base(), memory, layers=[1], tokenizer=tokens / "tokenizer.model")
    nameless = base()
    nameless.config.eos_token_id = nameless.config.bos_token_id = None
    with pytest.raises(UserError, match="names no token"):
        pkmlm.attach(nameless, NGRAMS, layers=[1])


def test_a_gate_lets_each_token_decide():
    model = base()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        attachment = pkmlm.attach(model, KEYS | {"gate": "token"}, layers=[1])
        assert torch.equal(model(input_ids=IDS).logits, before)
        place = attachment.module.places["1"]
        place.layer.values.weight_KD.normal_()
        ungated = model(input_ids=IDS).logits
        assert not torch.equal(ungated, before)
        place.gate.map.bias.fill_(-50.0)
        torch.testing.assert_close(model(input_ids=IDS).logits, before)
    with pytest.raises(UserError, match="start"):
        pkmlm.attach(model, KEYS | {"start": "zero"}, layers=[2])
