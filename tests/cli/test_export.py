"""`pkmlm export`, what `transformers` makes of it, and the commands that take an exported folder."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pkmlm.evaluate.load import load_run
from pkmlm.export.bundle import MODEL, bundle
from pkmlm.files import entry_of, write_json
from tests import PATIENCE
from tests.conftest import ROOT, given, pkmlm

KINDS = ("modern", "product-key", "hash")
FILES = {
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.json"),
    *bundle(*MODEL),
    *("model.safetensors", "manifest.json", "README.md"),
}
# What a user of `transformers` does, where pkmlm cannot be imported.
USER = """
import json, sys
sys.modules["pkmlm"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
model.save_pretrained(path + "-again")
tokenizer.save_pretrained(path + "-again")
model = AutoModelForCausalLM.from_pretrained(path + "-again", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path + "-again", trust_remote_code=True)
inputs = tokenizer("It was", return_tensors="pt")
texts = model.generate(**inputs, max_new_tokens=25)
with torch.no_grad():
    logits = model(inputs.input_ids).logits
print(json.dumps({
    "text": tokenizer.decode(texts[0], skip_special_tokens=True),
    "ids": inputs.input_ids[0].tolist(),
    "logits": logits.flatten().tolist(),
}))
"""


@pytest.fixture(scope="module")
def exports(trained, tmp_path_factory) -> dict[str, Path]:
    """An export of some kinds of runs; unit/test_export_model.py has all."""
    folder = tmp_path_factory.mktemp("exports")
    for kind in KINDS:
        said = pkmlm("export", trained(kind), "-o", folder / kind).stdout
        assert f"{kind} at step 30" in said
        assert len(said.splitlines()) == 1
    return {kind: folder / kind for kind in KINDS}


def test_the_folder_holds_a_whole_model(exports):
    for folder in exports.values():
        assert {path.name for path in folder.iterdir()} == FILES
        assert not {path.name for path in folder.parent.iterdir()} - set(KINDS)
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}  # older versions of transformers ask for it


MIXTURE = {
    "plus": "{kind: product-key, layers: [1+, 2+], num_keys: 8, heads: 2, topk: 4, key_dim: 8, share_values: true}",
    "half": "{kind: hash, layers: 2, bits: 4}",
    "grams": "{kind: ngram, layers: all, orders: [2], heads: 1, rows: 31, row_dim: 8}",
    "plain": "{kind: ngram, layers: 1, orders: [1], heads: 1, rows: 31, row_dim: 32, fusion: add, canonical: false}",
}


@pytest.fixture(scope="module")
def mixture(write_recipe, tmp_path_factory) -> Path:
    """A run with several memories."""
    folder = tmp_path_factory.mktemp("mixture")
    settings = given(*(f"model.memories.{name}={keys}" for name, keys in MIXTURE.items()))
    pkmlm("train", write_recipe(folder, "dense"), *settings, "-o", folder / "mixture", "-q")
    return folder / "mixture"


def test_transformers_alone_gives_our_logits_ids_and_texts(mixture, tmp_path):
    path, folder = mixture, tmp_path / "exported"
    pkmlm("export", path, "-o", folder)
    run = load_run(path, "latest")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    (example,) = re.findall(r"```python\n([^`]*\"exported\"[^`]*)```", (ROOT / "pkmlm/manual/export.md").read_text())
    command = [sys.executable, "-c", USER + example, "exported"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    told, _, shown = done.stdout.partition("\n")
    assert shown.startswith("It was a dark night, and")
    answer = json.loads(told)
    assert answer["ids"] == [1, *run.tokenizer.encode("It was")]
    with torch.no_grad():
        expected = run.model(torch.tensor([answer["ids"]], device=run.device)).flatten().cpu()
    assert (torch.tensor(answer["logits"]) - expected).abs().max() <= 1e-5
    ours = pkmlm("generate", path, "It was", "-n", 25, "--temperature", 0).stdout
    assert answer["text"] == ours.removesuffix("\n")
    again, before = (
        json.loads(pkmlm("eval", path, "--json").stdout)["perplexity"] for path in (f"{folder}-again", folder)
    )
    assert again == before


@pytest.mark.parametrize("kind", KINDS[1:])
def test_commands_take_it_in_place_of_the_run(exports, trained, kind):
    run, folder = trained(kind), exports[kind]
    ours, its = (json.loads(pkmlm("eval", path, "--json").stdout) for path in (run, folder))
    assert its == ours
    texts = [pkmlm("generate", path, "It was", "-n", 30, "--seed", 5).stdout for path in (run, folder)]
    assert texts[0] == texts[1]
    ours, its = (
        json.loads(pkmlm("usage-report", path, "--format", "json").stdout)["runs"][0] for path in (run, folder)
    )
    ours.pop("source")
    assert its == ours | {"checkpoint": ""}
    assert {path.name for path in folder.iterdir()} == FILES


def test_exported_counts_name_the_manifest_if_there_is_one(exports, tmp_path):
    folder, found = shutil.copytree(exports["product-key"], tmp_path / "again"), []
    manifest = (folder / "manifest.json").read_bytes()
    for changed in (lambda: None, (folder / "manifest.json").unlink):
        changed()
        pkmlm("usage-report", folder, "--export", tmp_path / "counts.npz", "--force")
        with np.load(tmp_path / "counts.npz") as arrays:
            found.append(str(arrays["sha256"]))
    assert found == [hashlib.sha256(manifest).hexdigest(), ""]


def test_steps_and_dtypes(trained, tmp_path):
    run = trained("product-key")
    pkmlm("export", run, "-o", tmp_path / "early", "--step", 20, "--dtype", "bf16")
    assert json.loads((tmp_path / "early/config.json").read_text())["dtype"] == "bfloat16"
    its = json.loads(pkmlm("eval", tmp_path / "early", "--json", "--step", 20).stdout)
    ours = json.loads(pkmlm("eval", run, "--json", "--step", 20).stdout)
    assert its["step"] == 20
    assert its["perplexity"]["nll"] == pytest.approx(ours["perplexity"]["nll"], rel=1e-3)
    assert its["perplexity"]["nll"] != ours["perplexity"]["nll"]
    assert "--step 30" in pkmlm("eval", tmp_path / "early", "--step", 30, code=2).stderr
    best = (run / "best").read_text().strip()
    pkmlm("export", run, "-o", tmp_path / "best", "--step", "best")
    assert json.loads((tmp_path / "best/config.json").read_text())["trained"]["step"] == int(best[5:])


@pytest.mark.parametrize(
    "kind", ["product-key", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("memory-plus", "peer", "hash"))]
)
def test_tables_in_few_bits_keep_the_perplexity_and_work_everywhere(trained, tmp_path, kind):
    run, folder, sizes = trained(kind), tmp_path / "exported", []
    ours = json.loads(pkmlm("eval", run, "--json", "--step", "latest").stdout)["perplexity"]["token_ppl"]
    for bits, most in ((8, 5e-4), (4, 5e-3)):
        said = pkmlm("export", run, "-o", folder, "--table-bits", bits, "--force", "--step", "latest").stdout
        assert f"tables in {bits} bits" in said
        assert f"tables in {bits} bits" in (folder / "README.md").read_text()
        its = json.loads(pkmlm("eval", folder, "--json").stdout)["perplexity"]["token_ppl"]
        assert 0 < abs(its / ours - 1) < most
        with safe_open(folder / "model.safetensors", "pt") as file:
            sizes.append(sum(file.get_tensor(name).nbytes for name in file.keys() if "codes_KC" in name))  # noqa: SIM118
    assert sizes[0] == 2 * sizes[1]
    pkmlm("generate", folder, "It was", "-n", 5)
    pkmlm("usage-report", folder)
    found = json.loads(pkmlm("slots", folder, "--json", "--top", 1).stdout)["slots"][0]
    assert found["reads"] > 0
    probes = json.loads(pkmlm("probe", folder, "--fit-tokens", 600, "--json").stdout)["memories"][0]["probes"]
    assert probes["redrawn_values"]["token_ppl"] != probes["zero"]["token_ppl"]


def test_what_does_not_fit_its_bits_is_refused(trained, tmp_path):
    assert (
        "dense has no tables"
        in pkmlm("export", trained("dense"), "-o", tmp_path / "x", "--table-bits", 4, code=2).stderr
    )
    whole = tmp_path / "whole"
    pkmlm("export", trained("hash"), "-o", whole, "--table-bits", 8)
    weights = load_file(whole / "model.safetensors")
    for number, (change, named) in enumerate(
        (
            (config_with(table_bits=4), "codes_KC"),
            (config_with(table_bits=None), "codes_KC"),
            (config_with(table_bits=3), "table_bits: found 3"),
            (lambda folder: with_codes_in(folder, torch.float32), "codes_KC is F32 (expected I8)"),
        )
    ):
        folder = shutil.copytree(whole, tmp_path / str(number))

        def with_codes_in(folder: Path, dtype: torch.dtype) -> None:
            (folder / "manifest.json").unlink()
            codes = {key: each.to(dtype) for key, each in weights.items() if key.endswith("codes_KC")}
            save_file(weights | codes, folder / "model.safetensors")

        change(folder)
        assert named in pkmlm("eval", folder, code=1).stderr


def write_checkpoint_recipe(run: Path, recipe: dict[str, Any]) -> None:
    """Write the recipe of the last checkpoint, and what its manifest says of it."""
    folder = run / "checkpoints/step-00000030"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["recipe.yaml"] = entry_of(folder / "recipe.yaml")
    write_json(folder / "manifest.json", manifest)


def test_the_card_says_what_the_model_is(trained, tmp_path):
    run = shutil.copytree(trained("product-key"), tmp_path / "my-run")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["train"]["init_from"] = str(trained("dense"))
    write_checkpoint_recipe(run, recipe)
    found = json.loads(pkmlm("eval", run, "--json").stdout)["perplexity"]
    pkmlm("export", run, "-o", tmp_path / "exported")
    card = (tmp_path / "exported/README.md").read_text()
    assert "\n# my-run\n" in card
    tokens = json.loads((run / "checkpoints/step-00000030/state.json").read_text())["tokens"]
    assert f"{tokens:,} tokens (30 steps), from the weights of dense" in card
    assert "(pkm) in layer 2: 256 slots" in card
    assert f"- test split: {found['bits_per_byte']:.4f} bits per byte" in card
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    valid = [line for line in lines if line["event"] == "valid"][-1]
    assert f"- first 600 tokens of the valid split: {valid['bits_per_byte']:.4f} bits per byte" in card
    assert "max_new_tokens=16)" in card, "the context is 32"
    recipe["eval"]["tokens"] = None
    write_checkpoint_recipe(run, recipe)
    pkmlm("export", run, "-o", tmp_path / "unlimited")
    assert (
        f"- valid split: {valid['bits_per_byte']:.4f} bits per byte" in (tmp_path / "unlimited/README.md").read_text()
    )
    found = json.loads(pkmlm("eval", run, "--split", "valid", "--json").stdout)["perplexity"]
    pkmlm("export", run, "-o", tmp_path / "whole")
    card = (tmp_path / "whole/README.md").read_text()
    assert f"- valid split: {found['bits_per_byte']:.4f} bits per byte" in card
    assert "first 600 tokens" not in card
    assert str(tmp_path) not in card


def test_nothing_is_lost_without_force(exports, trained, tmp_path):
    run, target = trained("modern"), tmp_path / "exported"
    shutil.copytree(exports["hash"], target)
    before = (target / "config.json").read_bytes()
    assert "is not empty" in pkmlm("export", run, "-o", target, code=2).stderr
    assert (target / "config.json").read_bytes() == before
    (target / "notes.txt").write_text("mine")
    assert "holds notes.txt" in pkmlm("export", run, "-o", target, "--force", code=2).stderr
    assert (target / "config.json").read_bytes() == before
    (target / "notes.txt").unlink()
    pkmlm("export", run, "-o", target, "--force")
    assert json.loads((target / "config.json").read_text())["memories"].keys() == {"pkm"}
    (tmp_path / "file").write_text("")
    pkmlm("export", run, "-o", tmp_path / "file", code=2)
    pkmlm("export", run, "-o", run, "--force", code=2)
    (tmp_path / "empty").mkdir()
    pkmlm("export", run, "-o", tmp_path / "empty")
    assert "step 7" in pkmlm("export", run, "-o", tmp_path / "x", "--step", 7, code=2).stderr
    assert str(target) in pkmlm("export", target, "-o", tmp_path / "x", code=2).stderr
    assert not (tmp_path / "x").exists()


def test_force_replaces_nothing_but_an_export(trained, tmp_path):
    kept = tmp_path / "config.json"
    kept.write_text('{"model_type": "gpt2"}')
    pkmlm("export", trained("modern"), "-o", tmp_path, "--force", code=2)
    assert kept.read_text() == '{"model_type": "gpt2"}'


def damaged_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def without(name: str):
    return lambda folder: (folder / name).unlink()


def config_with(**changes):
    def change(folder: Path) -> None:
        (folder / "manifest.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def text_in(name: str, text: str, *, trusted: bool = False):
    def change(folder: Path) -> None:
        if trusted:
            (folder / "manifest.json").unlink()
        (folder / name).write_text(text)

    return change


def other_place(folder: Path) -> None:
    """Let the manifest list a file outside of its folder."""
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../exported/README.md"] = content["files"]["config.json"]
    (folder / "manifest.json").write_text(json.dumps(content))


DAMAGES = {  # what is done, the exit code, what the error names, and whether to delete the manifest is offered
    "a flipped bit": (damaged_byte, 1, "model.safetensors: sha256", True),
    "no weights": (without("model.safetensors"), 1, "model.safetensors", False),
    "no tokenizer": (without("tokenizer.model"), 1, "tokenizer.model", False),
    "changed code": (text_in("modeling_pkmlm.py", "import os"), 1, "modeling_pkmlm.py: 9 bytes", True),
    "a damaged manifest": (text_in("manifest.json", "[]"), 1, "manifest.json", True),
    "a manifest of elsewhere": (other_place, 1, "manifest", True),
    "another kind of model": (config_with(model_type="mamba"), 2, "'mamba'", False),
    "no configuration": (without("config.json"), 1, "config.json", False),
    "no JSON": (text_in("config.json", "{", trusted=True), 1, "config.json", False),
    "another size": (config_with(dim=48), 1, "shape", False),
    "impossible": (config_with(heads=5), 1, "5 heads", False),
    "a wrong type": (config_with(dim="wide"), 1, "model.dim", False),
    "nested deeply": (config_with(trained={"recipe": {"eval": json.loads("[" * 900 + "]" * 900)}}), 1, "nested", False),
    "garbage for weights": (text_in("model.safetensors", "garbage", trusted=True), 1, "weights", False),
    "garbage for a tokenizer": (text_in("tokenizer.model", "garbage", trusted=True), 1, "tokenizer.model", False),
}


@pytest.mark.parametrize(("damage", "code", "named", "trust"), DAMAGES.values(), ids=map(str, DAMAGES))
def test_a_damaged_export_is_told_in_one_line(exports, tmp_path, damage, code, named, trust):
    folder = shutil.copytree(exports["modern"], tmp_path / "exported")
    damage(folder)
    error = pkmlm("eval", folder, code=code).stderr
    assert named in error
    assert len(error.splitlines()) <= 2
    assert ("delete manifest.json" in error) == trust


def test_a_model_larger_than_its_weights_is_told_before_memory_is_taken(exports, tmp_path):
    folder = shutil.copytree(exports["modern"], tmp_path / "exported")
    config_with(vocab_size=2**31 - 1)(folder)  # 256 GiB of embeddings
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 37, before[1]))
    try:
        said = pkmlm("eval", folder, code=1).stderr
        assert "tensor model.embedding.weight has shape [600, 32] (expected [2147483647, 32])" in said
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_weights_that_are_whole_numbers_are_refused(exports, tmp_path):
    folder = shutil.copytree(exports["modern"], tmp_path / "exported")
    (folder / "manifest.json").unlink()
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"].long()}, folder / "model.safetensors")
    said = pkmlm("eval", folder, code=1).stderr
    assert "tensor model.norm.weight is I64 (expected F64, F32, BF16, F16)" in said


def test_reading_needs_no_transformers_and_runs_no_code(exports, tmp_path, monkeypatch):
    folder = shutil.copytree(exports["product-key"], tmp_path / "exported")
    for path in folder.glob("*.py"):
        path.write_text("raise SystemExit(99)")
    (folder / "manifest.json").unlink()  # which would tell that the code is another
    ours = pkmlm("generate", exports["product-key"], "It was", "-n", 20).stdout
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)  # a test of architecture looks at earlier imports
    assert pkmlm("generate", folder, "It was", "-n", 20).stdout == ours


def test_weights_in_several_files_are_read(exports, trained, tmp_path):
    from pkmlm.export.modeling_pkmlm import PkmlmForCausalLM

    PkmlmForCausalLM.from_pretrained(exports["product-key"]).save_pretrained(tmp_path, max_shard_size="50KB")
    shutil.copy(exports["product-key"] / "tokenizer.model", tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = torch.arange(20)[None]
    assert torch.equal(load_run(tmp_path).model(ids), load_run(trained("product-key"), "latest").model(ids))
    index = tmp_path / "model.safetensors.index.json"
    for text in (
        '{"weight_map": {"model.norm.weight": "../model.safetensors"}}',  # files of the folder alone
        "{",
        '{"weight_map": {"model.norm.weight": 5}}',
    ):
        index.write_text(text)
        assert index.name in pkmlm("eval", tmp_path, code=1).stderr
    pkmlm("export", trained("product-key"), "-o", tmp_path, "--force")
    assert not list(tmp_path.glob("model-*"))


def test_a_weight_that_fp16_cannot_hold_is_told(trained, tmp_path):
    from pkmlm.errors import UserError
    from pkmlm.export.config import Origin
    from pkmlm.export.folder import write_export

    run = load_run(trained("dense"), "latest")
    with torch.no_grad():
        run.model.norm.weight[3] = 1e6
    how = (run.model, run.recipe, run.tokenizer, Origin("x", 30, 1), "card")
    with pytest.raises(UserError, match=r"model\.norm\.weight does not fit fp16"):
        write_export(tmp_path / "half", *how, dtype="fp16")
    assert list(tmp_path.iterdir()) == []
    write_export(tmp_path / "half", *how, dtype="bf16")
