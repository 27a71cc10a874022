"""What a pretrained model learns of invented facts, by a memory or without, and what it forgets of its old text.

    pkmlm train recipes/pretrained/facts-base.yaml -o runs/books-256        # or any dense run; or an imported model
    python recipes/pretrained/facts.py runs/books-256 -o facts

Each fact is an invented name with an animal, a colour or a place, and is stated in twelve ways, whose last word is the
answer. Eight are taught, two choose the learning rate of each method, with the first seed, and two are reported: the
model is asked in other words than it was taught. As many other names, never taught, show what the sentences alone give
away. What is forgotten is measured on the test split of the run's own tokens.

Methods differ in what learns: a memory beside the frozen model; only the values of a memory that was trained on old
text before, all of them or the slots that a step chooses (Lin et al. 2025); low-rank adapters (Hu et al. 2021); or all
parameters. Ways differ in what is learnt (all tokens, or the answers) and in what a sequence holds (one statement
after another, which see each other, or one). A method may be followed by a stage in which only the gates of each token
learn, on facts and old text in turn.

Each trial is a file in OUT/trials; the same command goes on where it was stopped. It writes results.json (all
trials), tables (table.md) and learnt-forgotten.png.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch

from pkmlm.bench.rounds import interleaved
from pkmlm.console import Column, Table, number
from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.device import DeviceSettings
from pkmlm.distributed import ProcessGroups
from pkmlm.environment import child_command
from pkmlm.evaluate.documents import TextChoice, documents_of_split
from pkmlm.evaluate.likelihood import Window, build_prefix_trees, score_trees
from pkmlm.evaluate.load import load_run
from pkmlm.evaluate.perplexity import score
from pkmlm.files import make_folder, write_json, write_text
from pkmlm.measure.background import count_background
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe
from pkmlm.report.plots import COLOURS, GREY, Look, drawing, legend
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.job import Job
from pkmlm.train.run import build_state, initial_model
from pkmlm.train.step import train_step

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
TAUGHT, CHOOSING, REPORTED = range(8), range(8, 10), range(10, 12)  # sentences of a fact
AMONG = 4  # answers of a question's choice
SYLLABLES = ["bra", "dor", "fel", "gri", "hul", "jan", "kel", "lom", "mur", "nev", "pol", "quin", "ras", "sim", "tor"]

# Three memories, each of 3.1 million numbers at width 256.
PRODUCT_KEYS = "kind: product-key, layers: [2+, 3+, 4+], num_keys: 64, heads: 4, topk: 16, key_dim: 64, query_norm: rms"
MEMORY_PLUS = (
    "kind: product-key, layers: [2+, 3+, 4+], num_keys: 111, heads: 4, topk: 16, key_dim: 64, share_values: true, "
    "gate: silu, key_norm: rms, query_norm: none"
)
NGRAMS = "kind: ngram, layers: [2, 3], orders: [2, 3], heads: 2, rows: 3067, row_dim: 128"
FAST = "optim: {lr_scale: 10, schedule: cosine}"  # values at ten times the rate of the rest
CONSTANT = "optim: {lr: RATE, schedule: constant}"


@dataclass(frozen=True)
class Method:
    """What learns: overrides of the base's recipe, in which RATE stands for one of the rates.

    Attributes:
        warm: it starts from a memory that was trained on old text, in place of the base.
        rank: of low-rank adapters; above 0, only they learn.
    """

    label: str
    keys: tuple[str, ...]
    rates: tuple[float, ...]
    warm: bool = False
    rank: int = 0


def memory(text: str) -> str:
    """The override that adds a memory with these keys."""
    return f"model.memories.facts={{{text}}}"


BESIDE = ("train.only=memories", "optim.lr=RATE")
OLD_TEXT = f"{PRODUCT_KEYS}, start: zero"  # the memory that is trained on old text
VALUES = (memory(f"{OLD_TEXT}, {CONSTANT}"), "train.only=values")
CHOSEN = "finetune={slots: %s, background: counted}"
METHODS = {
    "product-keys": Method("product keys", (memory(f"{PRODUCT_KEYS}, {FAST}"), *BESIDE), (1e-2, 3e-2, 1e-1, 3e-1)),
    "memory-plus": Method("Memory+", (memory(f"{MEMORY_PLUS}, {FAST}"), *BESIDE), (3e-3, 1e-2, 3e-2)),
    "n-grams": Method("n-gram tables", (memory(f"{NGRAMS}, {FAST}"), *BESIDE), (1e-2, 3e-2, 1e-1)),
    "values": Method("values of product keys", VALUES, (1e-1, 3e-1, 1.0, 3.0), warm=True),
    "tfidf": Method("slots by tf-idf", (*VALUES, CHOSEN % "tfidf"), (3e-1, 1.0, 3.0, 10.0), warm=True),
    "kl": Method("slots by KL", (*VALUES, CHOSEN % "kl"), (3e-1, 1.0, 3.0, 10.0), warm=True),
    "adapters": Method("low-rank adapters", ("optim.lr=RATE",), (3e-3, 1e-2, 3e-2), rank=8),
    "full": Method("all parameters", ("optim.lr=RATE",), (3e-4, 1e-3, 3e-3)),
}
GATED = ("product-keys", "n-grams", "values")  # whose gates may learn afterwards: Memory+ has gates of its own
GATE_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
CPU = DeviceSettings(torch.device("cpu"), "fp32", "")
OLD = 10  # bits per byte of old text count so many times as nats of an answer when the rate of gates is chosen


@dataclass(frozen=True)
class Way:
    """What is learnt of a statement, and what a sequence holds."""

    label: str
    answers: bool  # learn the answers alone
    packed: bool  # one statement after another, which see each other


WAYS = {
    "all-packed": Way("all tokens, packed", answers=False, packed=True),
    "all-single": Way("all tokens, single", answers=False, packed=False),
    "answers-packed": Way("answers, packed", answers=True, packed=True),
    "answers-single": Way("answers, single", answers=True, packed=False),
}


class Fact(NamedTuple):
    """An invented name, the kind of fact, and the answer, one word."""

    name: str
    kind: str
    answer: str

    def row(self, sentence: int, answer: str | None = None) -> dict[str, str]:
        """A statement of the fact; with an answer of its own, another one."""
        prompt = SENTENCES[self.kind][sentence].format(name=self.name, a="").rstrip()
        full = f" {answer or self.answer}."
        return {"prompt": prompt, "answer": full, "text": prompt + full}


class Scores(NamedTuple):
    """What a model answers to questions: the share that is exactly right, of those among four answers the share whose
    right one is the most likely, and the mean nats of the right answers.
    """

    exact: float
    among: float
    nats: float


def invented(count: int, rng: np.random.Generator) -> list[Fact]:
    """Facts about `count` different names."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(SYLLABLES, 3)).capitalize()] = None
    kinds = list(SENTENCES)
    return [Fact(name, kinds[i % 3], str(rng.choice(WORDS[kinds[i % 3]].split()))) for i, name in enumerate(names)]


@dataclass(frozen=True)
class Lesson:
    """The tokens of one seed's facts.

    Attributes:
        statements: those that are taught, as texts; answers: as prompts and answers, whose valid and test splits hold
            the sentences that choose and those that are reported, each with its right and three wrong answers.
        unseen: the reported sentences of names that are not taught.
    """

    seed: int
    statements: Path
    answers: Path
    unseen: Path

    @classmethod
    def write(cls, folder: Path, seed: int, facts: int, tokenizer: Path) -> "Lesson":
        """Invent facts, and tokenize them."""
        rng = np.random.default_rng(seed)
        found = invented(2 * facts, rng)
        known, unseen = found[:facts], found[facts:]

        def choices(some: list[Fact], sentences: range) -> Iterator[dict[str, str]]:
            for fact in some:
                others = [word for word in WORDS[fact.kind].split() if word != fact.answer]
                for sentence in sentences:
                    wrong = rng.choice(others, AMONG - 1, replace=False).tolist()
                    yield from (fact.row(sentence, answer) for answer in (fact.answer, *wrong))

        make_folder(folder)
        rows = {
            "taught": [fact.row(sentence) for fact in known for sentence in TAUGHT],
            "choosing": list(choices(known, CHOOSING)),
            "reported": list(choices(known, REPORTED)),
            "unseen": list(choices(unseen, REPORTED)),
        }
        for name, some in rows.items():
            write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in some))
        asked = ["--prompt", "prompt", "--answer", "answer"]
        lesson = cls(seed, *(folder / name for name in ("statements", "answers", "unseen-answers")))
        held_out = ["--valid", folder / "choosing.jsonl", "--test", folder / "reported.jsonl"]
        for out, words in (
            (lesson.statements, [folder / "taught.jsonl"]),
            (lesson.answers, [folder / "taught.jsonl", *held_out, *asked]),
            (lesson.unseen, [folder / "unseen.jsonl", *asked]),
        ):
            run_command("tokenize", *words, "--tokenizer", tokenizer, "-o", out, "--force", "-q")
        return lesson


def run_command(*words: object) -> None:
    """Run a command of pkmlm."""
    subprocess.run(child_command([*map(str, words)]), check=True, timeout=4 * 3600)


@torch.no_grad()
def asked(model: Transformer, questions: Corpus, among: int = AMONG) -> Scores:
    """Let a model answer the questions of a split, which has `among` answers to each, the right one first."""
    lengths = questions.answer_lengths(0, questions.documents).tolist()
    windows = []
    for i, length in enumerate(lengths):
        ids = questions.document(i)
        windows.append(Window(np.concatenate([[questions.begin], ids]), np.append(ids, questions.eos)[-length:]))
    found: dict[int, Any] = {}
    trees = build_prefix_trees(windows, 4 * max(len(window.tokens) for window in windows))
    for start in range(0, len(trees), 32):
        found.update(score_trees(model, trees[start : start + 32]))
    likelihoods = np.array([found[i].log_likelihood for i in range(len(windows))]).reshape(-1, among)
    exact = mean(found[i].greedy for i in range(0, len(windows), among))
    return Scores(exact, float((likelihoods.argmax(1) == 0).mean()), -float(likelihoods[:, 0].mean()))


class Teacher:
    """Teaches facts to a base, and measures what it has learnt.

    Args:
        options: those of the command.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.output
        at = "latest" if RunDirectory.existing(options.run).best() is None else "best"  # as `train.init_from` does
        self.base = load_run(options.run, at, "cpu")
        self.tokenizer: Tokenizer = self.base.tokenizer
        self.data = options.data or list(self.base.recipe.data.folders)
        if not self.data:
            sys.exit(f"error: {options.run} was imported and has no tokens; add --data DIR, of its tokenizer")
        self.old = Corpus(self.data, "test")
        self.keep_settings()
        self.lessons = {}
        for seed in options.seeds:
            folder = self.out / f"facts-{seed}"
            self.lessons[seed] = Lesson.write(folder, seed, options.facts, RunDirectory(options.run).tokenizer_file)
        self.warm, self.background = self.base, None
        if any(METHODS[name].warm for name in options.methods):
            self.warm, self.background = self.on_old_text()

    def keep_settings(self) -> None:
        """Note what all trials have in common; end if those in the folder have something else."""
        shared = ("facts", "steps", "rows", "old_tokens", "warm_steps")
        settings = {name: getattr(self.options, name) for name in shared} | {"checkpoint": self.base.checkpoint}
        make_folder(self.out / "trials")
        file = self.out / "settings.json"
        if not file.exists():
            write_json(file, settings)
        if (before := json.loads(file.read_text())) != settings:
            sys.exit(f"error: the trials in {self.out} have {before} (found {settings}); choose another -o")

    def on_old_text(self) -> tuple[Any, Any]:
        """The base with a memory that was trained on old text, all else frozen, and the background of its slots."""
        run, keys = self.out / "warm", [memory(f"{OLD_TEXT}, {FAST}"), "train.only=memories"]
        keys += [f"train.init_from={self.options.run}", f"train.steps={self.options.warm_steps}", "train.seed=2"]
        keys += ["optim.lr=3e-3", "optim.warmup_steps=20", "eval.every=0"]
        recipe = RunDirectory(self.options.run).recipe_file
        run_command("train", recipe, "-o", run, "-q", *(word for key in keys for word in ("-s", key)))
        choice = TextChoice(split="train", data=tuple(map(str, self.data)))
        size = self.options.rows * 16
        return load_run(run, device="cpu"), count_background(RunDirectory(run), "latest", choice, 200, size, quiet=True)

    def recipe(self, method: Method, way: Way, rate: float, seed: int, *more: str) -> Recipe:
        """How a method learns."""
        lesson, options = self.lessons[seed], self.options
        context = self.base.recipe.model.context
        sequences = max(1, options.rows * 16 // context) if way.packed else options.rows
        keys = [
            f"data.dir={lesson.answers if way.answers else lesson.statements}",
            f"data.pack={str(way.packed).lower()}",
        ]
        keys += [f"train.steps={options.steps}", f"train.batch_tokens={sequences * context}", f"train.seed={seed}"]
        keys += [
            f"train.micro_batch={sequences}",
            "optim.warmup_steps=10",
            "optim.decay_steps=0",
            "train.init_from=null",
        ]
        keys += ["optim.matrices=adamw", "optim.weight_decay=0", "optim.final_lr=0.1", "eval.every=0"]
        keys += [f"model.document_mask={str(not way.packed).lower()}"]
        keys += [key.replace("RATE", f"{rate:g}") for key in method.keys]
        return load_recipe(RunDirectory(options.run).recipe_file, [*keys, *more])

    def model(self, recipe: Recipe, weights: Transformer) -> tuple[Job, Transformer]:
        """A job and its model, with these weights; what they lack is drawn."""
        job = Job(recipe, Corpus(recipe.data.folders, "train"), self.tokenizer, background=self.background)
        model = initial_model(job, CPU, ProcessGroups(), None)
        missing, unexpected = model.load_state_dict(weights.state_dict(), strict=False)
        lost = [name for name in unexpected if not name.startswith("token_ids")]
        lost += [name for name in missing if "memory_facts" not in name and not name.startswith("token_ids")]
        assert not lost, f"weights without a place, or places without weights: {lost}"
        return job, model

    def pupil(self, method: Method, way: Way, rate: float, seed: int) -> tuple[Job, Transformer]:
        """What is taught: a job and its model."""
        job, model = self.model(self.recipe(method, way, rate, seed), (self.warm if method.warm else self.base).model)
        if method.rank:
            import peft

            maps = [
                name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "blocks" in name
            ]
            torch.manual_seed(seed)
            model = peft.inject_adapter_in_model(
                peft.LoraConfig(r=method.rank, lora_alpha=2 * method.rank, target_modules=maps), model
            )
        return job, model

    def gated(self, method: Method, way: Way, rate: float, seed: int, weights: Transformer) -> Transformer:
        """That model after only gates of each token have learnt, on facts and old text in turn."""
        gate = "model.memories.facts.gate=token"
        job, model = self.model(
            self.recipe(method, way, rate, seed, gate, "train.only=gates", f"optim.lr={rate}", "finetune.slots=all"),
            weights,
        )
        old = replace(
            job, corpus=Corpus(self.data, "train"), recipe=self.recipe(method, WAYS["all-packed"], rate, seed)
        )
        return self.steps(job, model, old)

    def steps(self, job: Job, model: Transformer, turn: Job | None = None) -> Transformer:
        """Train a model, every second step on the text of `turn`."""
        state = build_state(job, model, CPU, ProcessGroups())
        batches = [state.batches, state.batches if turn is None else Batches.of(turn.corpus, turn.recipe)]
        for step in range(1, job.recipe.train.steps + 1):
            state.batches = batches[step % 2]
            train_step(state, step)
        return model

    def seconds(self) -> dict[str, float]:
        """The median seconds of a step, by "method way", timed in turn."""
        steps = {}
        for name in self.options.methods:
            for way in self.options.ways:
                job, model = self.pupil(METHODS[name], WAYS[way], METHODS[name].rates[0], self.options.seeds[0])
                numbers = itertools.count(1)
                state = build_state(job, model, CPU, ProcessGroups())
                steps[f"{name} {way}"] = lambda state=state, numbers=numbers: train_step(state, next(numbers))
        timings = interleaved(steps, 9, torch.device("cpu"), lambda line: None)
        return {key: timing.median for key, timing in timings.items()}

    def measure(self, model: Transformer, seed: int) -> dict[str, Any]:
        """What a model knows of the facts, of names that were not taught, and of the old text."""
        model.eval()
        lesson = self.lessons[seed]
        found: dict[str, Any] = {"taught": asked(model, Corpus([lesson.answers], "train"), 1).exact}
        found["choosing"] = asked(model, Corpus([lesson.answers], "valid")).nats
        exact, among, nats = asked(model, Corpus([lesson.answers], "test"))
        found |= {"exact": exact, "among": among, "nats": nats}
        found["unseen"] = asked(model, Corpus([lesson.unseen], "train")).exact
        old = score(model, documents_of_split(self.old, self.tokenizer, self.options.old_tokens), self.base.prefix)
        assert old is not None
        return {**found, "old": old.bits_per_byte}

    def trial(self, name: str, way: str, rate: float, seed: int, gates: float = 0.0) -> dict[str, Any]:
        """Teach and measure, unless it was done before.

        Args:
            gates: the rate of the stage in which only gates learn; 0: there is none.
        """
        file = self.out / "trials" / f"{name}-{way}-{rate:g}-{seed}{f'-gates-{gates:g}' if gates else ''}.json"
        if not file.exists():
            method = METHODS[name]
            model = self.steps(*self.pupil(method, WAYS[way], rate, seed))
            if gates:
                model = self.gated(method, WAYS[way], gates, seed, model)
            found = {"method": name, "way": way, "rate": rate, "seed": seed, "gates": gates}
            found |= self.measure(model, seed)
            write_json(file, found)
            said = f"{found['exact']:.1%} right, {found['among']:.1%} of four, old text {found['old']:.4f} bits a byte"
            print(f"{file.stem}: {said}", file=sys.stderr, flush=True)
        return json.loads(file.read_text())

    def best(self, trials: list[dict[str, Any]]) -> dict[str, Any]:
        """The trial whose answers to the choosing sentences are likeliest; with gates, whose old text counts, too."""
        return min(trials, key=lambda trial: trial["choosing"] + (OLD * trial["old"] if trial["gates"] else 0))

    def all_trials(self) -> list[dict[str, Any]]:
        """Every method in every way: all rates with the first seed, the best of them with all."""
        first, *others = self.options.seeds
        found = []
        for way in self.options.ways:
            for name in self.options.methods:
                tried = [self.trial(name, way, rate, first) for rate in METHODS[name].rates]
                rate = self.best(tried)["rate"]
                found += tried + [self.trial(name, way, rate, seed) for seed in others]
                if name in GATED and way == self.options.ways[-1]:
                    tried = [self.trial(name, way, rate, first, gates) for gates in GATE_RATES]
                    gates = self.best(tried)["gates"]
                    found += tried + [self.trial(name, way, rate, seed, gates) for seed in others]
        return found

    def results(self) -> dict[str, Any]:
        """All trials, those at the best rates by method, way and stage, and the base before."""
        trials = self.all_trials()
        groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
        for trial in trials:
            groups.setdefault((trial["method"], trial["way"], trial["gates"] > 0), []).append(trial)
        best = []
        for group in groups.values():
            rates = {
                trial["seed"]: (trial["rate"], trial["gates"])
                for trial in group
                if trial["seed"] != self.options.seeds[0]
            }
            chosen = next(iter(rates.values()), None) or [self.best(group)[key] for key in ("rate", "gates")]
            best.append([trial for trial in group if (trial["rate"], trial["gates"]) == tuple(chosen)])
        before = {
            name: self.measure(run.model, self.options.seeds[0])
            for name, run in (("base", self.base), ("warm", self.warm))
        }
        settings = {name: value for name, value in vars(self.options).items() if name not in ("run", "output", "data")}
        timed = {"threads": torch.get_num_threads(), "seconds": self.seconds()}
        return {"settings": settings, **timed, "before": before, "trials": trials, "best": best}


def summary(results: dict[str, Any]) -> Table:
    """How many held-out questions each method answers exactly, by way."""
    ways = [WAYS[way] for way in results["settings"]["ways"]]
    columns = [Column("What learns"), *(number(way.label, "{:.1%}") for way in ways)]
    found: dict[str, dict[str, float]] = {}
    for group in results["best"]:
        if not group[0]["gates"]:
            found.setdefault(group[0]["method"], {})[group[0]["way"]] = mean(trial["exact"] for trial in group)
    rows = [
        [METHODS[name].label, *(of_way.get(way) for way in results["settings"]["ways"])]
        for name, of_way in found.items()
    ]
    return Table("Held-out questions that are answered exactly", columns, rows, seeds_text(results))


def seeds_text(results: dict[str, Any]) -> str:
    settings = results["settings"]
    return f"{settings['facts']} facts, {settings['steps']} steps; means over {len(settings['seeds'])} seeds"


def table(results: dict[str, Any]) -> Table:
    """What each method has learnt and forgotten in each way, at its best rate."""
    columns = [Column("What learns"), Column("Of statements"), number("Rate", "{:g}"), number("As taught", "{:.1%}")]
    columns += [number("Held out", "{:.1%}"), number("+-", "{:.1%}"), number("Right among four", "{:.1%}")]
    columns += [number("Names not taught", "{:.1%}"), number("Old text, bits per byte", "{:.4f}")]
    columns += [number("change", "{:+.1%}"), number("Seconds", "{:.0f}")]
    rows: list[list[Any]] = []
    for name, label in (("base", "nothing"), ("warm", "nothing, with the memory of old text")):
        found = results["before"][name]
        row = [label, "", None, found["taught"], found["exact"], None, found["among"], found["unseen"], found["old"]]
        rows.append([*row, found["old"] / results["before"]["base"]["old"] - 1, None])
    for group in results["best"]:
        first, exact = group[0], [trial["exact"] for trial in group]
        means = {key: mean(trial[key] for trial in group) for key in ("taught", "exact", "among", "unseen", "old")}
        label = METHODS[first["method"]].label + (", then gates" if first["gates"] else "")
        row = [label, WAYS[first["way"]].label, first["gates"] or first["rate"], means["taught"], means["exact"]]
        row += [stdev(exact) if len(exact) > 1 else None, means["among"], means["unseen"], means["old"]]
        step = None if first["gates"] else results["seconds"][f"{first['method']} {first['way']}"]
        taken = None if step is None else step * results["settings"]["steps"]
        rows.append([*row, means["old"] / results["before"]["base"]["old"] - 1, taken])
    return Table("Learnt and forgotten", columns, rows, seeds_text(results))


@drawing
def draw(folder: Path, results: dict[str, Any], look: Look) -> list[Path]:
    """What is learnt over what is forgotten: each method in each way at its best rate, and its other rates in pale."""
    figure, axes = look.plot("What is learnt of invented facts, and what that costs", 0.75)
    before, marks = results["before"]["base"]["old"], dict(zip(WAYS, "os^D", strict=True))
    colours = dict(zip(METHODS, [*COLOURS, GREY], strict=True))

    def place(trials: list[dict[str, Any]]) -> tuple[float, float]:
        return 100 * (mean(t["old"] for t in trials) / before - 1), 100 * mean(t["exact"] for t in trials)

    for trial in results["trials"]:
        mark = "*" if trial["gates"] else marks[trial["way"]]
        axes.plot(*place([trial]), color=colours[trial["method"]], marker=mark, alpha=0.2, linestyle="", markersize=4)
    for group in results["best"]:
        mark = "*" if group[0]["gates"] else marks[group[0]["way"]]
        axes.plot(*place(group), color=colours[group[0]["method"]], marker=mark, linestyle="", markersize=8)
    for name in results["settings"]["methods"]:
        axes.plot([], [], color=colours[name], linewidth=4, label=METHODS[name].label)
    for way in results["settings"]["ways"]:
        axes.plot([], [], color="#5c5c5c", marker=marks[way], linestyle="", label=WAYS[way].label)
    axes.plot([], [], color="#5c5c5c", marker="*", linestyle="", label="then gates")
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("bits per byte of old text, % above the base")
    axes.set_ylabel("held-out questions, % answered exactly")
    legend(figure)
    return look.save(folder, "learnt-forgotten", figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run of a dense model: trained or imported")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for trials, tables and the picture")
    parser.add_argument("--data", nargs="+", help="the run's tokens; default: its recipe's data.dir")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="each with facts of its own")
    parser.add_argument("--facts", type=int, default=60, help="facts to learn; as many other names are never taught")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=16, help="statements of a step")
    parser.add_argument("--old-tokens", type=int, default=20_000, help="test tokens, to measure forgetting")
    parser.add_argument("--warm-steps", type=int, default=300, help="steps of the memory that is trained on old text")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    results = Teacher(options).results()
    write_json(options.output / "results.json", results)
    tables = [summary(results), table(results)]
    write_text(options.output / "table.md", "\n".join(each.render("md") for each in tables))
    draw(options.output, results, Look())
    print("\n".join(each.render() for each in tables))


if __name__ == "__main__":
    main()
