"""A byte-level BPE from elsewhere, from `tokenize` to what `transformers` makes of the export."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pkmlm.data.corpus import Corpus, open_tokenizer
from pkmlm.evaluate.load import load_run
from tests.byte_level import END, learn_byte_level
from tests.conftest import pkmlm


@pytest.fixture(scope="module")
def made(novels, write_recipe, tmp_path_factory) -> Path:
    """A folder with `tokenizer.json`, `tokens`, `run` and `exported`."""
    folder = tmp_path_factory.mktemp("byte-level")
    learn_byte_level((novels / "train.txt").read_text()).save(str(folder / "tokenizer.json"))
    splits = [f"--{split}={novels / split}.txt" for split in ("valid", "test")]
    given = ["--tokenizer", folder / "tokenizer.json", "-o", folder / "tokens", "-q"]
    pkmlm("tokenize", novels / "train.txt", *splits, *given)
    pkmlm("train", write_recipe(folder, "product-key"), "-o", folder / "run", "-q", "-s", f"data.dir={folder}/tokens")
    pkmlm("export", folder / "run", "-o", folder / "exported")
    return folder


def test_decoding_gives_back_every_byte(made, novels):
    tokenizer = open_tokenizer(made / "tokens")
    for split in ("train", "valid", "test"):
        corpus = Corpus(made / "tokens", split)
        text = tokenizer.decode(corpus.document(0))
        assert text.encode() == (novels / f"{split}.txt").read_bytes()


def test_the_tokenizer_goes_along_and_nothing_of_the_other_kind(made):
    kept = (made / "tokens/tokenizer.json").read_bytes()
    for folder in ("run", "exported"):
        assert (made / folder / "tokenizer.json").read_bytes() == kept
        assert not {"tokenizer.model", "tokenization_pkmlm.py"} & {path.name for path in (made / folder).iterdir()}


def test_transformers_gives_our_ids_and_logits_and_keeps_the_tokenizer(made, tmp_path):
    from transformers import PreTrainedTokenizerFast

    from pkmlm.export.modeling_pkmlm import PkmlmForCausalLM

    run, theirs = load_run(made / "run", "latest"), PreTrainedTokenizerFast.from_pretrained(made / "exported")
    text = f" It was a caf\u00e9,  e\u0301\n\n{END} and <unk>"
    ids = theirs(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == [run.tokenizer.eos, *run.tokenizer.encode(text)]
    assert theirs.decode(ids[0], skip_special_tokens=True) == text
    model = PkmlmForCausalLM.from_pretrained(made / "exported")
    with torch.no_grad():
        logits = model(ids[:, :32]).logits
    assert (logits - run.model(ids[:, :32])).abs().max() <= 1e-5
    theirs(text, truncation=True, max_length=4)  # which its file then says
    for each in (model, theirs):
        each.save_pretrained(tmp_path)
    again, before = (json.loads(pkmlm("eval", path, "--json").stdout) for path in (tmp_path, made / "run"))
    assert again["perplexity"] == before["perplexity"]


def test_commands_take_it(made, novels, tmp_path):
    its, ours = (json.loads(pkmlm("eval", made / name, "--json").stdout) for name in ("exported", "run"))
    assert its["perplexity"] == ours["perplexity"]
    assert ours["perplexity"]["bytes"] == (novels / "test.txt").stat().st_size
    assert pkmlm("generate", made / "run", "It was", "-n", 9).stdout.startswith("It was")
    assert pkmlm("slots", made / "run", "It was").stdout
    row = {"goal": "It was", "sol1": "dark \u4f60", "sol2": "light", "label": 0}
    (tmp_path / "piqa.jsonl").write_text(json.dumps(row) + "\n")
    scored = pkmlm("eval", made / "run", "--tasks", "piqa", "--task-data", tmp_path, "--json").stdout
    assert json.loads(scored)["tasks"]["piqa"]["n"] == 1


def test_a_damaged_or_another_tokenizer_is_refused_by_its_digest(made, tokens, write_recipe, tmp_path):
    run = shutil.copytree(made / "run", tmp_path / "run")
    file = run / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b'"special":true', b'"special":false'))
    assert "tokenizer.json" in pkmlm("eval", run, code=1).stderr
    folder = shutil.copytree(made / "tokens", tmp_path / "tokens")
    (folder / "tokenizer.json").write_bytes(b"{}")
    recipe = write_recipe(tmp_path, "dense")
    dry = ["train", recipe, "-o", tmp_path / "new", "-s", f"data.dir={folder}", "--dry-run"]
    assert "tokenizer.json is damaged: its sha256" in pkmlm(*dry, code=2).stderr
    assert "another tokenizer" in pkmlm("eval", made / "run", "--data", tokens, code=2).stderr
