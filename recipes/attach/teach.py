"""Teach a memory to a finished model, beside its control: a dense layer with as many operations at the same places.

Without --base, a small dense model is first trained on the demo's novels and exported; nothing is downloaded. Memory
and control are then attached to it, and trained while the model itself is frozen. Both start from the same logits, and
each trains at its best rate: the one with the lowest perplexity on the validation split, with the first seed. For each
seed, the control is trained on as many tokens as the memory, and again on as many as it reads in the memory's time.

    python recipes/attach/teach.py -o taught
    python recipes/attach/teach.py -o taught --base exported --data tokens --tokens 1000000 --seeds 1 2 3

It writes results.json and table.md into the -o folder and prints the table. Rates fall to zero over each run. Times
are measured on steps of both, in turn, before training begins.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import pkmlm
from pkmlm.attach.hosted import Hosted, load_host
from pkmlm.bench.rounds import interleaved
from pkmlm.console import Column, Table, number
from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.environment import child_command
from pkmlm.evaluate.documents import documents_of_split, open_split
from pkmlm.evaluate.perplexity import score
from pkmlm.files import make_folder, write_json, write_text
from pkmlm.runs.directory import tokenizer_file

RECIPES = Path(__file__).resolve().parents[1]
MEMORY = {"kind": "product-key", "num_keys": 128, "heads": 4, "topk": 8, "key_dim": 64}


def command(*words):
    """Run a command of pkmlm."""
    print("pkmlm", *words, file=sys.stderr)
    subprocess.run(child_command(list(map(str, words))), check=True)


def make_base(folder, steps):
    """Train and export the demo's dense model; return the folders of the export and of its tokens."""
    tokens, run, exported = folder / "tokens", folder / "base-run", folder / "base"
    if not tokens.exists():
        train, valid, test = (RECIPES / "demo" / f"{split}.txt.zst" for split in ("train", "valid", "test"))
        command("tokenize", train, "--valid", valid, "--test", test, "-o", tokens)
    if not exported.exists():
        shorter = [] if steps is None else ["-s", f"train.steps={steps}", "-s", f"checkpoint.every={steps}"]
        command("train", RECIPES / "demo-dense.yaml", "-o", run, "-s", f"data.dir={tokens}", *shorter)
        command("export", run, "-o", exported)
    return exported, tokens


class Student:
    """A copy of the model, with a memory or its control to train.

    Args:
        kind: "memory" or "dense control".
    """

    def __init__(self, arguments, base, data, seed, kind):
        self.arguments, self.data, self.seed, self.kind = arguments, data, seed, kind
        self.model = load_host(base, "float32")
        self.hosted = Hosted(self.model)
        self.attached = pkmlm.attach(self.model, arguments.memory, arguments.layers, seed=seed)
        if kind == "dense control":
            memory = self.attached
            memory.detach()
            self.attached = pkmlm.attach_dense(self.model, like=memory, seed=seed)
        self.tokenizer = Tokenizer.load(tokenizer_file(base))
        self.sequences = max(1, arguments.batch_tokens // self.hosted.context)
        self.batches = Batches(Corpus(str(data), "train"), self.hosted.context, self.sequences, seed=seed)

    def optimizer(self, lr):
        return self.attached.optimizer(lr, self.arguments.values_factor * lr)

    def step(self, index, optimizer):
        """One step of training."""
        self.model.train()
        ids_BT, targets_BT = self.batches.micro_batch(index, 0, self.sequences)
        logits_NV = self.model(input_ids=ids_BT, use_cache=False).logits.flatten(0, 1)
        loss = cross_entropy(logits_NV.float(), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.attached.parameters()), 1.0)
        optimizer.step()

    def perplexity(self, split):
        """The perplexity of a split, as `pkmlm eval` computes it."""
        self.model.eval()
        documents = documents_of_split(open_split(str(self.data), split, self.tokenizer), self.tokenizer)
        return score(self.hosted, documents, self.tokenizer.eos).token_ppl

    def learn(self, lr, tokens):
        """Train on about `tokens` tokens; return what is measured."""
        steps = -(-tokens // (self.sequences * self.hosted.context))
        optimizer, warmup = self.optimizer(lr), min(self.arguments.warmup, steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))
        )
        for index in range(1, steps + 1):
            self.step(index, optimizer)
            schedule.step()
        found = {"what": self.kind, "seed": self.seed, "lr": lr, "tokens": steps * self.sequences * self.hosted.context}
        found |= {f"{split}_perplexity": self.perplexity(split) for split in ("valid", "test")}
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found


def main():
    """Read the arguments, teach with each seed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--base", type=Path, help="folder of a transformers model; default: one is trained")
    parser.add_argument("--data", type=Path, help="tokens that `pkmlm tokenize` made with its tokenizer")
    parser.add_argument("--base-steps", type=int, help="steps that the base is trained for; default: the demo's 400")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens that the memory is trained on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of initial weights and batches")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3], help="blocks to attach to, counted from 1")
    parser.add_argument("--memory", type=json.loads, default=MEMORY, help="keys of a recipe's memory, as JSON")
    parser.add_argument(
        "--lrs", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="learning rates to choose from"
    )
    parser.add_argument("--values-factor", type=float, default=4, help="the values' rate, as a multiple of the others'")
    parser.add_argument("--warmup", type=int, default=20, help="warm-up steps")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step")
    arguments = parser.parse_args()
    if (arguments.base is None) != (arguments.data is None):
        parser.error("--base and --data go together")
    make_folder(arguments.out)
    base, data = (arguments.base, arguments.data) if arguments.base else make_base(arguments.out, arguments.base_steps)
    student = partial(Student, arguments, base, data)

    students = {kind: student(0, kind) for kind in ("memory", "dense control")}
    operations = {kind: each.attached.flops_per_token() for kind, each in students.items()}
    sizes = {kind: sum(part.numel() for part in each.attached.module.parameters()) for kind, each in students.items()}
    steps = {kind: partial(each.step, 1, each.optimizer(1e-6)) for kind, each in students.items()}
    timings = interleaved(steps, 9, torch.device("cpu"), lambda line: None)
    seconds = {kind: timing.median for kind, timing in timings.items()}
    tokens = {
        "tokens": arguments.tokens,
        "seconds": round(arguments.tokens * seconds["memory"] / seconds["dense control"]),
    }
    plain = students["memory"]
    plain.attached.detach()
    base_perplexity = plain.perplexity("test")

    def taught(seed, kind, lr, equal="tokens"):
        one = student(seed, kind)
        found = {**one.learn(lr, tokens[equal]), "equal": equal}
        if kind == "memory":
            one.attached.save(arguments.out / f"memory-{seed}-{lr:g}", replace=True)
        return found

    first, *others = arguments.seeds
    tried = [taught(first, kind, lr) for kind in operations for lr in arguments.lrs]
    best = {}
    for row in sorted(tried, key=lambda row: row["valid_perplexity"]):
        best.setdefault(row["what"], row["lr"])
    rows = [*tried, *(taught(seed, kind, best[kind]) for seed in others for kind in operations)]
    rows += [taught(seed, "dense control", best["dense control"], "seconds") for seed in arguments.seeds]

    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    record = {"settings": settings, "parameters": sizes, "operations_per_token": operations, "seconds_of_step": seconds}
    write_json(arguments.out / "results.json", {**record, "base": base_perplexity, "rates": best, "rows": rows})

    columns = [Column("Attached"), Column("At equal"), number("Rate", "{:g}"), number("Tokens", "{:,}")]
    columns += [number("Parameters", "{:,}"), number("Operations per token", "{:,}"), number("ms per step", "{:.1f}")]
    columns += [number("Perplexity", "{:.2f}"), Column("by seed", "right")]
    table = [["nothing", "", None, None, None, None, None, base_perplexity, ""]]
    for kind, equal in (("memory", "tokens"), ("dense control", "tokens"), ("dense control", "seconds")):
        own = [row for row in rows if (row["what"], row["equal"], row["lr"]) == (kind, equal, best[kind])]
        found = [row["test_perplexity"] for row in own]
        measured = [own[0]["tokens"], sizes[kind], operations[kind], 1000 * seconds[kind], sum(found) / len(found)]
        table.append([kind, equal, best[kind], *measured, ", ".join(f"{each:.2f}" for each in found)])
    drawn = Table("What the model gains", columns, table, "perplexity of the test split; mean over seeds")
    write_text(arguments.out / "table.md", drawn.render("md"))
    print(drawn.render(), end="")


if __name__ == "__main__":
    main()
