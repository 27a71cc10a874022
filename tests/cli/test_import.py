"""`pkmlm import`: folders that transformers wrote become runs which compute the same, and are trained further."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from torch.nn.functional import cross_entropy

from pkmlm import load_run
from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.evaluate.generate import Sampling, generate
from pkmlm.model.convert import ARCHITECTURES, architecture_of
from pkmlm.model.convert.asked import EVERYWHERE, Asked
from pkmlm.recipe.schema import Model
from tests.byte_level import END, learn_byte_level
from tests.conftest import given, pkmlm

ROWS, CONTEXT = 407, 48
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": ROWS}
LLAMA = {**SIZES, "intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
LLAMA_3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
CUT_OFF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.34}  # 32 of 96, not 33
NEOX = {**SIZES, "hidden_size": 32, "intermediate_size": 56, "max_position_embeddings": CONTEXT}
GPT_2 = {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "vocab_size": ROWS}
MODELS = {
    "llama": (
        "Llama",
        {**LLAMA, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
    ),
    "llama-tied-biased": ("Llama", {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-3": ("Llama", {**LLAMA, "head_dim": 8, "rope_parameters": LLAMA_3}),
    "llama-linear": ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 10, "tie_word_embeddings": True}),
    "neox": ("GPTNeoX", NEOX),
    "neox-cut-off": ("GPTNeoX", {**NEOX, "hidden_size": 192, "num_attention_heads": 2, "rope_parameters": CUT_OFF}),
    "neox-in-a-row": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "gpt2": ("GPT2", GPT_2),
    "gpt2-untied": ("GPT2", {**GPT_2, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"}),
}


def model_of(kind: str) -> torch.nn.Module:
    """A model whose every weight is random: gains and biases, too."""
    name, keys = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**keys, bos_token_id=0, eos_token_id=0)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(1)
    model = getattr(transformers, head)(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


@pytest.fixture(scope="module")
def tokenizer(novels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    learn_byte_level((novels / "train.txt").read_text()).save(str(file))
    return file


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Path):
    """A function that saves a model of a kind, with a tokenizer, and returns both."""

    def save(kind: str, **options: object) -> tuple[Path, torch.nn.Module]:
        model = model_of(kind)
        model.save_pretrained(tmp_path / kind, **options)
        shutil.copy(tokenizer, tmp_path / kind)
        return tmp_path / kind, model

    return save


def random_tokens(rows: int = 4) -> torch.Tensor:
    return torch.randint(1, 400, (rows, CONTEXT), generator=torch.Generator().manual_seed(2))


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("kind", MODELS)
def test_an_imported_model_computes_what_the_original_does(kind, saved, tmp_path):
    folder, theirs = saved(kind)
    pkmlm("import", folder, "-o", tmp_path / "run")
    ours, tokens = load_run(tmp_path / "run"), random_tokens()
    with torch.no_grad():
        found = ours.model(tokens)
    torch.testing.assert_close(found, logits_of(theirs, tokens), rtol=1e-5, atol=1e-5)
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(tokens[:1, :8], do_sample=False, max_new_tokens=20)[0, 8:].tolist()
    assert [*generate(ours.model, tokens[0, :8].tolist(), Sampling(temperature=0), 20, ROWS)] == expected
    assert ours.recipe.model.vocab_size == ROWS
    assert ours.tokenizer.size == 400
    assert ours.recipe.train.batch_tokens == ours.recipe.train.micro_batch * CONTEXT <= 8192
    assert (ours.recipe.optim.matrices, ours.recipe.optim.lr) == ("adamw", 1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_an_imported_model_is_exported_as_what_it_was(kind, saved, tmp_path):
    folder, theirs = saved(kind)
    pkmlm("import", folder, "-o", tmp_path / "run")
    assert type(theirs).__name__ in pkmlm("export", tmp_path / "run", "-o", tmp_path / "back").stdout
    assert not list((tmp_path / "back").glob("*.py"))
    assert " 0 tokens" not in (tmp_path / "back/README.md").read_text()
    back, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back"), random_tokens()
    assert type(back) is type(theirs)
    torch.testing.assert_close(logits_of(back, tokens), logits_of(theirs, tokens), rtol=0, atol=2e-6)
    first, again = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    own = load_run(tmp_path / "back")
    assert torch.equal(own.model(tokens), load_run(tmp_path / "run").model(tokens))
    assert (own.name, own.step) == ("back", 0)


SECTIONS = {  # of recipes
    "llama": Model(bias="none", qk_norm=False),
    "qwen2": Model(bias="qkv", qk_norm=False),
    "qwen3": Model(bias="none", qk_norm=True),
    "gpt_neox": Model(norm="layer", ffn="gelu", bias="all", qk_norm=False),
    "gpt2": Model(norm="layer", ffn="gelu-tanh", bias="all", qk_norm=False, positions="learned"),
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_an_export_drops_out_as_the_run_did(kind):
    section = replace(SECTIONS[kind], vocab_size=64, dim=32, layers=2, heads=4, dropout=0.25)
    assert architecture_of(section) is ARCHITECTURES[kind]
    keys = ARCHITECTURES[kind].config(section)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    asked = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert asked | {getattr(module, "attention_dropout", 0.25) for module in model.modules()} == {0.25}


def test_heads_that_do_not_divide_the_width_are_no_llama(tmp_path):
    section = replace(SECTIONS["llama"], vocab_size=64, dim=32, layers=2, heads=3, head_dim=8)
    assert architecture_of(section) is None
    keys = ARCHITECTURES["qwen3"].config(replace(section, qk_norm=True))
    transformers.AutoConfig.for_model("qwen3", **keys).save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).head_dim == 8


def test_a_dense_run_becomes_a_model_of_transformers(tokens, write_recipe, novels, tmp_path):
    for kind, changes, name in (
        ("modern", ["model.smear=false"], "Qwen3ForCausalLM"),
        ("dense", ["model.positions=rotary", "model.rotary_fraction=0.5"], "GPTNeoXForCausalLM"),
    ):
        run, folder = tmp_path / kind, tmp_path / f"{kind}-exported"
        settings = given("model.memories=null", "train.steps=2", "train.precision=fp32", *changes)
        pkmlm("train", write_recipe(tmp_path, kind), "-o", run, *settings, "-q")
        assert name in pkmlm("export", run, "-o", folder).stdout
        text = (novels / "test.txt").read_text()[:2000] + "\u2581 caf\u00e9 \u2581\u2581 \U0001f469"
        ours, theirs = load_run(run, "latest"), transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text).input_ids
        assert ids == [ours.tokenizer.eos, *ours.tokenizer.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        batch = torch.tensor(ids[:32])[None]
        torch.testing.assert_close(logits_of(theirs, batch), ours.model(batch), rtol=1e-5, atol=1e-5)
        scored = [json.loads(pkmlm("eval", each, "--json").stdout) for each in (run, folder)]
        assert scored[0]["perplexity"]["nll"] == pytest.approx(scored[1]["perplexity"]["nll"], rel=1e-6)
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
        assert "model.safetensors" in pkmlm("eval", folder, "--data", tokens, code=1).stderr
    pkmlm("export", tmp_path / "dense", "-o", folder, "--force")


def test_a_qwen2_has_no_sentencepiece_tokenizer(write_recipe, tmp_path):
    run, folder = tmp_path / "run", tmp_path / "exported"
    settings = given("model.memories=null", "model.bias=qkv", "model.qk_norm=false", "model.smear=false")
    pkmlm("train", write_recipe(tmp_path, "modern"), "-o", run, *settings, *given("train.steps=1"), "-q")
    pkmlm("export", run, "-o", folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert theirs("It was").input_ids[1:] == load_run(run, "latest").tokenizer.encode("It was")


def test_a_run_that_went_out_and_came_back_trains_as_if_it_never_had(write_recipe, tmp_path):
    recipe, first = write_recipe(tmp_path, "dense"), tmp_path / "first"
    pkmlm("train", recipe, "-o", first, *given("train.steps=3"), "-q")
    pkmlm("export", first, "-o", tmp_path / "out")
    pkmlm("import", tmp_path / "out", "-o", tmp_path / "back")
    losses = []
    for start in ("first", "back"):
        more = given(f"train.init_from={tmp_path / start}", "train.steps=4", "train.seed=2")
        pkmlm("train", recipe, "-o", tmp_path / f"on-{start}", *more, "-q")
        lines = map(json.loads, (tmp_path / f"on-{start}" / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if line["event"] == "train"])
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def test_shards_bare_names_and_half_precision_are_read(saved, tmp_path):
    folder, theirs = saved("gpt2", max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    pkmlm("import", folder, "-o", tmp_path / "shards")
    base = tmp_path / "base"
    shutil.copytree(folder, base, ignore=shutil.ignore_patterns("model*"))
    theirs.transformer.bfloat16().save_pretrained(base)  # without a head, as GPT-2's own files are
    shutil.copy(folder / "config.json", base)
    pkmlm("import", base, "-o", tmp_path / "bare")
    tokens = random_tokens()
    expected = logits_of(theirs.float(), tokens)
    with torch.no_grad():
        torch.testing.assert_close(load_run(tmp_path / "bare").model(tokens), expected, rtol=1e-5, atol=1e-5)
        shards = load_run(tmp_path / "shards").model(tokens)
    torch.testing.assert_close(shards, expected, rtol=0.05, atol=0.05)
    assert not torch.equal(shards, expected)


def test_names_of_wrappers_and_variants_are_read(saved, tmp_path):
    folder, _ = saved("neox")
    pkmlm("import", folder, "-o", tmp_path / "first")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({f"module._orig_mod.{name}": each for name, each in weights.items()}, folder / "model.fp32.safetensors")
    pkmlm("import", folder, "-o", tmp_path / "second")
    tokens = random_tokens()
    assert torch.equal(*(load_run(tmp_path / name).model(tokens) for name in ("first", "second")))


def test_a_head_that_is_written_out_must_be_the_embedding(saved, tmp_path):
    folder, _ = saved("llama-tied-biased")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    pkmlm("import", folder, "-o", tmp_path / "run")
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, folder / "model.safetensors")
    assert "lm_head.weight" in pkmlm("import", folder, "-o", tmp_path / "other", code=2).stderr
    assert not (tmp_path / "other").exists()


ASKED_FOR = {
    "sliding_window": ("qwen2", {"use_sliding_window": True}),
    "window": ("llama", {"sliding_window": 4096}),
    "softcapping": ("qwen3", {"attn_logit_softcapping": 50.0}),
    "experts": ("neox", {"num_local_experts": 8}),
    "rope": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
    "hidden_act": ("llama", {"hidden_act": "gelu"}),
    "partial_rotary_factor": ("llama", {"partial_rotary_factor": 0.5}),
    "layer_types": ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "quantization_config": ("neox", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "per_layer_config": ("qwen2", {"per_layer_config": {"1": {"intermediate_size": 8}}}),
    "add_cross_attention": ("gpt2", {"add_cross_attention": True}),
    "attention_bias": ("llama", {"attention_bias": True}),
    "scale_attn_by_inverse_layer_idx": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "model_type": ("llama", {"model_type": "mamba"}),
    "num_hidden_layers": ("llama", {"num_hidden_layers": 1_000_000_000}),
    "vocab_size": ("llama", {"vocab_size": 1_000_000_000_000}),
    "num_attention_heads": ("llama", {"num_attention_heads": "four"}),
}


@pytest.mark.parametrize("key", ASKED_FOR)
def test_what_our_model_has_not_is_refused_by_its_key(key, saved, tmp_path):
    kind, changes = ASKED_FOR[key]
    folder, _ = saved(kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    done = pkmlm("import", folder, "-o", tmp_path / "run", code=2)
    assert key.split("_")[-1] in done.stderr
    assert done.stderr.count("\n") <= 2
    assert not (tmp_path / "run").exists()


SINCE_2023 = {
    **{"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.40.1", "use_cache": True, "bos_token_id": 0, "eos_token_id": 0},
}
LLAMA_2023 = SINCE_2023 | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False}
LLAMA_2023 |= {"pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False}
QWEN_KEYS = SINCE_2023 | {"attention_dropout": 0.0, "rope_theta": 1e6, "tie_word_embeddings": True}
QWEN_KEYS |= {"max_window_layers": 24, "use_sliding_window": False}
PYTHIA = {
    **{"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0},
    **{"hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-05, "rotary_emb_base": 10000},
    **{"rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0"},
    **{"use_cache": True, "use_parallel_residual": True},
}
PUBLISHED = {  # the keys of what is on the hub; the sizes are smaller
    "tinyllama": LLAMA | LLAMA_2023,
    "smollm2-135m": LLAMA
    | LLAMA_2023
    | {"is_llama_config": True, "rope_interleaved": False, "attention_dropout": 0.0, "mlp_bias": False}
    | {"rope_theta": 100000, "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "f"}}},
    "unsloth llama-3.2-1b": LLAMA
    | LLAMA_2023
    | {"attention_dropout": 0.0, "head_dim": 8, "mlp_bias": False, "pad_token_id": 4, "unsloth_fixed": True}
    | {"rope_theta": 500000.0, "rope_scaling": {key: LLAMA_3[key] for key in LLAMA_3 if key != "rope_theta"}},
    "qwen2.5-0.5b": LLAMA
    | QWEN_KEYS
    | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32768, "use_mrope": False},
    "qwen3-0.6b": LLAMA
    | QWEN_KEYS
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "sliding_window": None, "rope_scaling": None}
    | {"attention_bias": False, "head_dim": 10},
    "pythia-70m": NEOX | PYTHIA,
    "dolly-v2-3b": NEOX
    | PYTHIA
    | {"gradient_checkpointing": False, "custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.I"}}},
    "gpt2-medium": GPT_2
    | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
    | {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "bos_token_id": 0, "eos_token_id": 0}
    | {"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": CONTEXT, "n_special": 0, "output_past": True}
    | {"predict_special_tokens": True, "summary_activation": None, "summary_first_dropout": 0.1}
    | {"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True}
    | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_on_the_hub_is_imported(name, tokenizer, tmp_path):
    keys, folder = PUBLISHED[name], tmp_path / "hub"
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**keys)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(keys))
    shutil.copy(tokenizer, folder)
    pkmlm("import", folder, "-o", tmp_path / "run")
    tokens = random_tokens()
    with torch.no_grad():
        ours = load_run(tmp_path / "run").model(tokens)
    torch.testing.assert_close(ours, logits_of(theirs, tokens), rtol=1e-5, atol=1e-5)


# What configurations of transformers say that changes no logits of a model in evaluation mode.
HARMLESS = {
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "use_cache"),
    *("chunk_size_feed_forward", "id2label", "label2id", "problem_type", "initializer_range", "is_decoder"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp", "reorder_and_upcast_attn"),
    *("sliding_window", "max_window_layers"),  # of `use_sliding_window`
}


@pytest.mark.parametrize("name", ["tinyllama", "qwen2.5-0.5b", "qwen3-0.6b", "pythia-70m", "gpt2-medium"])
def test_every_key_that_the_class_in_transformers_knows_is_read(name):
    keys, read = PUBLISHED[name], set(EVERYWHERE)

    class Noted(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:
            read.add(key)
            return super().get(key, default)

    ARCHITECTURES[str(keys["model_type"])].keys(Asked(Noted(keys), "config.json"))
    known = {field.name for field in fields(transformers.AutoConfig.for_model(keys["model_type"]))}
    silent = {key for key in known if key.startswith("summary_") or key.endswith(("_dropout", "_pdrop"))}
    assert known - read == known & (HARMLESS | silent)


def damaged(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    match how:
        case "pickle":
            torch.save(weights, folder / "pytorch_model.bin")
            file.unlink()
        case "missing shard":
            shutil.copy(file, folder / "model-00001-of-00002.safetensors")
            index = dict.fromkeys(weights, "model-00002-of-00002.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
        case "shape":
            weights["model.norm.weight"] = torch.ones(23)
        case "nan":
            weights["model.layers.1.mlp.up_proj.weight"][2, 2] = float("nan")
        case "missing":
            del weights["model.layers.2.mlp.up_proj.weight"]
        case "foreign":
            weights["model.layers.1.mlp.experts.weight"] = torch.ones(2)
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
    if how in ("shape", "nan", "missing", "foreign"):
        save_file(weights, file)


HOW = ["pickle", "missing shard", "cut", "shape", "nan", "missing", "foreign", "no tokenizer"]


@pytest.mark.parametrize("how", HOW)
def test_a_bad_folder_is_one_line_and_leaves_nothing(how, saved, tmp_path):
    folder, _ = saved("llama")
    (folder / "modeling_llama.py").write_text("raise SystemExit('this code was run')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_llama.Model"}}))
    before = {path.name for path in tmp_path.iterdir()}
    assert "auto_map" in pkmlm("import", folder, "-o", tmp_path / "run", code=2).stderr
    (folder / "config.json").write_text(json.dumps(config))
    damaged(folder, how)
    code = 1 if how in ("missing shard", "cut", "nan", "missing") else 2
    done = pkmlm("import", folder, "-o", tmp_path / "run", code=code)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 2
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_imported_model_is_measured_and_trained_further(saved, novels, tmp_path):
    folder, _ = saved("qwen3")
    run, tokens = tmp_path / "run", tmp_path / "tokens"
    pkmlm("import", folder, "-o", run)
    splits = [f"--{split}={novels / split}.txt" for split in ("valid", "test")]
    pkmlm("tokenize", novels / "train.txt", *splits, "-o", tokens, "--tokenizer", run / "tokenizer.json")
    scored = json.loads(pkmlm("eval", run, "--text", novels / "test.txt", "--json").stdout)["perplexity"]
    assert scored["tokens"] > 1000
    pkmlm("generate", run, "It was", "-n", 3)
    settings = given(f"data.dir={tokens}", f"train.init_from={run}", "train.steps=2", "train.batch_tokens=96")
    settings += given("train.micro_batch=2")
    settings += given("optim.lr=1e-9", "optim.muon.lr=1e-9")
    assert "imported" in pkmlm("train", run / "recipe.yaml", "-o", run, *settings, code=2).stderr
    memory = "{kind: product-key, layers: 2+, num_keys: 8, heads: 2, topk: 4, key_dim: 8, value_dim: 24}"
    for name, memories in (("dense", "null"), ("facts", f"{{facts: {memory}}}")):
        more = given(f"model.memories={memories}")
        said = pkmlm("train", run / "recipe.yaml", "-o", tmp_path / name, *settings, *more, "-q").stderr
        assert "random weights" not in said
    said = pkmlm("train", run / "recipe.yaml", *settings, *given("train.init_from=null"), "--dry-run").stderr
    assert f"-s train.init_from={run}" in said
    again = json.loads(pkmlm("eval", tmp_path / "dense", "--text", novels / "test.txt", "--json").stdout)["perplexity"]
    assert again["nll"] == pytest.approx(scored["nll"], rel=1e-4)
    assert "facts" in pkmlm("usage-report", tmp_path / "facts").stdout


def test_what_begins_a_text_stands_before_each_document(saved, novels, tmp_path):
    folder, theirs = saved("llama")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<s>"])
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 400)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    backend.save(str(folder / "tokenizer.json"))
    run, tokens, document = tmp_path / "run", tmp_path / "tokens", "It was a dark night."
    pkmlm("import", folder, "-o", run)
    loaded = load_run(run)
    end = loaded.tokenizer.eos
    assert (loaded.prefix, end) == (400, backend.token_to_id(END))
    (tmp_path / "short.txt").write_text(f"{document}---{document}---Another.")
    pkmlm("tokenize", tmp_path / "short.txt", "--separator", "---", "--tokenizer", run / "tokenizer.json", "-o", tokens)
    read, targets = Batches(Corpus(tokens, "train"), CONTEXT, 1, seed=1).micro_batch(1, 0, 1)
    ids = loaded.tokenizer.encode(document)
    length = len(ids) + 1
    assert read[0, : 2 * length].tolist() == [400, *ids, 400, *ids]
    assert targets[0, : 2 * length].tolist() == [*ids, end, *ids, end]
    (tmp_path / "one.txt").write_text(document)
    scored = json.loads(pkmlm("eval", run, "--text", tmp_path / "one.txt", "--json").stdout)["perplexity"]
    logits = logits_of(theirs, torch.tensor([[400, *ids]]))[0, :-1]
    assert scored["nll"] == pytest.approx(float(cross_entropy(logits, torch.tensor(ids), reduction="sum")), rel=1e-5)
