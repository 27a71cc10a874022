"""A memory taught to a finished model, beside its control: a dense layer of as many operations at the same places.

Without --base, a small dense model is first trained on the demo's novels and exported; nothing is downloaded. Then, for
each seed, a memory is attached to it, and trained while the model itself is frozen. The control is trained on the same
tokens, and on as many as it can read in the seconds that the memory took. Both start from the same logits.

    python recipes/attach/teach.py -o taught
    python recipes/attach/teach.py -o taught --base exported --data tokens --tokens 1000000 --seeds 1 2 3

It writes -o/results.json, and prints a table. The learning rate is constant after a short warm-up, so that the control
is one run that is measured twice.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import pkmlm
from pkmlm.console import Column, Table
from pkmlm.data.batches import Batches
from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.evaluate.attached import Hosted, load_host
from pkmlm.evaluate.documents import documents_of_split, open_split
from pkmlm.evaluate.perplexity import score
from pkmlm.runs.directory import tokenizer_file
from pkmlm.runs.files import make_folder, write_json

RECIPES = Path(__file__).resolve().parents[1]
MEMORY = {"kind": "product-key", "num_keys": 128, "heads": 4, "topk": 8, "key_dim": 64}


def command(*words):
    """Run a command of pkmlm."""
    print("pkmlm", *words, file=sys.stderr)
    subprocess.run([sys.executable, "-m", "pkmlm", *map(str, words)], check=True)


def make_base(folder, steps):
    """The demo's dense model, trained and exported: the folders of the export and of its tokens."""
    tokens, run, exported = folder / "tokens", folder / "base-run", folder / "base"
    if not tokens.exists():
        train, valid, test = (RECIPES / "demo" / f"{split}.txt.zst" for split in ("train", "valid", "test"))
        command("tokenize", train, "--valid", valid, "--test", test, "-o", tokens)
    if not exported.exists():
        shorter = [] if steps is None else ["-s", f"train.steps={steps}", "-s", f"checkpoint.every={steps}"]
        command("train", RECIPES / "demo-dense.yaml", "-o", run, "-s", f"data.dir={tokens}", *shorter)
        command("export", run, "-o", exported)
    return exported, tokens


class Teacher:
    """Trains what is attached to a model on a corpus, and measures it."""

    def __init__(self, arguments, base, data, seed):
        self.arguments, self.data, self.seed = arguments, data, seed
        self.model = load_host(base, "float32")
        self.hosted = Hosted(self.model)
        self.tokenizer = Tokenizer.load(tokenizer_file(base))
        self.sequences = max(1, arguments.batch_tokens // self.hosted.context)
        self.batches = Batches(Corpus(str(data), "train"), self.hosted.context, self.sequences, seed=seed)

    def measured(self):
        """Perplexity of the split: as `pkmlm eval`."""
        self.model.eval()
        documents = documents_of_split(open_split(str(self.data), self.arguments.split, self.tokenizer), self.tokenizer)
        return score(self.hosted, documents, self.tokenizer.eos).token_ppl

    def taught(self, attachment, kind, seconds=None):
        """Train for the tokens that are asked for and, if given, for some seconds; a row of results for each."""
        arguments, tokens_of_step = self.arguments, self.sequences * self.hosted.context
        optimizer = attachment.optimizer(arguments.lr, arguments.values_lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / arguments.warmup))
        wanted = {"tokens": lambda step, spent: step * tokens_of_step >= arguments.tokens}
        if seconds is not None:
            wanted["seconds"] = lambda step, spent: spent >= seconds
        step, spent, rows = 0, 0.0, []
        while wanted:
            began = time.perf_counter()
            self.model.train()
            ids_BT, targets_BT = self.batches.micro_batch(step + 1, 0, self.sequences)
            logits_NV = self.model(input_ids=ids_BT, use_cache=False).logits.flatten(0, 1)
            loss = cross_entropy(logits_NV.float(), targets_BT.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(attachment.parameters()), 1.0)
            optimizer.step()
            schedule.step()
            step, spent = step + 1, spent + time.perf_counter() - began
            for equal in [equal for equal, reached in wanted.items() if reached(step, spent)]:
                del wanted[equal]
                found = {"what": kind, "equal": equal, "seed": self.seed, "tokens": step * tokens_of_step}
                rows.append({**found, "seconds": spent, "perplexity": self.measured()})
                print(json.dumps(rows[-1]), file=sys.stderr)
        return rows


def main():
    """Read the arguments, teach with each seed, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--base", type=Path, help="a model of transformers in a folder; default: one is trained")
    parser.add_argument("--data", type=Path, help="tokens of its tokenizer, of `pkmlm tokenize`")
    parser.add_argument("--base-steps", type=int, help="train the base for so many steps; default: the demo's 400")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="that what is attached is trained on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of initial weights and of batches")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3], help="blocks, counted from 1")
    parser.add_argument("--memory", type=json.loads, default=MEMORY, help="a recipe's model.memory, as JSON")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of all but values")
    parser.add_argument("--values-lr", type=float, default=1e-2, help="learning rate of the values")
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--split", default="test", help="that is measured")
    arguments = parser.parse_args()
    if (arguments.base is None) != (arguments.data is None):
        parser.error("--base and --data go together")
    make_folder(arguments.out)
    base, data = (arguments.base, arguments.data) if arguments.base else make_base(arguments.out, arguments.base_steps)

    rows = [{"what": "base", "perplexity": Teacher(arguments, base, data, 0).measured()}]
    for seed in arguments.seeds:
        torch.manual_seed(seed)
        teacher = Teacher(arguments, base, data, seed)
        memory = pkmlm.attach(teacher.model, arguments.memory, arguments.layers, seed=seed)
        rows += teacher.taught(memory, "memory")
        memory.save(arguments.out / f"memory-{seed}", replace=True)
        torch.manual_seed(seed)
        teacher = Teacher(arguments, base, data, seed)
        control = pkmlm.attach_dense(teacher.model, like=memory, seed=seed)
        rows += teacher.taught(control, "dense control", rows[-1]["seconds"])
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    sizes = {
        "memory": sum(each.numel() for each in memory.module.parameters()),
        "dense control": sum(each.numel() for each in control.module.parameters()),
    }
    operations = {"memory": memory.flops_per_token(), "dense control": control.flops_per_token()}
    record = {"settings": settings, "parameters": sizes, "operations_per_token": operations, "rows": rows}
    write_json(arguments.out / "results.json", record)

    columns = [Column("what"), Column("at equal"), *(Column(name, "right") for name in ("tokens", "seconds"))]
    columns += [Column("perplexity, by seed", "right"), Column("operations", "right", "{:,}")]
    table = [["base", "", "", "", f"{rows[0]['perplexity']:.2f}", ""]]
    for kind, equal in dict.fromkeys((row["what"], row["equal"]) for row in rows[1:]):
        own = [row for row in rows[1:] if (row["what"], row["equal"]) == (kind, equal)]
        tokens, seconds = (", ".join(f"{row[key]:,.0f}" for row in own) for key in ("tokens", "seconds"))
        perplexities = ", ".join(f"{row['perplexity']:.2f}" for row in own)
        table.append([kind, equal, tokens, seconds, perplexities, operations[kind]])
    print(Table(f"{arguments.split} split", columns, table).render(), end="")


if __name__ == "__main__":
    main()
