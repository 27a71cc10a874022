"""Slot-wise fine-tuning: backgrounds, the choice of slots, and what stays as it is, to the bit."""

import json
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.evaluate.load import load_run
from pkmlm.evaluate.perplexity import score_windows, windows
from pkmlm.kernels import backend, reference
from pkmlm.kernels.row_gradient import RowGradient
from pkmlm.measure.background import Background
from pkmlm.memory.base import usage_taps
from pkmlm.memory.table import tables_of
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.results import read_metrics, write_arrays
from pkmlm.train.loss_scale import LossScale
from pkmlm.train.optim import optimizer_state
from pkmlm.train.slot_choice import TableBackground, best_rows
from pkmlm.train.step import TrainState, train_step
from tests.conftest import given, pkmlm

KINDS = ("product-key", "flat-key", "memory-plus", "peer")


def by_numpy(
    kind: str, counts: np.ndarray, top: int, batches: int, read_by: np.ndarray, reads: np.ndarray
) -> list[int]:
    """The definition of the choice, a row at a time."""
    scores = {}
    for row in np.flatnonzero(counts):
        share = counts[row] / counts.sum()
        scores[row] = share * {
            "count": lambda row, share: 1.0,
            "tfidf": lambda row, share: np.log((batches + 1) / (read_by[row] + 1)),
            "kl": lambda row, share: np.log(share / ((reads[row] + 1) / (reads.sum() + len(reads)))),
        }[kind](row, share)
    return sorted(scores, key=lambda row: (-scores[row], row))[:top]


@pytest.mark.parametrize("kind", ["count", "tfidf", "kl"])
def test_the_chosen_rows_are_numpys(kind):
    rng = np.random.default_rng(1)
    for top in (1, 7, 40, 1000):
        counts = rng.integers(0, 6, 300) * rng.integers(0, 2, 300)
        read_by = rng.integers(0, 51, 300)
        reads = read_by * rng.integers(1, 5, 300)
        background = TableBackground(50, torch.from_numpy(read_by), torch.from_numpy(reads))
        found = best_rows(kind, torch.from_numpy(counts), top, background)
        assert found.tolist() == by_numpy(kind, counts, top, 50, read_by, reads)


def test_a_slot_that_all_batches_read_gives_way_to_a_rare_one():
    """The example of the paper's score, by hand: shares 0.8, 0.1, 0.1; read by 900, 0 and 10 of 1,000 batches."""
    background = TableBackground(1000, torch.tensor([900, 0, 10]), torch.tensor([9000, 0, 10]))
    counts = torch.tensor([8, 1, 1])
    assert best_rows("tfidf", counts, 3, background).tolist() == [1, 2, 0]
    assert best_rows("count", counts, 1).tolist() == [0]


@pytest.mark.parametrize("folded", [False, True])
def test_a_gradient_that_keeps_some_rows_is_zero_in_the_others(folded):
    torch.manual_seed(1)
    gradient, whole = RowGradient(20), RowGradient(20)
    slots = torch.randint(20, (2, 9, 4))
    for part in slots:
        x, weights = torch.randn(9, 8), torch.rand(9, 4)
        for each in (gradient, whole):
            each.add(x, part, weights)
    if folded:
        gradient.fold()
    chosen = torch.rand(20) < 0.4
    gradient.keep(chosen)
    expected = whole.dense() * chosen[:, None]
    torch.testing.assert_close(gradient.dense(), expected)
    assert float(gradient.norm()) == pytest.approx(float(expected.norm()))
    for each in (backend.of(x), reference):  # with no row left, too
        none = each.only(each.sort_reads(slots[0], weights, 20), torch.zeros(20, dtype=torch.bool))
        assert each.segment_sum(x, none).shape == (0, 8)
        assert float(each.squared_norm(x, none)) == 0.0
    gradient.clear()
    assert gradient.chosen_K is None


@pytest.fixture(scope="module")
def background_of(trained, tmp_path_factory):
    """A function that writes the background of a tiny run and returns its file."""
    folder = tmp_path_factory.mktemp("backgrounds")

    def write(kind: str) -> Path:
        file = folder / f"{kind}.npz"
        if not file.exists():
            pkmlm("usage-report", trained(kind), "--background", file, "-q")
        return file

    return write


def finetuning(recipe, **values):
    """A recipe that trains five slots of a step, and tables only."""
    memories = {
        name: replace(memory, optim=replace(memory.optim, **values)) for name, memory in recipe.model.memories.items()
    }
    return replace(
        recipe,
        train=replace(recipe.train, only="values"),
        finetune=replace(recipe.finetune, slots="tfidf", top=5, background="given"),
        model=replace(recipe.model, memories=memories),
    )


def state_of(run: Path, recipe, background: Path, precision: str = "fp32") -> TrainState:
    corpus = Corpus(recipe.data.dir, "valid")
    model = load_run(run).model.requires_grad_(True)
    return TrainState(recipe, model, Batches.of(corpus, recipe), precision, background=Background.read(background))


@pytest.mark.parametrize("optimizer", ["row-adam", "row-sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_moves_the_chosen_rows_and_nothing_else(kind, optimizer, trained, background_of):
    run = trained(kind)
    recipe = finetuning(load_recipe(run / "recipe.yaml"), optimizer=optimizer)
    state = state_of(run, recipe, background_of(kind))
    background = Background.read(background_of(kind))
    tables = {path.removesuffix(".weight_KD"): table for path, table in tables_of(state.model).items()}
    assert [group.name for group in state.param_groups] == list(recipe.model.memories)
    counts, take = {}, state.slot_choice.counters.take

    def noting():
        taken = take()
        counts.update({path: taken[path].numpy() for path in tables})
        return taken

    state.slot_choice.counters.take = noting
    for step in range(1, 6):
        before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        moments = {name: tensor.clone() for name, tensor in optimizer_state(state.param_groups).items()}
        counts.clear()
        train_step(state, step)
        for path in tables:
            read_by, reads = background.read_by[path], background.reads[path]
            chosen = by_numpy("tfidf", counts[path], 5, background.batches, read_by, reads)
            name = f"{path}.weight_KD"
            moved = (state.model.state_dict()[name] != before[name]).any(1).nonzero()[:, 0].tolist()
            assert moved == sorted(chosen)
            others = torch.ones(len(before[name]), dtype=torch.bool).index_fill_(0, torch.tensor(chosen), False)
            for key in ("exp_avg", "exp_avg_sq") if optimizer == "row-adam" else ():
                now = optimizer_state(state.param_groups)[f"{name}|{key}"]
                assert torch.equal(now[others], moments[f"{name}|{key}"][others])
                assert not torch.equal(now, moments[f"{name}|{key}"])
            before.pop(name)
        assert all(parameter.grad is None for parameter in state.model.parameters()), "nothing else has a gradient"
        for name, tensor in before.items():  # running statistics, too
            assert torch.equal(state.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("recompute", [False, True])
def test_what_fills_up_the_last_piece_does_not_count(recompute, trained, background_of):
    """A step's reads are those at the positions that it scores, also after a validation."""
    run = trained("product-key")
    recipe = finetuning(load_recipe(run / "recipe.yaml"))
    recipe = replace(recipe, train=replace(recipe.train, recompute=recompute))
    state, model, found = state_of(run, recipe, background_of("product-key")), load_run(run).model, []
    (tap,) = usage_taps(model)
    tap.register_forward_hook(lambda _, __, reads: found.append(reads[0]))
    state.slot_choice.choose = lambda world: None
    last = next(step for step in count(1) if state.batches.scored(step) < recipe.train.batch_tokens)
    for step in (last, last + 1):
        state.model.eval()(torch.zeros(1, 4, dtype=torch.int64))
        train_step(state, step)
        (reads_K,) = state.slot_choice.counters.take().values()
        expected_K = torch.zeros_like(reads_K)
        for index in range(recipe.micro_batches(1)):
            tokens_BT, targets_BT = state.batches.micro_batch(step, index, recipe.train.micro_batch)
            with torch.no_grad():
                model(tokens_BT)
            expected_K += torch.bincount(found.pop()[(targets_BT >= 0).flatten()].flatten(), minlength=len(reads_K))
        assert torch.equal(reads_K, expected_K), step


@pytest.mark.parametrize("only", ["all", "values"])
def test_a_loss_scale_grows_whatever_trains(only, trained, background_of):
    run = trained("product-key")
    recipe = finetuning(load_recipe(run / "recipe.yaml"))
    recipe = replace(recipe, train=replace(recipe.train, only=only))
    state = state_of(run, recipe, background_of("product-key"), "fp16")
    state.loss_scale = LossScale(2.0**8, interval=2)
    scales = []
    for step in range(1, 6):
        assert not train_step(state, step).skipped
        scales.append(state.loss_scale.scale / 2**8)
    assert scales == [1, 2, 2, 4, 4]


def test_row_sgd_is_plain_gradient_descent(trained, background_of):
    """Against torch.optim.SGD on the dense gradient, where every slot may move."""
    run = trained("product-key")
    recipe = finetuning(load_recipe(run / "recipe.yaml"), optimizer="row-sgd", lr=0.5, clip=0.0, weight_decay=0.0)
    recipe = replace(recipe, finetune=replace(recipe.finetune, slots="all"))
    state = state_of(run, recipe, background_of("product-key"))
    plain = load_run(run).model
    (table,) = tables_of(plain).values()
    table.requires_grad_()
    sgd = torch.optim.SGD([table.weight_KD], lr=0.5)
    for step in (1, 2, 3):
        train_step(state, step)
        for index in range(2):
            batch = state.batches.micro_batch(step, index, 4)
            plain.loss(*batch, 1 / state.batches.scored(step)).backward()
        sgd.step()
        sgd.zero_grad()
    (own,) = tables_of(state.model).values()
    torch.testing.assert_close(own.weight_KD, table.weight_KD, rtol=1e-4, atol=1e-6)
    assert not torch.equal(
        own.weight_KD, load_run(run).model.state_dict()["blocks.1.parts.memory_pkm.values.weight_KD"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_background_counts_the_batches_that_read_a_slot(kind, trained, tmp_path):
    """Against a plain loop over the same windows, one at a time, that asks the taps."""
    words = ["usage-report", trained(kind), "--split", "valid", "--batch-tokens", 100, "--background"]
    pkmlm(*words, tmp_path / "b.npz")
    background, run = Background.read(tmp_path / "b.npz"), load_run(trained(kind), "latest")
    corpus = Corpus(run.recipe.data.dir, "valid")
    slots: list[torch.Tensor] = []
    for tap in usage_taps(run.model):
        tap.register_forward_hook(lambda tap, inputs, out: slots.append(out[0].flatten(1)))
    batches: list[list[torch.Tensor]] = []
    left = 0
    for document in range(corpus.documents):
        for window in windows(corpus.document(document), run.tokenizer.eos, 32, 32):
            if left <= 0:
                batches.append([])
                left = 100
            score_windows(run.model, [window])
            batches[-1] += [read[-len(window.targets) :].flatten() for read in slots]
            slots.clear()
            left -= len(window.targets)
    (memory,) = run.recipe.model.memories.values()
    slot_count = memory.num_keys**2
    counts = [torch.bincount(torch.cat(batch), minlength=slot_count) for batch in batches]
    assert background.batches == len(batches) > 20
    assert len(background.reads) == (2 if kind == "peer" else 1)
    for path in background.reads:
        assert background.reads[path].tolist() == sum(counts).tolist()
        assert background.read_by[path].tolist() == sum((each > 0).long() for each in counts).tolist()
    few = [tmp_path / "few.npz", "--batches", 7, "--format", "json"]
    told = json.loads(pkmlm(*words, *few).stdout)
    spread = [min(n for n in range(len(counts)) if 128 * n >= part * corpus.tokens / 7) for part in range(7)]
    expected = sum((counts[number] > 0).long() for number in spread)
    assert (told["batches"], told["split"]) == (7, "valid")
    for path, read_by in Background.read(tmp_path / "few.npz").read_by.items():
        assert read_by.tolist() == expected.tolist(), path


def test_text_that_is_not_divided_as_the_runs_is_warned_of(trained, tmp_path):
    """As by the other commands: the demo's novels are single documents, and this run's tokens know no separator."""
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("One document.\n\n\nAnother one.\n" * 20)
    pkmlm("tokenize", text, "--separator", r"\n\n\n", "--vocab-size", 300, "-o", tmp_path / "tokens")
    recipe = trained("product-key") / "recipe.yaml"
    keys = f"data.dir={tmp_path / 'tokens'}", "train.steps=1", "optim.warmup_steps=0", "eval.every=0"
    pkmlm("train", recipe, "-o", run, "-q", *given(*keys))
    told = pkmlm("usage-report", run, "--text", text, "--background", tmp_path / "b.npz", "-q", "--format", "csv")
    assert "--separator" in told.stderr
    assert not told.stdout.endswith("\n\n")


def test_what_has_no_background_is_refused(trained, tmp_path):
    file = tmp_path / "b.npz"
    assert "no memory" in pkmlm("usage-report", trained("dense"), "--background", file, code=2).stderr
    both = ["usage-report", trained("product-key"), "--background", file, "--plots", tmp_path / "plots"]
    assert "--background takes one run" in pkmlm(*both, code=2).stderr
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_background_is_refused(trained, background_of, tmp_path):
    run = trained("product-key")
    whole = background_of("product-key").read_bytes()
    (tmp_path / "torn.npz").write_bytes(whole[: len(whole) // 2])
    write_arrays(tmp_path / "other.npz", {"counts": np.arange(3)})
    words = ["train", run / "recipe.yaml", *given("train.only=values", "finetune.slots=tfidf"), "--dry-run"]
    for file, code, told in (
        ("torn.npz", 1, "damaged"),
        ("other.npz", 2, "is not a background"),
        ("none.npz", 1, "missing"),
        (background_of("memory-plus"), 2, "has 0 slots of blocks.1.parts.memory_pkm.values (expected 256)"),
    ):
        done = pkmlm(*words, *given(f"finetune.background={tmp_path / file}"), code=code)
        assert told in done.stderr
        assert "finetune.background" in done.stderr
    smaller = given("model.memories.pkm.num_keys=8", f"finetune.background={background_of('product-key')}")
    told = pkmlm(*words, *smaller, code=2).stderr
    assert "has 256 slots of blocks.1.parts.memory_pkm.values (expected 64)" in told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["model.memories=null", "train.only=values"], "train.only: found values in a model without a memory"),
        (["finetune.slots=tfidf"], "finetune.background: tfidf compares with a background"),
        (
            ["finetune.slots=count", "model.memories.pkm.optim.optimizer=adam"],
            "model.memories.pkm.optim.optimizer: adam moves every row",
        ),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused_in_one_line(trained, keys, told):
    done = pkmlm("train", trained("product-key") / "recipe.yaml", "--dry-run", *given(*keys), code=2)
    assert told in done.stderr.splitlines()[0]


def test_a_run_that_was_stopped_goes_on_to_the_bit(trained, background_of, tmp_path):
    start, file, moved = trained("product-key"), tmp_path / "background.npz", tmp_path / "moved.npz"
    shutil.copy(background_of("product-key"), file)
    keys = [f"train.init_from={start}", "train.only=values", "finetune.slots=tfidf", "finetune.top=9", "train.steps=8"]
    keys += ["checkpoint.every=4", "model.memories.pkm.optim.lr=1e-2"]

    def train(name: str, background: Path, code: int = 0):
        words = ["train", start / "recipe.yaml", "-o", tmp_path / name, "-q"]
        return pkmlm(*words, *given(*keys, f"finetune.background={background}"), code=code)

    def halve(run: Path) -> None:
        shutil.rmtree(run / "checkpoints/step-00000008")
        (run / "done").unlink()

    train("whole", file)
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    halve(tmp_path / "half")
    shutil.move(file, moved)  # the same content elsewhere
    train("half", moved)
    for name in ("weights.safetensors", "optimizer.safetensors"):
        whole, half = ((tmp_path / run / "checkpoints/step-00000008" / name).read_bytes() for run in ("whole", "half"))
        assert whole == half
    events = read_metrics(tmp_path / "half/metrics.jsonl")
    assert {line["event"] for line in events} >= {"train", "valid"}
    assert all(line["grad_norm"] > 0 for line in events if line["event"] == "train")
    halve(tmp_path / "half")
    pkmlm("usage-report", start, "--split", "test", "--background", moved, "--force", "-q")
    assert "was trained by another background than" in train("half", moved, code=2).stderr


def test_a_background_of_another_checkpoint_is_warned_of(trained, background_of, tmp_path):
    start = trained("product-key")
    pkmlm("usage-report", start, "--step", "20", "--background", tmp_path / "b.npz", "-q")
    for file, warned in ((tmp_path / "b.npz", True), (background_of("product-key"), False)):
        keys = f"train.init_from={start}", "train.only=values", "finetune.slots=kl", f"finetune.background={file}"
        told = pkmlm("train", start / "recipe.yaml", "--dry-run", *given(*keys))
        assert ("another checkpoint than that of finetune.background" in told.stderr) == warned
        assert "trains       tables of the memories alone, of each table the first 500 slots" in told.stdout
