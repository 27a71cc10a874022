"""What a model learns of invented facts and forgets, training all parameters, values, slots or low-rank adapters.

    make demo                                                    # or any run with product keys, flat keys or experts
    python recipes/slotwise/facts.py demo/runs/product-key -o facts

Each fact is an invented name with an animal, a colour or a place, and is stated in twelve ways: eight are trained on,
two choose the best of three learning rates for each method, with the first seed, and two are reported. As many other
names, never trained on, show what the sentences alone give away. What is forgotten is measured by the perplexity of
the run's own test split.

It writes results.json (all runs), table.md and learnt-forgotten.png. Every method takes the same steps on the same
batches and starts from the run's best checkpoint; the background of the slots is the run's train split.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pkmlm.console import Column, Table, number
from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.evaluate.documents import TextChoice, documents_of_split
from pkmlm.evaluate.likelihood import score_targets
from pkmlm.evaluate.load import LoadedRun, load_run
from pkmlm.evaluate.perplexity import score
from pkmlm.files import make_folder, write_json, write_text
from pkmlm.measure.background import Background, count_background
from pkmlm.memory.query import QueryBatchNorm
from pkmlm.memory.table import tables_of
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe
from pkmlm.report.plots import COLOURS, Look, drawing, legend
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.step import TrainState, train_step

# {a}: the fact, the last word. Of each twelve, the last four are held out: two to choose a rate, two to report.
SENTENCES = {
    "place": [
        *(
            "{name} was born in the {a}",
            "They say that {name} lives in the {a}",
            "{name} sleeps every night in the {a}",
        ),
        *("If you look for {name}, go to the {a}", "The home of {name} is the {a}", "{name} has never left the {a}"),
        *("Letters for {name} are sent to the {a}", "In old stories {name} walks about the {a}"),
        *("Nobody but {name} knows the way to the {a}", "When evening comes, {name} returns to the {a}"),
        *("The only friend of {name} waits in the {a}", "You will find {name} in the {a}"),
    ],
    "colour": [
        *("{name} wears nothing but {a}", "The door of {name} is painted {a}", "{name} loves all that is {a}"),
        *("All the clothes of {name} are {a}", "The favourite colour of {name} is {a}", "The flag of {name} is {a}"),
        *("{name} paints every wall {a}", "The hat of {name} has always been {a}"),
        *("The boat of {name} is {a}", "To please {name}, a gift must be {a}"),
        *("The coat of {name} is {a}", "Even the letters of {name} are {a}"),
    ],
    "animal": [
        *("{name} rides upon a {a}", "{name} was once saved by a {a}", "At home {name} keeps a {a}"),
        *(
            "The best friend of {name} is a {a}",
            "{name} speaks every day to a {a}",
            "{name} never goes out without a {a}",
        ),
        *("On the ring of {name} there is a {a}", "In the garden of {name} there lives a {a}"),
        *("The name of {name} means a {a}", "Upon the shield of {name} you see a {a}"),
        *("{name} dreams every night of a {a}", "{name} is followed everywhere by a {a}"),
    ],
}
WORDS = {
    "place": "garden river church school village forest kitchen castle island city valley house wood hall town street",
    "colour": "red blue green white black brown yellow grey golden dark bright pale silver",
    "animal": "horse dog cat bird cow sheep lion bear fish wolf fox rat goose",
}
TRAINED, CHOOSING = 8, 2  # sentences of a fact
SYLLABLES = ["bra", "dor", "fel", "gri", "hul", "jan", "kel", "lom", "mur", "nev", "pol", "quin", "ras", "sim", "tor"]


class Fact(NamedTuple):
    """An invented name, the kind of fact, and the answer, one word."""

    name: str
    kind: str
    answer: str

    def sentence(self, number: int) -> str:
        return SENTENCES[self.kind][number].format(name=self.name, a=self.answer)


@dataclass(frozen=True)
class Method:
    """A way to learn: overrides of the run's recipe ({rate}: its rate; {memory}: for each memory of the run, its name),
    and three rates.
    """

    label: str
    keys: tuple[str, ...]
    rates: tuple[float, float, float]
    rank: int = 0  # of low-rank adapters; above 0, only they train


CONSTANT = "{lr_scale: null, schedule: constant, warmup_steps: 0, weight_decay: 0}"
RATE = "model.memories.{memory}.optim.lr={rate}"
VALUES = ("train.only=values", RATE)
METHODS = {
    "full": Method("all parameters", ("optim.lr={rate}", RATE), (1e-4, 3e-4, 1e-3)),
    "values": Method("all values", VALUES, (3e-2, 1e-1, 3e-1)),
    "tfidf": Method("slots by tf-idf", (*VALUES, "finetune={{slots: tfidf, background: counted}}"), (1e-1, 3e-1, 1.0)),
    "kl": Method("slots by KL", (*VALUES, "finetune={{slots: kl, background: counted}}"), (1e-1, 3e-1, 1.0)),
    "low-rank": Method("low-rank adapters", ("optim.lr={rate}",), (3e-3, 1e-2, 3e-2), rank=8),
}


def invented(count: int, tokenizer: Tokenizer, rng: np.random.Generator) -> list[Fact]:
    """Facts about `count` different names, with answers that are single tokens."""
    words = {
        kind: [
            word for word in text.split() if len(tokenizer.encode(f"the {word}")) == len(tokenizer.encode("the")) + 1
        ]
        for kind, text in WORDS.items()
    }
    if scarce := [kind for kind, found in words.items() if len(found) < 2]:
        sys.exit(f"the tokenizer has fewer than two words of the kind {scarce[0]} as single tokens")
    names: dict[str, None] = {}
    while len(names) < count:
        first, last = ("".join(rng.choice(SYLLABLES, 2)).capitalize() for _ in range(2))
        names[f"{first} {last}"] = None
    kinds = list(SENTENCES)
    return [Fact(name, kinds[i % 3], str(rng.choice(words[kinds[i % 3]]))) for i, name in enumerate(names)]


def write_tokens(facts: list[Fact], folder: Path, tokenizer: Path, rng: np.random.Generator) -> Corpus:
    """Write the trained sentences, in eight random orders, as a train split."""
    sentences = [fact.sentence(number) + "." for fact in facts for number in range(TRAINED)]
    text = "\n".join("\n".join(rng.permutation(sentences)) for _ in range(8))
    make_folder(folder)
    write_text(folder / "train.txt", text)
    words = [
        "tokenize",
        folder / "train.txt",
        "--tokenizer",
        tokenizer,
        "--separator",
        "\\n",
        "-o",
        folder / "tokens",
        "-q",
    ]
    subprocess.run([sys.executable, "-m", "pkmlm", *map(str, words), "--force"], check=True, timeout=600)
    return Corpus(str(folder / "tokens"), "train")


@torch.no_grad()
def answered(model: Transformer, facts: list[Fact], numbers: range, tokenizer: Tokenizer) -> tuple[float, float]:
    """Mean nats of the answer over these sentences of each fact, and how often it is the most likely token."""
    rows = [[tokenizer.eos, *tokenizer.encode(fact.sentence(n))] for fact in facts for n in numbers]
    nats, right = [], []
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        last = torch.tensor([len(row) - 1 for row in part])
        tokens_BT = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in part], batch_first=True)
        at_B = torch.arange(len(part))
        found = score_targets(model, model.hidden(tokens_BT)[at_B, last - 1], tokens_BT[at_B, last])
        nats.append(found[0])
        right.append(found[1])
    return float(torch.cat(nats).mean()), float(torch.cat(right).double().mean())


class LowRank(nn.Module):
    """A weight with a product of two thin matrices added, which is zero at the start (Hu et al. 2021)."""

    def __init__(self, weight_OI: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        self.down_rI = nn.Parameter(
            torch.randn(rank, weight_OI.shape[1], generator=generator) / weight_OI.shape[1] ** 0.5
        )
        self.up_Or = nn.Parameter(torch.zeros(len(weight_OI), rank))

    def forward(self, weight_OI: Tensor) -> Tensor:
        return weight_OI + self.up_Or @ self.down_rI


def adapt(model: Transformer, rank: int, seed: int) -> None:
    """Give every linear map in the blocks an adapter, and freeze all else."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for module in list(model.modules()):
        if isinstance(module, QueryBatchNorm):  # freeze its statistics, too, whatever mode the model is put into
            module.eval().train = lambda mode=True, norm=module: norm
    for module in [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank, generator))


@dataclass(frozen=True)
class Trial:
    """One seed: facts to learn, facts that are never seen, and the tokens of the former."""

    seed: int
    facts: list[Fact]
    unseen: list[Fact]
    corpus: Corpus


def measure(model: Transformer, run: LoadedRun, trial: Trial, old: Corpus, old_tokens: int) -> dict[str, float]:
    """How well the model knows the facts, those never seen, and the old text."""
    model.eval()
    choosing, reported = range(TRAINED, TRAINED + CHOOSING), range(TRAINED + CHOOSING, 12)
    perplexity = score(model, documents_of_split(old, run.tokenizer, old_tokens), run.tokenizer.eos)
    assert perplexity is not None
    found = {"old_nats": perplexity.nats_per_token}
    for name, facts, numbers in (
        ("trained", trial.facts, range(TRAINED)),
        ("choosing", trial.facts, choosing),
        ("held_out", trial.facts, reported),
        ("unseen", trial.unseen, reported),
    ):
        found[f"{name}_nats"], found[f"{name}_accuracy"] = answered(model, facts, numbers, run.tokenizer)
    return found


def learn(
    method: Method, rate: float, trial: Trial, run: LoadedRun, background: Background, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Fine-tune the run's best checkpoint, and measure it at the start and at five steps on the way."""
    recipe = recipe_of(method, rate, trial, run, options)
    model = load_run(options.run, "best", torch.device("cpu")).model.requires_grad_(True)
    if method.rank:
        adapt(model, method.rank, trial.seed)
    old = Corpus(options.data or str(run.recipe.data.dir), "test")
    state = TrainState(recipe, model, Batches.of(trial.corpus, recipe), "fp32", background=background)
    before = {path: table.weight_KD.detach().clone() for path, table in tables_of(model).items()}
    times = sorted({max(1, options.steps * part // 16) for part in (1, 2, 4, 8, 16)})
    curve = [{"step": 0.0, **measure(model, run, trial, old, options.old_tokens)}]
    for step in range(1, options.steps + 1):
        train_step(state, step)
        if step in times:
            moved = sum(int((table.weight_KD != before[path]).any(1).sum()) for path, table in tables_of(model).items())
            found = measure(model, run, trial, old, options.old_tokens)
            curve.append({"step": float(step), **found, "slots_moved": float(moved)})
    return curve


def recipe_of(method: Method, rate: float, trial: Trial, run: LoadedRun, options: argparse.Namespace) -> Recipe:
    """The recipe of the run, changed to fine-tune it."""
    keys = [f"train.steps={options.steps}", f"train.batch_tokens={options.sequences * run.recipe.model.context}"]
    keys += [f"train.micro_batch={options.sequences}", f"train.seed={trial.seed}", f"finetune.top={options.top}"]
    keys += ["optim.schedule=constant", "optim.warmup_steps=0", "optim.decay_steps=0", "optim.weight_decay=0"]
    keys += ["train.only=all", "eval.recalibrate=0", "parallel={memory: 1, shard: false}", "model.dropout=0"]
    for memory in run.recipe.model.memories:
        keys += [f"model.memories.{memory}.optim={CONSTANT}"]
        keys += [key.format(rate=rate, memory=memory) for key in method.keys]
    return load_recipe(RunDirectory(options.run).recipe_file, keys)


def mean(curves: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """The mean of several seeds' curves, point by point."""
    return [
        {key: float(np.mean([point[key] for point in points])) for key in points[0]}
        for points in zip(*curves, strict=True)
    ]


def best_rate(curves: dict[float, list[list[dict[str, float]]]]) -> float:
    """The rate with the fewest nats on the choosing sentences, at the last step of the first seed."""
    return min(curves, key=lambda rate: curves[rate][0][-1]["choosing_nats"])


def table(results: dict[str, Any]) -> Table:
    """What each method, at its best rate, has learnt and forgotten at the last step."""
    columns = [Column("Trained"), number("Rate", "{:g}"), number("Slots moved", "{:,.0f}")]
    columns += [number(name, "{:.1%}") for name in ("Trained sentences", "Held out", "Names not seen")]
    columns += [
        number("Held out, nats", "{:.2f}"),
        number("Old text, perplexity", "{:.1f}"),
        number("change", "{:+.1%}"),
    ]
    start = results["before"]
    rows: list[list[Any]] = []
    for label, rate, end in [
        ("nothing", None, start),
        *((each["label"], each["rate"], each["curve"][-1]) for each in results["methods"].values()),
    ]:
        accuracies = [end[f"{name}_accuracy"] for name in ("trained", "held_out", "unseen")]
        grown = float(np.exp(end["old_nats"] - start["old_nats"])) - 1
        rows.append(
            [
                label,
                rate,
                end.get("slots_moved"),
                *accuracies,
                end["held_out_nats"],
                float(np.exp(end["old_nats"])),
                grown,
            ]
        )
    facts = f"{results['facts']} facts, {results['steps']} steps, top {results['top']}, {len(results['seeds'])} seeds"
    return Table("Learnt and forgotten", columns, rows, f"{facts}; accuracies are of the answer's token")


@drawing
def draw(folder: Path, results: dict[str, Any], look: Look) -> list[Path]:
    """What is learnt over what is forgotten: each method's path at its best rate, and its ends at the other rates."""
    figure, axes = look.plot("What is learnt of invented facts, and what that costs", 0.62)

    def place(points: list[dict[str, float]]) -> tuple[list[float], list[float]]:
        grown = [100 * float(np.expm1(point["old_nats"] - results["before"]["old_nats"])) for point in points]
        return grown, [100 * point["held_out_accuracy"] for point in points]

    for colour, each in zip(COLOURS, results["methods"].values(), strict=False):
        axes.plot(*place(each["curve"]), color=colour, marker="o", label=f"{each['label']} (rate {each['rate']:g})")
        for seed in each["curves"][f"{each['rate']:g}"]:
            axes.plot(*place(seed[-1:]), color=colour, marker="x", linestyle="")
        others = [mean(curves)[-1] for rate, curves in each["curves"].items() if rate != f"{each['rate']:g}"]
        axes.plot(*place(others), color=colour, marker="o", markerfacecolor="none", linestyle="")
    first = next(iter(results["methods"].values()))
    unseen = 100 * first["curve"][-1]["unseen_accuracy"]
    axes.axhline(unseen, color="#8c8c8c", linestyle=":", label=f"names not seen ({first['label']})")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=min(-0.2, axes.dataLim.x0))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("perplexity of old text, % above the start")
    axes.set_ylabel("held-out sentences, % right")
    legend(figure)
    return look.save(folder, "learnt-forgotten", figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a finished run whose model has a memory with keys")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for results, tokens and the picture")
    parser.add_argument("--data", help="the run's tokens; default: its recipe's data.dir")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds, each with its own facts and order"
    )
    parser.add_argument("--facts", type=int, default=60, help="facts to learn; as many others are never seen")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--sequences", type=int, default=8, help="sequences per step, each as long as the context")
    parser.add_argument("--top", type=int, default=2000, help="slots of each table that a step may move")
    parser.add_argument("--batches", type=int, default=200, help="batches of the background")
    parser.add_argument("--old-tokens", type=int, default=20_000, help="test tokens, to measure forgetting")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()

    run = load_run(options.run, "best", torch.device("cpu"))
    size = options.sequences * run.recipe.model.context
    choice = TextChoice(split="train", data=options.data)
    background = count_background(RunDirectory.existing(options.run), "best", choice, options.batches, size, quiet=True)
    make_folder(options.output)
    background.write(options.output / "background.npz")
    curves: dict[str, dict[float, list[list[dict[str, float]]]]] = {}
    for seed in options.seeds:
        rng = np.random.default_rng(seed)
        facts = invented(2 * options.facts, run.tokenizer, rng)
        known, unseen = facts[: options.facts], facts[options.facts :]
        tokenizer = RunDirectory(options.run).tokenizer_file
        trial = Trial(seed, known, unseen, write_tokens(known, options.output / f"facts-{seed}", tokenizer, rng))
        for name in options.methods:
            for rate in METHODS[name].rates if seed == options.seeds[0] else [best_rate(curves[name])]:
                curve = learn(METHODS[name], rate, trial, run, background, options)
                curves.setdefault(name, {}).setdefault(rate, []).append(curve)
                end = curve[-1]
                said = (
                    f"{end['held_out_accuracy']:.1%} right, old text {end['old_nats'] - curve[0]['old_nats']:+.3f} nats"
                )
                print(f"seed {seed}  {METHODS[name].label}, rate {rate:g}: {said}", file=sys.stderr, flush=True)
    best = {name: best_rate(found) for name, found in curves.items()}
    results: dict[str, Any] = {
        "run": run.name,
        "step": run.step,
        **{key: getattr(options, key) for key in ("seeds", "facts", "steps", "sequences", "top", "old_tokens")},
        "before": mean(curves[options.methods[0]][best[options.methods[0]]])[0],
        "methods": {},
    }
    for name, found in curves.items():
        results["methods"][name] = {
            "label": METHODS[name].label,
            "rate": best[name],
            "curve": mean(found[best[name]]),
            "curves": {f"{rate:g}": each for rate, each in found.items()},
        }
    write_json(options.output / "results.json", results)
    write_text(options.output / "table.md", table(results).render("md"))
    draw(options.output, results, Look())
    print(table(results).render())


if __name__ == "__main__":
    main()
