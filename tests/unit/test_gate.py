"""`start: zero`, `gate: token`, and what moves under `train.only`."""

import pytest
import torch
from safetensors.torch import load_file

from pkmlm.errors import UserError
from pkmlm.memory.gate import Gate
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe
from tests.conftest import given, pkmlm

KEYS = "num_keys: 8, heads: 2, topk: 4, key_dim: 8"
KINDS = {
    "product-key": f"{{kind: product-key, layers: 2+, {KEYS}}}",
    "memory-plus": f"{{kind: product-key, layers: [1+, 2+], {KEYS}, gate: silu, share_values: true}}",
    "flat-key": f"{{kind: flat-key, layers: 2+, {KEYS}}}",
    "peer": f"{{kind: peer, layers: 1+, {KEYS}}}",
    "ngram": "{kind: ngram, layers: all, orders: [2], heads: 1, rows: 31, row_dim: 8}",
    "lite": "{kind: ngram, layers: all, orders: [2], heads: 1, rows: 31, row_dim: 24, fusion: add}",
    "token": "{kind: token, layers: all}",
    "values": "{kind: token, layers: 2, into: values}",
}
BASE = """name: base
model: {dim: 24, layers: 2, heads: 2, context: 16, init: small}
train: {batch_tokens: 64, micro_batch: 2}
"""


def model_of(folder, *overrides: str):
    path = folder / "base.yaml"
    path.write_text(BASE)
    recipe = load_recipe(path, overrides)
    return build_model(recipe, 50).eval()


def with_memory(kind: str, extra: str) -> str:
    return f"model.memories.facts={KINDS[kind][:-1]}, {extra}}}"


TOKENS = torch.randint(1, 50, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_what_it_was_until_its_memory_learns(kind, tmp_path):
    dense = model_of(tmp_path)
    model = model_of(tmp_path, with_memory(kind, "start: zero"))
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected
    with torch.no_grad():
        assert torch.equal(model(TOKENS), dense(TOKENS))
    new = {name: parameter for name, parameter in model.named_parameters() if name in missing}
    before = {name: parameter.detach().clone() for name, parameter in new.items()}
    for step in range(3):  # the first moves the values, the others what chooses and scales them
        model.zero_grad()
        model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        for parameter in new.values():
            parameter.data -= 0.1 / (1 + step) * parameter.grad.sign()
        if step == 0:
            tables = [name for name in new if name.endswith("values.weight_KD")]
            assert tables
            assert not [name for name in tables if torch.equal(new[name], before[name])]
    assert not [name for name in new if torch.equal(new[name], before[name])]
    with torch.no_grad():
        assert not torch.equal(model(TOKENS), dense(TOKENS))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory-plus"])
def test_a_gate_of_each_token_starts_open(kind, tmp_path):
    plain = model_of(tmp_path, f"model.memories.facts={KINDS[kind]}")
    gated = model_of(tmp_path, with_memory(kind, "gate: token"))
    missing, unexpected = gated.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert {name.partition(".gates.memory_facts.")[2] for name in missing} == {"map.weight", "map.bias"}
    with torch.no_grad():
        torch.testing.assert_close(gated(TOKENS), plain(TOKENS), rtol=0, atol=0)


def test_a_gate_multiplies_by_its_factor():
    gate, random = Gate(6), torch.Generator().manual_seed(1)
    for parameter in gate.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random)
    y, x = torch.randn(2, 3, 6, generator=random), torch.randn(2, 3, 6, generator=random)
    weight, bias = gate.map.weight[0].tolist(), gate.map.bias.item()
    expected = torch.empty_like(y)
    for b in range(2):
        for t in range(3):
            score = bias + sum(w * float(entry) for w, entry in zip(weight, x[b, t], strict=True))
            expected[b, t] = y[b, t] * 2 / (1 + torch.tensor(-score).exp())
    torch.testing.assert_close(gate(y, x), expected)
    assert gate(y.bfloat16(), x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("memory", "key"),
    [
        ("{kind: product-key, layers: 2, num_keys: 8, topk: 4, start: zero}", "start"),
        ("{kind: hash, bits: 4, start: zero}", "start"),
        ("{kind: hash, bits: 4, gate: token}", "gate"),
        ("{kind: token, layers: 2, gate: silu}", "gate"),
    ],
)
def test_what_takes_the_place_of_a_part_cannot_start_at_zero(memory, key, tmp_path):
    with pytest.raises(UserError, match=rf"facts\.{key}"):
        model_of(tmp_path, f"model.memories.facts={memory}")


@pytest.mark.parametrize("only", ["memories", "values", "gates"])
def test_only_what_is_chosen_moves(only, tokens, trained, write_recipe, tmp_path):
    start, run = trained("dense"), tmp_path / "run"
    facts = "model.memories={facts: {kind: product-key, layers: 2+, num_keys: 16, topk: 4, key_dim: 16, gate: token}}"
    settings = given(facts, f"train.init_from={start}", f"train.only={only}", "train.steps=3", "checkpoint.every=1")
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", run, *settings, *given("checkpoint.keep=4"), "-q")
    first, last = (load_file(run / f"checkpoints/step-0000000{step}/weights.safetensors") for step in (1, 3))
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    tables = {name for name in first if name.endswith("values.weight_KD")}
    gates = {name for name in first if ".gates." in name}
    memories = {name for name in first if "memory_facts" in name and "running" not in name}
    assert tables
    assert gates
    expected = {"memories": memories, "values": tables, "gates": gates}[only]
    assert {name for name in moved if "running" not in name} == expected
    assert {name for name in moved if "running" in name} == set() or only == "memories"
    found = load_file(start / f"checkpoints/{(start / 'best').read_text().strip()}/weights.safetensors")
    assert all(torch.equal(found[name], last[name]) for name in found)
