"""Token tables against plain sums: into the stream, and into attention's values."""

import pytest
import torch

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import World
from pkmlm.measure.ngrams import NGrams, collisions, ngrams_in_row
from pkmlm.memory.base import usage_taps
from pkmlm.memory.token.layer import TokenMemory
from pkmlm.memory.tokens import TokenIds
from pkmlm.model.attention import KVCache
from pkmlm.model.transformer import build_model
from pkmlm.recipe.load import load_recipe

B, T, D, V, HEADS = 2, 7, 12, 20, 3


def test_the_row_of_the_token_is_added_times_a_factor():
    layer = TokenMemory(D, vocab_size=V).double()
    x, tokens = torch.randn(B, T, D, dtype=torch.float64), torch.randint(V, (B, T))
    past = TokenIds(V, [layer.spec.lookback])(tokens, None, None)
    assert not layer(x, past).any(), "rows start at zero"
    assert layer.scale.factor_1.item() == pytest.approx(0.1)
    layer.values.weight_KD.data.normal_()
    out = layer(x, past)
    torch.testing.assert_close(out, layer.scale.factor_1 * layer.values.weight_KD[tokens], rtol=0, atol=1e-15)
    out.square().sum().backward()
    expected = torch.zeros(V, D, dtype=torch.float64)
    expected.index_add_(0, tokens.flatten(), (2 * 0.1 * out.detach()).flatten(0, 1))
    torch.testing.assert_close(layer.values.weight_KD.grad, expected, rtol=1e-6, atol=1e-9)
    for wrong in (V, -1):
        tokens[1, 2] = wrong
        with pytest.raises(ValueError, match=f"found token {wrong} "):
            layer(x, past._replace(ids_BTG=tokens[..., None]))


def test_each_head_has_a_gate_of_the_stream():
    layer = TokenMemory(D, vocab_size=V, into="values", heads=HEADS).double()
    x, tokens = torch.randn(B, T, D, dtype=torch.float64), torch.randint(V, (B, T))
    past = TokenIds(V, [layer.spec.lookback])(tokens, None, None)
    torch.testing.assert_close(layer(x, past), layer.values.weight_KD[tokens], rtol=0, atol=1e-15)  # gates start at 1
    layer.gate.weight.data.normal_()
    expected = torch.empty(B, T, D, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for head in range(HEADS):
                part = slice(head * D // HEADS, (head + 1) * D // HEADS)
                gate = 2 / (1 + torch.exp(-(layer.gate.weight[head] @ x[b, t])))
                expected[b, t, part] = gate * layer.values.weight_KD[tokens[b, t], part]
    torch.testing.assert_close(layer(x, past), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"into": "head"}, "into"), ({"heads": 5}, "heads"), ({"vocab_size": 0}, "vocab_size"), ({"heads": 0}, "heads")],
)
def test_arguments_are_checked(wrong, said):
    with pytest.raises(ValueError, match=said):
        TokenMemory(D, **{"vocab_size": V, **wrong})


class TwoRows(TokenMemory):
    """Two rows for each token, of the first 7 and of the next 5."""

    def rows_of(self, ids_BTG: torch.Tensor) -> torch.Tensor:
        return torch.cat([ids_BTG % 7, 7 + ids_BTG % 5], -1)


def test_tokens_are_told_of_each_of_the_rows_that_they_read(tokens):
    memory, seen = TwoRows(D, vocab_size=V), [1, 3, 8, 9, 9, 15]
    ngrams = NGrams(TokenIds(V, [memory.spec.lookback]))
    ngrams.add(torch.tensor(seen)[:, None])
    ngrams.gather(World())
    rows = {token: {token % 7, 7 + token % 5} for token in set(seen)}
    tokenizer = Tokenizer.load(tokens / "tokenizer.model")
    for slot in range(12):
        told = ngrams_in_row(tokenizer, memory, {"plain": ngrams}, slot)
        here = [token for token in seen if slot in rows[token]]
        assert {(each["tokens"][0], each["count"]) for each in told} == {
            (tokenizer.piece(token), here.count(token)) for token in here
        }
    (found,) = collisions(memory, {"plain": ngrams})
    alone = {
        token: [all(row not in rows[other] for other in rows if other != token) for row in rows[token]]
        for token in rows
    }
    assert found["distinct"] == 5
    assert found["alone"] == sum(map(sum, alone.values())) / 10
    assert found["alone_in_any"] == sum(map(any, alone.values())) / 5
    assert found["alone_expected"] == (1 - 2 / V) ** 4


def model_of(tmp_path, into: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: t\nmodel: {{dim: {D}, layers: 2, heads: {HEADS}, context: 16, positions: rotary, "
        f"memories: {{words: {{kind: token, layers: all, into: {into}}}}}}}\n"
        "train: {batch_tokens: 16, micro_batch: 1}\n"
    )
    model = build_model(load_recipe(path), V).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def test_values_get_the_rows_beside_those_of_attention(tmp_path):
    """Attention over equal values returns them: with its own at zero, what comes out is the mean of the rows."""
    model = model_of(tmp_path, "values")
    block, tokens = model.blocks[0], torch.full((1, 5), 7)
    memory = block.values["memory_words"]
    for parameter in (*block.attention.qkv.parameters(), memory.gate.weight):
        parameter.data.zero_()
    x_BTD = torch.randn(1, 5, D, dtype=torch.float64)
    past = model.token_ids["plain"](tokens, None, None)
    mixed = block.attention(x_BTD, None, None, more_BTD=memory(x_BTD, past))
    row_D = memory.values.weight_KD[7]
    torch.testing.assert_close(mixed, block.attention.out(row_D).expand(1, 5, D), rtol=0, atol=1e-12)


@pytest.mark.parametrize("into", ["stream", "values"])
def test_a_cache_continues_what_was_read(tmp_path, into):
    model, tokens, cache = model_of(tmp_path, into), torch.randint(V, (1, 12)), KVCache(16)
    pieces = [model(tokens[:, start:stop], cache) for start, stop in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-12)
    assert [(tap.layer, tap.name, tap.residual) for tap in usage_taps(model)] == [
        (1, "words", into == "stream"),
        (2, "words", into == "stream"),
    ]
