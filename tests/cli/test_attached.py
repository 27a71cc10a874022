"""The commands on a memory that is attached to a model of transformers."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

import pkmlm as package
from pkmlm.export.modeling_pkmlm import PkmlmForCausalLM
from tests import PATIENCE
from tests.byte_level import learn_byte_level
from tests.conftest import ROOT, pkmlm
from tests.task_rows import write_rows

MEMORY = {"kind": "product-key", "num_keys": 16, "heads": 2, "topk": 4, "key_dim": 16}


@pytest.fixture(scope="module")
def base(write_recipe, tmp_path_factory):
    """An export with our code, which a dense model has if transformers knows no such block."""
    folder = tmp_path_factory.mktemp("base")
    pkmlm("train", write_recipe(folder, "dense"), "-o", folder / "run", "-s", "model.smear=true", "-q")
    pkmlm("export", folder / "run", "-o", folder / "exported")
    return folder / "exported"


@pytest.fixture(scope="module")
def attached(base, tmp_path_factory):
    """Folders of a memory as it starts, and as three steps leave it."""
    folder = tmp_path_factory.mktemp("attached")
    model = PkmlmForCausalLM.from_pretrained(base)
    attachment = package.attach(model, MEMORY, layers=[1, 2])
    attachment.save(folder / "new")
    teach(model, attachment)
    attachment.save(folder / "taught")
    return folder


@pytest.fixture(scope="module")
def ngrams(base, attached):
    """Likewise of an n-gram memory, whose canonical ids are those of the tokenizer in the base's folder."""
    model = PkmlmForCausalLM.from_pretrained(base)
    memory = {"kind": "ngram", "orders": [1, 2], "heads": 2, "rows": 101, "row_dim": 8}
    attachment = package.attach(model, memory, layers=[1, 2])
    attachment.save(attached / "new-ngrams")
    teach(model, attachment)
    attachment.save(attached / "ngrams")
    return attached / "ngrams"


def teach(model, attachment):
    optimizer = attachment.optimizer(0.05)
    ids = torch.randint(10, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def perplexity(*words):
    return json.loads(pkmlm("eval", *words, "-q", "--json").stdout)


def test_a_text_begins_with_the_token_that_the_base_s_config_names(base, novels, tmp_path):
    model = PkmlmForCausalLM.from_pretrained(base)
    model.config.bos_token_id = 20
    model.save_pretrained(tmp_path / "base")
    shutil.copy(base / "tokenizer.model", tmp_path / "base")
    model = PkmlmForCausalLM.from_pretrained(tmp_path / "base")
    package.attach(model, MEMORY, layers=[1]).save(tmp_path / "memory")
    (tmp_path / "short.txt").write_text((novels / "test.txt").read_text()[:20])
    found = perplexity(tmp_path / "memory", "--text", tmp_path / "short.txt")["perplexity"]
    ids = package.load_run(base).tokenizer.encode((tmp_path / "short.txt").read_text())
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([[20, *ids[:-1]]])).logits.log_softmax(-1)[0]
    assert found["tokens"] == len(ids) <= model.config.max_position_embeddings
    assert found["nll"] == pytest.approx(-scores[range(len(ids)), ids].sum().item(), rel=1e-5)


def test_a_buffer_may_be_a_single_number(base, novels, tmp_path):
    """Gemma keeps the factor of its embeddings so."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    size = package.load_run(base).tokenizer.size
    GemmaForCausalLM(GemmaConfig(vocab_size=size, **shape, **heads)).save_pretrained(tmp_path / "base")
    shutil.copy(base / "tokenizer.model", tmp_path / "base")
    model = GemmaForCausalLM.from_pretrained(tmp_path / "base")
    package.attach(model, MEMORY, layers=[1]).save(tmp_path / "memory")
    (tmp_path / "short.txt").write_text((novels / "test.txt").read_text()[:200])
    assert perplexity(tmp_path / "memory", "--text", tmp_path / "short.txt")["perplexity"]["tokens"] > 20


def test_eval_of_a_new_memory_is_that_of_its_base_and_of_a_taught_one_another(base, attached, novels):
    text = ["--text", novels / "test.txt"]
    plain = perplexity(base, *text)
    new = perplexity(attached / "new", "--base", base, *text)
    assert new["perplexity"]["nll"] == pytest.approx(plain["perplexity"]["nll"], rel=1e-6)
    assert (new["run"], new["step"]) == ("new", 0)
    taught = perplexity(attached / "taught", *text)  # where the base was
    assert taught["step"] == 3
    assert abs(taught["perplexity"]["nll"] / plain["perplexity"]["nll"] - 1) > 1e-4
    assert {file.name for file in (attached / "taught").iterdir()} == {
        *("attached.json", "attached.safetensors", "manifest.json")
    }


@pytest.mark.slow
def test_tasks_usage_slots_and_probe_take_it(base, attached, tokens, tmp_path):
    tasks = ["--tasks", "piqa", "--task-data", write_rows(tmp_path / "rows")]
    plain, new = (perplexity(*words, *tasks)["tasks"]["piqa"] for words in ([base], [attached / "new"]))
    assert new == plain
    report = json.loads(
        pkmlm("usage-report", attached / "taught", "--base", base, "--data", tokens, "--format", "json").stdout
    )
    found = report["runs"][0]["memories"]
    assert [(each["memory"], each["layer"]) for each in found] == [("memory", 1), ("memory", 2)]
    slots = json.loads(pkmlm("slots", attached / "taught", "--base", base, "--data", tokens, "--json").stdout)
    assert (slots["layer"], slots["kind"]) == (2, "product-key")
    probed = json.loads(pkmlm("probe", attached / "taught", "--base", base, "--data", tokens, "--json").stdout)
    real = perplexity(attached / "taught", "--data", tokens)["perplexity"]
    assert probed["real"]["nats"] == pytest.approx(real["nll"] / real["tokens"], rel=1e-6)
    assert [each["layer"] for each in probed["memories"]][:2] == [1, 2]


@pytest.mark.slow
def test_the_commands_take_an_n_gram_memory(base, attached, ngrams, tokens, tmp_path):
    where = ["--base", base, "--data", tokens]
    plain, new = (perplexity(path, "--data", tokens)["perplexity"]["nll"] for path in (base, attached / "new-ngrams"))
    assert new == pytest.approx(plain, rel=1e-6)
    report = json.loads(pkmlm("usage-report", ngrams, *where, "--format", "json").stdout)["runs"][0]
    assert [(each["layer"], each["kind"]) for each in report["memories"]] == [(1, "ngram"), (2, "ngram")]
    assert [(each["layer"], each["order"]) for each in report["ngrams"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    slots = json.loads(pkmlm("slots", ngrams, *where, "--layer", 1, "--json").stdout)
    assert slots["tokens"] == report["memories"][0]["tokens"]
    strongest = slots["slots"][0]
    row = json.loads(pkmlm("slots", ngrams, *where, "--layer", 1, "--slot", strongest["name"], "--json").stdout)
    assert sum(each["count"] for each in row["ngrams"]) == strongest["reads"]  # of the n-grams that fall into it
    probed = json.loads(pkmlm("probe", ngrams, *where, "--json").stdout)
    real = perplexity(ngrams, "--data", tokens)["perplexity"]
    assert probed["real"]["nats"] == pytest.approx(real["nll"] / real["tokens"], rel=1e-6)
    assert abs(real["nll"] / plain - 1) > 1e-5
    tasks = ["--tasks", "piqa", "--task-data", write_rows(tmp_path / "rows")]
    of_base, of_new = (perplexity(path, *tasks)["tasks"]["piqa"] for path in (base, attached / "new-ngrams"))
    assert of_new == of_base


@pytest.mark.parametrize("kind", ["new", "new-ngrams"])
def test_generation_goes_on_with_a_cache(base, attached, ngrams, kind):
    words = ["It was", "--temperature", 0, "--tokens", 12, "-q"]
    elsewhere = [attached / kind, "--base", base]
    plain, *new = (pkmlm("generate", *where, *words).stdout for where in ([base], [attached / kind], elsewhere))
    assert new == [plain, plain]


def test_gpt2_of_transformers_with_its_own_tokenizer(tmp_path, novels):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = learn_byte_level((novels / "train.txt").read_text())
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config).bfloat16()
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    package.attach(model, MEMORY, layers=[1], mode="replace").save(tmp_path / "memory")
    found = perplexity(tmp_path / "memory", "--base", tmp_path / "gpt2", "--text", novels / "test.txt")
    assert found["perplexity"]["token_ppl"] == pytest.approx(400, rel=0.1)  # it knows nothing
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2", dtype="bfloat16")
    package.attach(again, {"kind": "ngram", "heads": 2, "rows": 101, "row_dim": 8}, layers=[1]).save(
        tmp_path / "ngrams"
    )
    words = [tmp_path / "ngrams", "--text", novels / "test.txt"]
    assert perplexity(*words)["perplexity"]["token_ppl"] == pytest.approx(400, rel=0.1)
    learn_byte_level((novels / "train.txt").read_text().upper()).save(str(tmp_path / "gpt2" / "tokenizer.json"))
    assert "canonical ids" in pkmlm("eval", *words, code=2).stderr
    (tmp_path / "gpt2" / "tokenizer.json").unlink()
    assert "holds no tokenizer" in pkmlm("eval", *words, code=2).stderr
    weights = tmp_path / "gpt2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "transformers cannot load it" in pkmlm("eval", *words, code=2).stderr


def test_a_wrong_base_is_refused(base, attached, trained, tmp_path, novels):
    text = ["--text", novels / "test.txt"]
    assert "is for an attached memory" in pkmlm("eval", base, "--base", base, *text, code=2).stderr
    assert "not a model's folder" in pkmlm("eval", attached / "new", "--base", tmp_path, *text, code=2).stderr
    broken = tmp_path / "broken"
    for change in ({"vocab_size": 32}, {"dim": "wide"}, None):
        shutil.copytree(base, broken)
        (broken / "manifest.json").unlink()
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps([] if change is None else config | change))
        said = pkmlm("eval", attached / "new", "--base", broken, *text, code=2).stderr
        assert str(broken) in said.splitlines()[-2 if "hint: " in said else -1], said
        assert "Traceback" not in said
        shutil.rmtree(broken)
    package.attach_dense(
        PkmlmForCausalLM.from_pretrained(base),
        like=package.attach(PkmlmForCausalLM.from_pretrained(base), MEMORY, layers=[1]),
    ).save(tmp_path / "control")
    for command in ("usage-report", "slots", "probe"):
        said = pkmlm(
            command, tmp_path / "control", "--base", base, *(text if command != "probe" else []), code=2
        ).stderr
        assert "no memory" in said
    counted = ["--background", tmp_path / "background.npz"]
    assert "attached to a model" in pkmlm("usage-report", attached / "new", *counted, code=2).stderr
    pkmlm("export", trained("product-key"), "-o", tmp_path / "other")
    said = pkmlm("eval", attached / "new", "--base", tmp_path / "other", *text, code=2).stderr
    assert "another network" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_the_script_that_teaches_a_memory(base, tokens, tmp_path):
    script, out = ROOT / "recipes" / "attach" / "teach.py", tmp_path / "taught"
    memory = json.dumps({**MEMORY, "kind": "peer"})
    words = ["-o", out, "--base", base, "--data", tokens, "--tokens", 3000, "--batch-tokens", 256, "--layers", 2]
    words += ["--lrs", 1e-3, 1e-2]
    done = subprocess.run(
        [sys.executable, script, *map(str, words), "--memory", memory, "--seeds", "1", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "results.json").read_text())
    plain = perplexity(base, "--data", tokens)["perplexity"]["token_ppl"]
    assert found["base"] == pytest.approx(plain, rel=1e-5)
    rows = {(row["what"], row["equal"], row["lr"], row["seed"]): row for row in found["rows"]}
    best = found["rates"]
    assert rows.keys() == {
        *((kind, "tokens", lr, 1) for kind in best for lr in (1e-3, 1e-2)),
        *((kind, "tokens", lr, 2) for kind, lr in best.items()),
        *(("dense control", "seconds", best["dense control"], seed) for seed in (1, 2)),
    }
    for kind, lr in best.items():
        valid = {rate: rows[kind, "tokens", rate, 1]["valid_perplexity"] for rate in (1e-3, 1e-2)}
        assert valid[lr] == min(valid.values())
    taught = rows["memory", "tokens", best["memory"], 2]
    assert taught["tokens"] == 3072
    assert taught["test_perplexity"] < plain
    saved = perplexity(out / f"memory-2-{best['memory']:g}", "--base", base, "--data", tokens)
    assert saved["perplexity"]["token_ppl"] == pytest.approx(taught["test_perplexity"], rel=1e-5)
    assert "dense control" in done.stdout
