"""The exported tokenizer gives the ids of ours, and every text back."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from pkmlm.data.sentencepiece_model import LEARNING, MARK
from pkmlm.data.text import chunks_of
from pkmlm.data.tokenizer import PROBES, Tokenizer
from pkmlm.errors import UserError
from pkmlm.export.config import tokenizer_config
from pkmlm.files import write_json
from tests.byte_level import learn_byte_level

TEXTS = [
    *PROBES,
    *("", " ", "\n", "\n\n", "a\r\nb\rc\n", "\t\tdef f(x):\n        return x\n", "  two  spaces  ", "ends with space "),
    *("\u2581", "a\u2581\u2581 \u2581", "</s>", "<s>a</s> <unk></s>", "<0x0A>", "\x00", "\ufeff", "\u200b\u00ad"),
    *("\U0010ffff\ufffd\ue000", "na\u00efve caf\u00e9", "\u4f60\u597d", "word" * 1500, "[CLS]<pad><|endoftext|>"),
    *("was</s>the <unk>it<0x41>", "</s></s>\n<0xE2><0x96><0x81>", "<|user|>It was <|user|></b>\n", "\U0001f469</s>"),
]
TEXTS += ["x" * start + "the\nand\nthat\n" * 400 for start in range(3)]  # only newlines to cut after
KINDS = ["bpe", "unigram", "bpe with words of a user", "unigram with words of a user", "byte-level"]


def learnt(kind: str, text: str) -> Tokenizer:
    if kind == "byte-level":
        return Tokenizer(learn_byte_level(text).to_str().encode())
    if kind in ("bpe", "unigram"):
        names = "< / > </ s> <u nk> <0 x 0123456789 ABCDEF\n" * 500 * (kind == "unigram")  # which pieces can spell
        return Tokenizer.learn(chunks_of(text + names), 600, kind)
    words = ["\n", "<|user|>", "</b>", *([MARK * 2] * kind.startswith("bpe"))]
    options = {**LEARNING, "vocab_size": 600, "model_type": kind.split()[0], "user_defined_symbols": words, "bos_id": 2}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(chunks_of(text)), model_writer=model, **options)
    return Tokenizer(model.getvalue())


def loaded(ours: Tokenizer, folder: Path, **options: Any) -> Any:
    (folder / "tokenizer.json").write_bytes(ours.as_json())
    write_json(folder / "tokenizer_config.json", tokenizer_config(ours, 32))
    return AutoTokenizer.from_pretrained(folder, **options)


@pytest.fixture(scope="module")
def ours(tokens: Path) -> Tokenizer:
    return Tokenizer.load(tokens / "tokenizer.model")


@pytest.fixture
def theirs(ours: Tokenizer, tmp_path: Path) -> Any:
    return loaded(ours, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_ours_and_the_text_comes_back(kind, novels, tmp_path):
    text = (novels / "train.txt").read_text()
    ours = learnt(kind, text)
    theirs = loaded(ours, tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert len(again) == len(theirs) == ours.size
    for each in (*TEXTS, text, text.replace("\n", " "), text.replace("\n", "")[:60000].replace(" ", "")):
        ids = theirs.encode(each)
        assert ids == again.encode(each) == [ours.begin, *ours.encode(each)]
        assert theirs.encode(each, add_special_tokens=False) == ids[1:]
        assert theirs.decode(ids, skip_special_tokens=True) == again.decode(ids, skip_special_tokens=True) == each
        assert theirs.decode(ids) == f"{theirs.bos_token}{each}"


@pytest.mark.parametrize("kind", ["bpe", "byte-level"])
def test_what_transformers_saves_again_is_our_tokenizer(kind, novels, tmp_path):
    ours, again = learnt(kind, (novels / "train.txt").read_text()), tmp_path / "again"
    loaded(ours, tmp_path).save_pretrained(again)
    assert Tokenizer.load(again).model_bytes == ours.model_bytes
    config = json.loads((again / "tokenizer_config.json").read_text())
    if kind == "bpe":
        for other in ("AAAA", "?", 5, None):
            write_json(again / "tokenizer_config.json", config | {"sentencepiece_model": other})
            with pytest.raises(UserError, match=str(again)):
                Tokenizer.load(again)


def test_offsets_are_places_in_the_text(theirs):
    text = "It was  a dark\nnight </s>."
    found = theirs(text, return_offsets_mapping=True, add_special_tokens=False)
    assert [text[start:end] for start, end in found.offset_mapping] == [theirs.decode([i]) for i in found.input_ids]


def test_batches_are_padded_on_the_left(theirs):
    batch = theirs(["It was", "It was a dark night, and"], padding=True, return_tensors="pt")
    alone = theirs("It was").input_ids
    gap = batch.input_ids.shape[1] - len(alone)
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch.input_ids[0].tolist() == [0] * gap + alone
    assert batch.attention_mask[0].tolist() == [0] * gap + [1] * len(alone)
    assert batch.attention_mask[1].all()
    assert theirs.batch_decode(batch.input_ids, skip_special_tokens=True) == ["It was", "It was a dark night, and"]


def test_special_tokens(ours, theirs, tmp_path):
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 1, 0, 0)
    assert theirs.model_max_length == 32
    pair = theirs("It", " was")
    assert pair.input_ids == [1, *theirs.encode("It")[1:], *theirs.encode(" was")[1:]]
    assert theirs("a</s>", split_special_tokens=False).input_ids == [1, *theirs.encode("a")[1:], 1]
    again = loaded(ours, tmp_path, split_special_tokens=False)
    assert again.add_tokens(["<user>"]) == 1
    ids = again.encode("a<user> b")
    assert (ids[2:3], len(again)) == ([600], 601)
    assert again.decode(ids, skip_special_tokens=True) == "a<user> b"


@pytest.mark.parametrize("change", ["other ids", "other scores", "equal scores"])
def test_merges_are_in_the_order_of_scores(change, novels, tmp_path):
    """Which is not always that of ids; and where two pieces share one, no tokenizer.json says which comes first."""
    messages = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    text = (novels / "train.txt").read_text()
    model = messages.ModelProto.FromString(Tokenizer.learn(chunks_of(text), 600, "bpe").model_bytes)
    first = next(i for i, piece in enumerate(model.pieces) if piece.type == 1 and len(piece.piece) > 1)
    merged = [piece for piece in model.pieces[first:] if len(piece.piece) > 1]
    if change == "other ids":
        for piece, name, score in zip(
            merged, *zip(*((p.piece, p.score) for p in reversed(merged)), strict=True), strict=True
        ):
            piece.piece, piece.score = name, score
    for piece in merged:
        piece.score = {"other ids": piece.score, "other scores": 1.5 * piece.score, "equal scores": -7.0}[change]
    ours = Tokenizer(model.SerializeToString())
    if change == "equal scores":
        with pytest.raises(UserError, match="have the same score"):
            ours.as_json()
        return
    theirs = loaded(ours, tmp_path)
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
