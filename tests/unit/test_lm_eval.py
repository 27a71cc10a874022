"""The model that lm_eval sees: a bigram whose probabilities are known, and what goes wrong around it."""

import math
import os
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from torch import nn

from pkmlm.environment import work_offline_without_hub
from pkmlm.errors import UserError
from pkmlm.evaluate.documents import documents_of_texts
from pkmlm.evaluate.lm_eval import PkmLM, score_tasks
from pkmlm.evaluate.load import load_run
from pkmlm.evaluate.perplexity import score
from pkmlm.evaluate.tasks import load_tasks
from tests import PATIENCE
from tests.conftest import ROOT
from tests.task_rows import write_rows


class Bigram(nn.Module):
    """After token i comes i + 1 with probability 1/2, and each other token with the same share of the rest."""

    def __init__(self, size: int, context: int = 8):
        super().__init__()
        self.context, self.embedding = context, nn.Embedding(size, 1)
        self.forwards: list[tuple[int, int]] = []
        chance_VV = torch.full((size, size), 0.5 / (size - 1), dtype=torch.float64)
        chance_VV[torch.arange(size), (torch.arange(size) + 1) % size] = 0.5
        self.register_buffer("log_VV", chance_VV.log())

    def hidden(self, tokens_BT, cache=None, layout=None):
        self.forwards.append(tuple(tokens_BT.shape))
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return nn.functional.one_hot(tokens_BT, len(self.log_VV)).double()

    def head(self, h_MV):
        return h_MV @ self.log_VV


@pytest.fixture(scope="module")
def run(trained):
    loaded = load_run(trained("dense"), "latest")
    return replace(loaded, model=Bigram(loaded.tokenizer.size))


@pytest.fixture
def adapter(run) -> PkmLM:
    run.model.forwards.clear()
    return PkmLM(run)


def ask(kind: str, *arguments: tuple, task: str = "mine") -> list[Instance]:
    return [Instance(kind, {}, each, 0, (task, place, 1)) for place, each in enumerate(arguments)]


def by_hand(ids: list[int], first: int, size: int) -> float:
    """log p of ids[first:], each after the one before it."""
    follows = [after == (before + 1) % size for before, after in zip(ids[first - 1 :], ids[first:], strict=False)]
    return sum(math.log(0.5) if hit else math.log(0.5 / (size - 1)) for hit in follows)


def test_known_probabilities_of_continuations(run, adapter):
    tokenizer = run.tokenizer
    pairs = [("He", " went"), ("He went", " away"), ("", "He went"), ("\n ", "He"), ("He ", "went away")]
    whole = [tokenizer.encode(a + b) for a, b in pairs]
    before = [len(tokenizer.encode(a.rstrip())) for a, _ in pairs]
    found = adapter.loglikelihood(ask("loglikelihood", *pairs))
    for (value, greedy), ids, first in zip(found, whole, before, strict=True):
        ids, first = ([tokenizer.eos, *ids], 1) if first == 0 else (ids, first)
        assert value == pytest.approx(by_hand(ids, first, tokenizer.size), rel=1e-12)
        assert greedy is False
    chain = tokenizer.decode([300, 301, 302])
    assert tokenizer.encode(chain) == [300, 301, 302], "the pieces of this test must stand by themselves"
    start = tokenizer.decode([300])
    assert adapter.loglikelihood(ask("loglikelihood", (start, chain[len(start) :]))) == [
        (pytest.approx(2 * math.log(0.5)), True)
    ]


def test_known_probabilities_of_whole_texts(run, adapter):
    texts = ["He went away and the door fell shut behind him", "", "x"]
    found = adapter.loglikelihood_rolling(ask("loglikelihood_rolling", *((text,) for text in texts)))
    eos, size = run.tokenizer.eos, run.tokenizer.size
    expected = [by_hand([eos, *run.tokenizer.encode(text)], 1, size) for text in texts]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[1] == 0.0


def test_known_continuations_of_greedy_generation(run, adapter):
    size, last = run.tokenizer.size, run.tokenizer.encode("He went")[-1]
    text = run.tokenizer.decode([(last + 1 + i) % size for i in range(12)])
    pieces = ask("generate_until", ("He went", {"until": [], "max_gen_toks": 12}))
    assert adapter.generate_until(pieces) == [text]
    every = {"max_gen_toks": 12, "do_sample": True, "temperature": 1e-300, "top_k": 0}  # as transformers has it: of all
    assert adapter.generate_until(ask("generate_until", ("He went", every))) == [text]
    stop = text[5:8]
    cut = text[: text.index(stop)]
    options = {"until": ["never", stop], "max_gen_toks": 12, "do_sample": False, "temperature": 1.0}
    run.model.forwards.clear()
    assert adapter.generate_until(ask("generate_until", ("He went", options))) == [cut]
    assert len(run.model.forwards) < 12  # it stops there


def test_an_empty_continuation_is_certain_and_white_space_belongs_to_what_follows(adapter):
    empty, one, other = adapter.loglikelihood(ask("loglikelihood", ("He", ""), ("He ", "went"), ("He", " went")))
    assert empty == (0.0, True)
    assert one == other


def test_a_token_that_spans_the_join_is_scored(run, adapter):
    ids = run.tokenizer.encode("He went")
    for place in range(1, len("He went")):
        before, after = adapter._encode_pair("He went"[:place], "He went"[place:])
        assert [*(() if before == [run.tokenizer.eos] else before), *after] == ids
        assert after


def test_requests_are_counted_in_which_a_token_spans_the_join(adapter, novels):
    """These, and no others, lm-eval's own models encode as something else."""
    text = (novels / "test.txt").read_text()[:300]
    pairs = [(text[:place], text[place : place + 9]) for place in range(1, len(text) - 9)]
    differ = []
    for pair in pairs:
        theirs = TemplateLM._encode_pair(adapter, *pair)
        differ.append((theirs[0] or [adapter.prefix_token_id], theirs[1]) != adapter._encode_pair(*pair))
    assert 20 < sum(differ) < len(pairs) - 20
    adapter.loglikelihood(ask("loglikelihood", *pairs, ("", "He"), ("He", ""), task="some"))
    for task, found in (("apart", False), ("joined", True)):
        asked = [pair for pair, differs in zip(pairs, differ, strict=True) if differs == found][:20]
        adapter.loglikelihood(ask("loglikelihood", *asked, task=task))
    assert adapter.spanning == {"some": sum(differ), "apart": 0, "joined": 20}


def test_requests_beyond_the_context_are_cut_and_counted(run, adapter):
    short, long = ("He", " went"), ("He went away and then came back again to the house", " and slept")
    found = adapter.loglikelihood(ask("loglikelihood", short, long, task="one"))
    adapter.loglikelihood(ask("loglikelihood", short, task="two"))
    assert adapter.truncated == {"one": 1, "two": 0}
    ids = run.tokenizer.encode("".join(long))
    first = len(run.tokenizer.encode(long[0]))
    assert len(ids) - first < 8 < len(ids)
    assert found[1][0] == pytest.approx(by_hand(ids, first, run.tokenizer.size))  # a bigram does not miss what is cut
    assert max(length for _, length in run.model.forwards) <= 8
    for digits, cut in ((8, 0), (9, 1)):  # a digit is a token; the last one is not read
        assert len(run.tokenizer.encode("1" * digits + "2")) == digits + 1
        adapter.loglikelihood(ask("loglikelihood", ("1" * digits, "2"), task=f"{digits} digits"))
        assert adapter.truncated[f"{digits} digits"] == cut


def test_answers_keep_the_order_of_the_questions(run):
    pairs = [("He", f" went {'on ' * (place % 5)}away") for place in range(23)]
    one_by_one = [PkmLM(run).loglikelihood(ask("loglikelihood", pair))[0] for pair in pairs]
    for size in (None, "auto:4", "3"):
        run.model.forwards.clear()
        assert PkmLM(run, batch_size=size).loglikelihood(ask("loglikelihood", *pairs)) == one_by_one
    rows, lengths = zip(*run.model.forwards, strict=True)
    assert max(rows) == 3
    assert list(lengths) == sorted(lengths, reverse=True)


class Cramped(Bigram):
    """A bigram for whose forwards memory suffices up to `most` tokens."""

    most = 20

    def hidden(self, tokens_BT, cache=None, layout=None):
        if tokens_BT.numel() > self.most:
            self.forwards.append((0, 0))
            raise torch.OutOfMemoryError("no more")
        return super().hidden(tokens_BT, cache, layout)


def test_batches_are_halved_where_memory_runs_out(run, adapter):
    pairs = [(f"{place} He", " went") for place in range(40)]
    expected = adapter.loglikelihood(ask("loglikelihood", *pairs))
    model = Cramped(run.tokenizer.size)
    small = PkmLM(replace(run, model=model), batch_size=16)
    assert small.loglikelihood(ask("loglikelihood", *pairs)) == expected
    failed = model.forwards.count((0, 0))
    assert 1 <= failed <= 4  # it learns from the first batch
    texts = ask("loglikelihood_rolling", ("He went away " * 20,))
    assert small.loglikelihood_rolling(texts) == pytest.approx(adapter.loglikelihood_rolling(texts))
    model.most = 2
    with pytest.raises(UserError, match="not enough memory") as error:
        small.loglikelihood(ask("loglikelihood", *pairs))
    assert error.value.exit_code == 1


def test_other_failures_are_not_taken_for_memory(run):
    class Broken(Bigram):
        def hidden(self, tokens_BT, cache=None, layout=None):
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        PkmLM(replace(run, model=Broken(600))).loglikelihood(ask("loglikelihood", ("He", " went")))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_scores_that_are_not_finite_are_an_error(run, bad):
    model = Bigram(run.tokenizer.size)
    model.log_VV[:] = bad
    for kind, arguments in (("loglikelihood", ("He", " went")), ("loglikelihood_rolling", ("He went",))):
        with pytest.raises(UserError, match="not finite") as error:
            getattr(PkmLM(replace(run, model=model)), kind)(ask(kind, arguments))
        assert error.value.exit_code == 1


def test_rolling_perplexity_is_that_of_eval(trained, novels):
    loaded = load_run(trained("product-key"), "latest")
    texts = [(novels / f"{split}.txt").read_text() for split in ("test", "valid")]
    sums = PkmLM(loaded).loglikelihood_rolling(ask("loglikelihood_rolling", *((text,) for text in texts)))
    ids = [np.array(loaded.tokenizer.encode(text)) for text in texts]
    result = score(loaded.model, documents_of_texts("both", ids, texts), loaded.tokenizer.eos)
    assert -sum(sums) == pytest.approx(result.nll, rel=1e-9)


def test_lm_eval_builds_it_from_its_arguments(trained):
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import get_model

    from pkmlm.cli.lm_eval import register

    register()
    assert get_model("pkmlm") is PkmLM
    assert get_model("dummy") is not PkmLM  # lm_eval's own are still there
    given = {"batch_size": 1, "max_batch_size": None, "device": "cuda"}
    model = PkmLM.create_from_arg_obj({"run": str(trained("dense")), "step": 20}, given)
    assert (model.run.step, model.max_length, model.batch_size) == (20, 32, 1)
    assert model.get_model_info()["model_dtype"] == "torch.float32"


def test_lm_evals_own_command_takes_rows_from_a_folder(trained, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    from pkmlm.cli.lm_eval import register, take_rows_from

    folder = write_rows(tmp_path / "rows")
    monkeypatch.setattr(lm_eval, "simple_evaluate", lm_eval.simple_evaluate, raising=False)  # put back afterwards
    register()
    take_rows_from(folder)
    given = {"model": "pkmlm", "model_args": {"run": str(trained("dense"))}, "bootstrap_iters": 0}
    given["task_manager"] = TaskManager(include_defaults=False)  # the index takes seconds
    found = lm_eval.simple_evaluate(tasks=["piqa"], num_fewshot=None, **given)["results"]["piqa"]
    run = load_run(trained("dense"), "latest")
    ours, _ = score_tasks(run, load_tasks("piqa", folder, None))
    assert found["acc,none"] == ours["tasks"]["piqa"]["acc"]
    assert found["acc_norm,none"] == ours["tasks"]["piqa"]["acc_norm"]
    for wrong, says in (({"tasks": [{"task": "mine"}]}, "names a file"), ({"num_fewshot": 2}, "needs 2 few-shot")):
        with pytest.raises(UserError, match=says):
            lm_eval.simple_evaluate(**{"tasks": ["piqa"], "num_fewshot": None, **given, **wrong})


@pytest.mark.parametrize(("up", "before", "after"), [(True, None, None), (False, None, "1"), (False, "0", "0")])
def test_without_the_hub_its_library_is_told_to_work_offline(up, before, after, monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HF_HUB_OFFLINE") if before is None else monkeypatch.setenv("HF_HUB_OFFLINE", before)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if not up:
            server.close()
        work_offline_without_hub()
    assert os.environ.get("HF_HUB_OFFLINE") == after


@pytest.mark.slow
@pytest.mark.parametrize("rows", [True, False])
def test_lm_evals_own_command_ends_in_a_line_without_a_network(rows, trained, tmp_path):
    folder = ["--task-data", write_rows(tmp_path / "rows")] if rows else []
    words = ["run", "--model", "pkmlm", "--model_args", f"run={trained('dense')}", "--tasks", "piqa", *folder]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | nowhere
    command = [sys.executable, "-m", "pkmlm.cli.lm_eval", *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    if rows:
        assert "|piqa" in done.stdout
    else:
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-2].startswith("error: ")


def test_the_entry_point_names_the_adapter():
    import importlib
    import re

    module, name = re.search(
        r'"lm_eval\.models": \["pkmlm = ([\w.]+):(\w+)"\]', (ROOT / "setup.py").read_text()
    ).groups()
    assert getattr(importlib.import_module(module), name) is PkmLM
