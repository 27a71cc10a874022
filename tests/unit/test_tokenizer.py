"""The tokenizer gives back every text, learns the same model every time, and refuses lossy models."""

import base64
import io
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from pkmlm.data.sentencepiece_model import LEARNING, LEAST_VOCABULARY, sampled
from pkmlm.data.text import WINDOW, chunks_of
from pkmlm.data.tokenizer import PROBES, Tokenizer
from pkmlm.errors import UserError

TEXT = "the of and a to in he was that it his her with as had for she 12 1987 be, him. \u201cwhich\u201d"
WORDS = TEXT.split()


def prose(words, seed=0):
    """Text with lines, paragraphs, indents and double spaces."""
    random_ = random.Random(seed)
    joins = [" "] * 30 + ["\n", "\n\n", "  ", "\n    ", "\t"]
    return "".join(random_.choice(WORDS) + random_.choice(joins) for _ in range(words))


def learnt(**changes):
    """A foreign model: learnt here, but not as we learn."""
    model = io.BytesIO()
    settings_ = {**LEARNING, "vocab_size": 315, "model_type": "bpe", "hard_vocab_limit": False, **changes}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(chunks_of(prose(4000))), model_writer=model, **settings_
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request):
    return Tokenizer.learn(chunks_of(prose(4000)), 315, request.param)


@pytest.mark.parametrize(
    "text",
    [
        *PROBES,
        "",
        "a\r\nb\rc\n",
        "\u2028\u2029\x85\x0b\x0c\x1c",
        "\U0010ffff\ufffd\ue000",
        prose(3000, seed=7),
    ],
)
def test_every_text_comes_back(tokenizer, text):
    assert (tokenizer.size, tokenizer.unknown, tokenizer.eos) == (315, 0, 1)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.eos, tokenizer.unknown} & set(ids)


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.sampled_from(["", "\u2581", "  ", "\n"]),
)
def test_any_text_comes_back(tokenizer, text, join):
    text = join.join(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encode_takes_a_document_chunk_by_chunk(tokenizer):
    text = "x" * (WINDOW + 1) + prose(2000) + "\u2581" * 50
    parts = [i for ids in tokenizer.encode_chunks(chunks_of(text)) for i in ids.tolist()]
    assert tokenizer.encode(text) == parts


def test_cuts_at_newlines_and_single_spaces_change_no_id():
    tokenizer = Tokenizer.learn(chunks_of(prose(4000)), 315)
    for text in (prose(8000, seed=3), " ".join(prose(8000, seed=4).split())):
        assert len(chunks_of(text)) > 10
        (whole,) = tokenizer.encode_chunks([text])
        assert tokenizer.encode(text) == whole.tolist()


# Learning


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_model(model_type):
    texts = chunks_of(prose(4000))
    assert Tokenizer.learn(texts, 315, model_type).sha256 == Tokenizer.learn(iter(texts), 315, model_type).sha256


def test_a_vocabulary_too_large_names_the_largest_that_works():
    texts = chunks_of(prose(200))
    with pytest.raises(UserError, match="--vocab-size: its default of 8,192 is too large") as caught:
        Tokenizer.learn(texts)
    most = int(caught.value.message.split("at most ")[1].rstrip(")").replace(",", ""))
    assert Tokenizer.learn(texts, most).size == most
    with pytest.raises(UserError, match=f"at most {most:,}"):
        Tokenizer.learn(texts, most + 1)


def test_a_vocabulary_too_small_for_bytes_names_the_smallest_that_works():
    texts = chunks_of(prose(200))
    with pytest.raises(UserError, match=f"--vocab-size: {LEAST_VOCABULARY - 1} .* {LEAST_VOCABULARY}"):
        Tokenizer.learn(texts, LEAST_VOCABULARY - 1)
    assert Tokenizer.learn(texts, LEAST_VOCABULARY).size == LEAST_VOCABULARY


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("size", [300, 600])
def test_bytes_spell_the_characters_that_a_small_vocabulary_cannot_hold(model_type, size):
    """A text with 20,000 different characters: the frequent ones have ids of their own."""
    draw = random.Random(0)
    rare = [chr(0x4E00 + i) for i in range(20_000)]
    draw.shuffle(rare)
    text = "".join(f"{character}\u6f22\u5b57 \u2585\n"[: draw.randrange(1, 7)] for character in rare)
    tokenizer = Tokenizer.learn(chunks_of(text), size, model_type)
    assert tokenizer.size == size
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unknown not in ids
    assert len(tokenizer.encode("\u6f22 \u5b57")) <= 3
    assert Tokenizer.learn(chunks_of(text), size, model_type).sha256 == tokenizer.sha256


@pytest.mark.parametrize("texts", [[], ["\n"]])
def test_text_that_teaches_nothing_is_refused(texts):
    with pytest.raises(UserError, match="too small to learn"):
        Tokenizer.learn(texts, 300)


def test_a_sample_is_bounded_spread_out_ordered_and_repeatable():
    texts = [f"{i:05d}" + "x" * (i % 7) for i in range(20_000)]
    assert sampled(texts, sum(map(len, texts))) == texts
    sample = sampled(iter(texts), 20_000)
    size = sum(map(len, sample))
    assert 20_000 - 12 < size <= 20_000
    assert sample == sorted(sample) == sampled(texts, 20_000)
    quarters = np.histogram([int(text[:5]) for text in sample], 4, (0, 20_000))[0] / len(sample)
    assert np.all(abs(quarters - 0.25) < 0.05)


# Models from elsewhere


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "lossy"),
        ({"remove_extra_whitespaces": True}, "lossy"),
        ({"byte_fallback": False}, "no byte pieces"),
        ({"eos_id": -1}, "neither an end nor a beginning"),
        ({"eos_id": -1, "user_defined_symbols": ["\n", "</s>"], "bos_id": 1, "bos_piece": "<x>"}, None),
    ],
)
def test_a_model_that_loses_something_is_refused(changes, message):
    model = learnt(**changes)
    if message is None:
        assert Tokenizer(model).eos == 1
        return
    with pytest.raises(UserError, match=f"^my.model .*{message}"):
        Tokenizer(model, "my.model")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("extra", [{}, {"treat_whitespace_as_suffix": True}])
def test_a_space_before_every_text_is_left_out(model_type, extra):
    """As Llama's and Mistral's models put it there; with a chunk, it would be put into a text."""
    theirs = learnt(add_dummy_prefix=True, model_type=model_type, **extra)
    if extra:  # it is put behind a text
        with pytest.raises(UserError, match="lossy"):
            Tokenizer(theirs)
        return
    ours, without = Tokenizer(theirs), learnt(model_type=model_type)
    text = prose(3000, seed=7)
    assert ours.decode(ours.encode(text)) == text
    processor = sentencepiece.SentencePieceProcessor(model_proto=theirs)
    assert [processor.id_to_piece(i) for i in range(ours.size)] == [
        sentencepiece.SentencePieceProcessor(model_proto=ours.model_bytes).id_to_piece(i) for i in range(ours.size)
    ]
    line = "the of and a"
    assert ours.encode(f" {line}") == processor.encode(line), "with the space in the text itself"
    assert Tokenizer(ours.model_bytes).sha256 == ours.sha256
    assert Tokenizer(without).model_bytes == without, "a model without that setting stays as it is"


def test_the_tokenizer_of_a_folder(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(learnt())
    whole = Tokenizer.load(tmp_path)
    assert whole.sha256 == Tokenizer.load(tmp_path / "tokenizer.model").sha256
    (tmp_path / "tokenizer.json").write_text("{}")  # as in folders that have both
    assert Tokenizer.load(tmp_path).sha256 == whole.sha256
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer") as refused:
        Tokenizer.load(tmp_path)
    assert "save_pretrained" in refused.value.hint


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_file_of_tiktoken_is_named(tmp_path, end):
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    (tmp_path / "tokenizer.model").write_bytes(end.join([*lines, b""]))  # as Llama 3's is called
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(UserError, match=r"tokenizer\.model is a file of tiktoken") as refused:
            Tokenizer.load(place)
        assert "tokenizer.json" in refused.value.hint


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "a.model"
    whole = learnt()
    for data in (b"", b"garbage" * 100, bytes(50), whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.model is not a SentencePiece model"):
            Tokenizer.load(path)
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path / "missing.model")


def test_text_that_sentencepiece_reserves_is_learnt_from(tokenizer):
    """Of a sentence with this block it would learn nothing."""
    chunks = chunks_of(prose(4000))
    barred = ["\u2585".join(chunk.partition(" ")[::2]) for chunk in chunks]
    divided = [part for chunk in chunks for part in chunk.partition(" ")[::2]]
    assert Tokenizer.learn(barred, 315).sha256 == Tokenizer.learn(divided, 315).sha256
    assert tokenizer.decode(tokenizer.encode("\u2585 a \u2585")) == "\u2585 a \u2585"


def test_text_without_a_space_is_learnt_and_comes_back() -> None:
    tokenizer = Tokenizer.learn(["\u8fd9\u662f\u6ca1\u6709\u7a7a\u683c\u7684\u6587\u672c\u3002" * 50], 280)
    assert tokenizer.decode(tokenizer.encode("\u6587 \u672c  a")) == "\u6587 \u672c  a"
