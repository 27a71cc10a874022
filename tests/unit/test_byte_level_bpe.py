"""A byte-level BPE of the library `tokenizers`: its ids are the library's, and what loses text is refused."""

import json
import unicodedata

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pkmlm.data import tokenizer as front
from pkmlm.data.tokenizer import PROBES, Tokenizer
from pkmlm.errors import UserError
from tests.byte_level import END, learn_byte_level


@pytest.fixture(scope="module")
def text(novels) -> str:
    return (novels / "train.txt").read_text()[:70_000]  # longer than a chunk


@pytest.fixture(scope="module")
def theirs(text) -> tokenizers.Tokenizer:
    return learn_byte_level(text)


@pytest.fixture(scope="module")
def ours(theirs) -> Tokenizer:
    return Tokenizer(theirs.to_str().encode())


def test_ids_are_the_librarys_also_where_a_text_is_cut(ours, theirs, text):
    for each in (*PROBES, "", text, text.replace("\n", "\r\n ")):
        ids = ours.encode(each)
        assert ours.decode(ids) == each
        assert ids == theirs.encode(each).ids
    chunks = [text[:999], text[999:3000], text[3000:5000]]
    assert [each.tolist() for each in ours.encode_chunks(chunks, 3)] == [theirs.encode(each).ids for each in chunks]


def test_special_tokens_are_named_by_no_text_and_stand_for_none(ours):
    ids = ours.encode(f"a{END}b")
    assert ours.eos not in ids
    assert ours.decode([ours.eos, *ids, ours.eos]) == f"a{END}b"
    for wrong in (-1, ours.size):
        with pytest.raises(IndexError):
            ours.decode([wrong])


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "</s>"])
def test_the_end_of_a_text_goes_by_the_names_that_people_use(theirs, end):
    """Beside another special token, so that it is not the only one."""
    text = theirs.to_str().replace(END, "<|im_start|>")
    named = tokenizers.Tokenizer.from_str(text)
    named.add_special_tokens([end])
    assert Tokenizer(named.to_str().encode()).eos == named.token_to_id(end)


def test_pieces_show_bytes_that_are_no_text_by_themselves(ours):
    assert [ours.piece(i) for i in ours.encode(" the\n\u4f60")] == [" the", "\n", "<0xE4>", "<0xBD>", "<0xA0>"]
    assert ours.piece(ours.eos) == END


def test_what_changes_text_by_chance_is_left_out_and_the_digest_stays(ours, theirs):
    changed = tokenizers.Tokenizer.from_str(theirs.to_str())
    changed.normalizer = normalizers.Sequence([normalizers.NFC()])
    changed.enable_truncation(4)
    changed.enable_padding(length=64)
    changed.model.dropout = 0.5
    same = Tokenizer(changed.to_str(pretty=True).encode())
    assert same.model_bytes == ours.model_bytes
    assert Tokenizer(ours.model_bytes).sha256 == ours.sha256
    decomposed = unicodedata.normalize("NFD", "caf\u00e9 and more than four tokens")
    assert same.decode(same.encode(decomposed)) == decomposed


def spec_with(theirs, **changes) -> bytes:
    """The file with other parts; a dict is taken into the part."""
    spec = json.loads(theirs.to_str())
    for key, value in changes.items():
        spec[key] = spec[key] | value if isinstance(value, dict) and isinstance(spec[key], dict) else value
    return json.dumps(spec).encode()


def without_bytes() -> tokenizers.Tokenizer:
    lacking = tokenizers.Tokenizer(models.BPE())
    lacking.pre_tokenizer, lacking.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lacking.train_from_iterator(["abc"], trainers.BpeTrainer(special_tokens=[END], show_progress=False))
    return lacking


EMBRACED = {"id": 9, "content": "<x>", "special": False, "lstrip": True, "rstrip": False, "single_word": False}
REMOVED = {"type": "Split", "pattern": {"String": "q"}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: spec_with(t, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "not byte-level"),
        (lambda t: spec_with(t, decoder=None), "not byte-level"),
        (lambda t: spec_with(t, normalizer={"type": "Lowercase"}), "Lowercase changes text"),
        (lambda t: spec_with(t, pre_tokenizer={"add_prefix_space": True}), "lossy"),
        (lambda t: spec_with(t, model={"end_of_word_suffix": "</w>"}), "lossy"),
        (lambda t: spec_with(t, added_tokens=[]), "no token that ends a text"),
        (
            lambda t: spec_with(
                t, added_tokens=[*json.loads(t.to_str())["added_tokens"], EMBRACED | {"normalized": False}]
            ),
            "lossy",
        ),
        (lambda t: spec_with(t, model={"vocab": {"a": 1 << 31}}), r"vocab\.a is '2147483648'"),
        (lambda t: spec_with(t, model={"type": "Unigram"}), "damaged"),
        (lambda t: without_bytes().to_str().encode(), "lacks .* of the bytes"),
        (lambda t: t.to_str().encode()[:-9], "not a tokenizer.json"),
        (lambda t: b'{"model":' * 100_000, "not a tokenizer.json"),
        (lambda t: b"{}", "not a tokenizer.json"),
    ],
)
def test_a_file_that_loses_text_or_is_damaged_is_refused(theirs, change, said):
    with pytest.raises(UserError, match=f"^my.json .*{said}") as caught:
        Tokenizer(change(theirs), "my.json")
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_sentencepiece_model_as_json_is_told_which_file_to_give(theirs):
    """Llama's and Gemma's tokenizer.json: bytes stand for what the vocabulary lacks."""
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    llama = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    for decoder in (decoders.Sequence(parts), decoders.Sequence(parts[:3])):
        llama.decoder = decoder
        with pytest.raises(UserError, match=r"my\.json is not byte-level") as refused:
            Tokenizer(llama.to_str().encode(), "my.json")
        assert "tokenizer.model" in refused.value.hint
    with pytest.raises(UserError) as refused:
        Tokenizer(spec_with(theirs, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}))
    assert "tokenizer.model" not in refused.value.hint


def test_text_that_only_this_tokenizer_loses_is_named(theirs):
    """No probe has a "q" before a "j"."""
    parts = [REMOVED | {"pattern": {"String": "qj"}}, json.loads(theirs.to_str())["pre_tokenizer"]]
    lossy = Tokenizer(spec_with(theirs, pre_tokenizer={"type": "Sequence", "pretokenizers": parts}), "my.json")
    with pytest.raises(UserError, match=r"my\.json is lossy: '.*qj"):
        lossy.encode("some qj words")


def test_a_file_of_any_size_is_refused_before_it_is_read(tmp_path, monkeypatch, theirs):
    theirs.save(str(tmp_path / "my.json"))
    monkeypatch.setattr(front, "LARGEST", 1000)
    with pytest.raises(UserError, match=r"my\.json is too large for a tokenizer \(expected at most 1,000 bytes\)"):
        Tokenizer.load(tmp_path / "my.json")
