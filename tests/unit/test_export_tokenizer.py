"""The exported tokenizer gives the ids of ours, and every text back."""

import shutil
from pathlib import Path

import pytest

from pkmlm.data.tokenizer import PROBES, Tokenizer
from pkmlm.export.config import tokenizer_config
from pkmlm.export.tokenization_pkmlm import PkmlmTokenizer
from pkmlm.files import write_json

TEXTS = [
    *PROBES,
    *("", " ", "\n", "\n\n", "a\r\nb\rc\n", "\t\tdef f(x):\n        return x\n", "  two  spaces  ", "ends with space "),
    *("\u2581", "a\u2581\u2581 \u2581", "</s>", "<s>a</s> <unk></s>", "<0x0A>", "\x00", "\ufeff", "\u200b\u00ad"),
    *("\U0010ffff\ufffd\ue000", "na\u00efve caf\u00e9", "\u4f60\u597d", "word" * 1500, "[CLS]<pad><|endoftext|>"),
]
TEXTS += ["x" * start + "the\nand\nthat\n" * 400 for start in range(3)]  # only newlines to cut after


@pytest.fixture(scope="module")
def ours(tokens: Path) -> Tokenizer:
    return Tokenizer.load(tokens / "tokenizer.model")


@pytest.fixture(scope="module")
def theirs(ours: Tokenizer, tokens: Path, tmp_path_factory) -> PkmlmTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(tokens / "tokenizer.model", folder)
    write_json(folder / "tokenizer_config.json", tokenizer_config(ours, 32))
    return PkmlmTokenizer.from_pretrained(folder)


def test_ids_are_ours_and_the_text_comes_back(ours, theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    again = PkmlmTokenizer.from_pretrained(tmp_path)
    assert len(again) == len(theirs)
    assert again.padding_side == "left"
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ids == again.encode(text) == [1, *ours.encode(text)]
        assert theirs.encode(text, add_special_tokens=False) == ids[1:]
        assert theirs.decode(ids, skip_special_tokens=True) == again.decode(ids, skip_special_tokens=True) == text
        assert theirs.decode(ids) == f"</s>{text}"
        assert theirs.convert_tokens_to_ids(theirs.tokenize(text)) == ids[1:]


def test_real_text(ours, theirs, novels):
    text = (novels / "train.txt").read_text()
    for piece in (text, text.replace("\n", " "), text.replace("\n", "")[:60000].replace(" ", "")):
        ids = theirs(piece).input_ids
        assert ids == [1, *ours.encode(piece)]
        assert theirs.decode(ids, skip_special_tokens=True) == piece


def test_parts_of_characters_and_unknown_ids(ours, theirs):
    ids = theirs.encode("\U0001f469", add_special_tokens=False)
    assert len(ids) > 1
    for part in (ids[:1], ids[1:3], [*ids[:2], 1, *ids[2:]]):
        assert theirs.decode(part, skip_special_tokens=True) == ours.decode([i for i in part if i > 1])
    assert theirs.decode([5000, *ids]) == "<unk>\U0001f469"
    assert (len(theirs), theirs.vocab_size) == (600, 600)
    assert sorted(theirs.get_vocab().values()) == list(range(600))


def test_batches_are_padded_on_the_left(theirs):
    batch = theirs(["It was", "It was a dark night, and"], padding=True, return_tensors="pt")
    alone = theirs("It was").input_ids
    gap = batch.input_ids.shape[1] - len(alone)
    assert batch.input_ids[0].tolist() == [0] * gap + alone
    assert batch.attention_mask[0].tolist() == [0] * gap + [1] * len(alone)
    assert batch.attention_mask[1].all()
    assert theirs.batch_decode(batch.input_ids, skip_special_tokens=True) == ["It was", "It was a dark night, and"]
    right = theirs(["It was", "It was a dark night, and"], padding=True, padding_side="right")
    assert right.input_ids[0] == alone + [0] * gap
    cut = theirs("It was a dark night, and", truncation=True, max_length=4)
    assert cut.input_ids == batch.input_ids[1, :4].tolist()


def test_special_tokens(theirs):
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 1, 0, 0)
    assert theirs.model_max_length == 32
    assert set(theirs("It was")) == {"input_ids", "attention_mask"}
    found = theirs("It was", return_special_tokens_mask=True)
    assert found.special_tokens_mask == [1] + [0] * (len(found.input_ids) - 1)
    pair = theirs("It", " was")
    assert pair.input_ids == [1, *theirs.encode("It")[1:], *theirs.encode(" was")[1:]]
    assert theirs.get_special_tokens_mask(found.input_ids, already_has_special_tokens=True) == found.special_tokens_mask
    parsed = theirs("a</s>", split_special_tokens=False)
    assert parsed.input_ids == [1, *theirs.encode("a")[1:], 1]


def test_added_tokens_keep_their_names(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    again = PkmlmTokenizer.from_pretrained(tmp_path, split_special_tokens=False)
    assert again.add_tokens(["<user>"]) == 1
    ids = again.encode("a<user> b")
    assert ids[2:3] == [600]
    assert len(again) == 601
    assert again.decode(ids, skip_special_tokens=True) == "a<user> b"
