"""The README and the manual: every command that they show is run, and nothing that a user can name is left out."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pkmlm.cli.help import MANUAL, TOPICS
from pkmlm.recipe.load import load_recipe
from tests import PATIENCE
from tests.byte_level import learn_byte_level
from tests.conftest import ROOT, pkmlm
from tests.task_rows import write_rows

README = (ROOT / "README.md").read_text()
PAGES = {topic: (MANUAL / f"{topic}.md").read_text() for topic in TOPICS}
# What keeps a training short here, and in one process; the rest of a command is run as it stands.
SMALL = ["-s", "train.batch_tokens=512", "-s", "train.micro_batch=2", "-s", "model.dim=32", "-s", "model.layers=3"]
TRAINED = [*SMALL, "-s", "train.steps=3", "-s", "eval.tokens=200"]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(text: str) -> list[str]:
    return [line[2:] for block in blocks(text, "console") for line in block.splitlines()]


def anchors(page: Path) -> list[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def write_llama(folder: Path, text: str) -> None:
    """A model of transformers as small as the others here, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=400, max_position_embeddings=64)).save_pretrained(folder)
    learn_byte_level(text).save(str(folder / "tokenizer.json"))


def run_python(program: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(novels: Path, tmp_path_factory: pytest.TempPathFactory):
    """A working directory with the files that the pages name."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for shown, split in (("my", "train"), ("more", "valid"), ("valid", "valid"), ("test", "test")):
        (folder / f"{shown}.txt").write_bytes((novels / f"{split}.txt").read_bytes())
    text = (folder / "my.txt").read_text()
    (folder / "my.txt").write_text("\n\n\n".join(text[at : at + 1000] for at in range(0, len(text), 1000)))
    write_rows(folder / "tasks")
    write_llama(folder / "smol", text)
    (grid,) = (block for block in blocks(README, "yaml") if "axes:" in block)
    few = {"seeds": [1], "tune": {"key": "optim.lr", "values": [6e-3]}, "only": {"model": ["product-key"]}, "equal": []}
    few |= {"measure": ["valid_loss"], "claims": []}  # one cell
    (folder / "twins.yaml").write_text(yaml.safe_dump(yaml.safe_load(grid) | few))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_the_demo_keeps_the_steps_that_the_pages_and_helps_name():
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
    text = "".join([README, *PAGES.values(), *(path.read_text() for path in (ROOT / "pkmlm" / "cli").glob("*.py"))])
    last, every = recipe.train.steps, recipe.checkpoint.every
    saved = {*range(every, last + 1, every), *range(recipe.eval.every, last + 1, recipe.eval.every)}  # if all are best
    named = {int(step) for steps in re.findall(r"--step ([0-9]+(?:,[0-9]+)+)", text) for step in steps.split(",")}
    assert named
    assert named <= set(sorted(saved)[-recipe.checkpoint.keep :])


@pytest.mark.slow
def test_every_command_of_the_readme_and_the_manual(folder):
    done = set()
    for name, text in {"README": README, **PAGES}.items():
        for line in commands(text):
            program, command, *arguments = shlex.split(line)
            assert program == "pkmlm", line
            if line in done:
                continue
            done.add(line)
            short = []
            if command == "tokenize" and "my.txt" in arguments and "--tokenizer" not in arguments:
                short = ["--vocab-size", "600"]
            elif command == "train" or "twins.yaml" in arguments:
                short = TRAINED
            elif command == "bench" and "--dim" not in arguments:
                short = SMALL
            if command == "train" and "--nproc" in arguments:
                arguments[arguments.index("--nproc") + 1] = "1"
            said = pkmlm(command, *arguments, *short).stdout
            assert said or command == "train", f"{name}: {line}"
    assert len(done) >= 30
    logits, network, checkpoint, ranks, gradient = blocks(PAGES["python"], "python")
    assert blocks(README, "python") == [network]
    first, *memories = run_python(logits, folder).splitlines()
    assert len(yaml.safe_load(first)) == 5
    assert re.fullmatch(r"layer 3 pkm: \[[\d ]+\] slots of each head", memories[0])
    check = "assert memory.values.weight_KD.grad is None and all(optimizer.state for optimizer in optimizers)\n"
    used = re.fullmatch(r"([0-9.]+)% of the slots were read\n", run_python(network + check + checkpoint, folder))
    assert 50 < float(used[1]) < 100
    (folder / "ddp.py").write_text(ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "ddp.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert (folder / "trained.pt").exists()
    median, share = map(float, run_python(gradient, folder).split())
    assert 0 < median < 1
    assert 0 < share <= 1


@pytest.mark.slow
def test_the_page_on_attaching_does_what_it_says(tmp_path):
    first, look, second, back = blocks(PAGES["attach"], "python")
    first = first.replace("attached.save", f"{look}model.save_pretrained('whole')\nattached.save")
    first = first.replace("attached.detach", "after = model(input_ids=tokens).logits\nattached.detach")
    again = "another_copy = GPT2LMHeadModel(model.config)\n"
    check = "assert torch.equal(model(input_ids=tokens).logits, after)\n"
    said = run_python(f"{first}{again}{second}{back}{check}", tmp_path).splitlines()
    assert [re.sub(r"[\d.]+%", "%", line) for line in said[:2]] == [
        f"layer {layer}: % of the slots were read" for layer in (2, 3)
    ]
    slots = [line.split() for line in said[2:5]]
    assert all(int(reads) <= 4 * 4 * 128 and re.fullmatch(r"\d+:\d+", name) for name, reads, *_ in slots)
    control, memory = map(int, said[5].split())
    assert abs(control / memory - 1) < 0.01
    assert (tmp_path / "attached" / "manifest.json").exists()


def test_make_targets_exist():
    targets = re.findall(r"^([a-z][a-z0-9/.-]+):", (ROOT / "Makefile").read_text(), re.M)
    targets += [f"{path.parts[-3]}-{path.stem}" for path in (ROOT / "recipes").glob("*/grids/*.yaml")]
    texts = [README, (ROOT / ".github" / "CONTRIBUTING.md").read_text(), *PAGES.values()]
    texts += [page.read_text() for page in (ROOT / "recipes").rglob("README.md")]
    shown = [
        word
        for text in texts
        for line in re.findall(r"^make (.+)", text, re.M)
        for word in shlex.split(line, comments=True)
    ]
    named = [word for word in shown if re.fullmatch(r"[a-z][a-z0-9/.-]+", word)]
    named += [word for text in texts for word in re.findall(r"`make ([a-z][a-z0-9-]+)`", text)]
    assert len(named) >= 8
    assert set(named) <= set(targets)


def test_no_link_is_dead():
    pages = [ROOT / "README.md", *(ROOT / "recipes").rglob("README.md"), ROOT / ".github" / "CONTRIBUTING.md"]
    for page in [*pages, *MANUAL.glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if not link.startswith("http"):
                file, _, anchor = link.partition("#")
                target = page.parent / file if file else page
                assert target.exists(), f"{page}: {link}"
                assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_the_manual_names_every_key_and_exit_code():
    assert pkmlm("recipe", "keys", "--format", "md").stdout in PAGES["keys"]
    codes = re.findall(r"^\| (\d+) \|", PAGES["training"], re.M)
    assert codes == ["0", "1", "2", "3", "75", "130"]


def test_help_shows_the_pages():
    listed = pkmlm("help").stdout
    for topic in TOPICS:
        assert re.search(rf"^  {topic} ", listed, re.M)
        assert pkmlm("help", topic).stdout == re.sub(r"\\([\\|`*<\[])", r"\1", PAGES[topic])
        assert PAGES[topic].startswith("# ")
    assert {path.stem for path in MANUAL.glob("*.md")} == set(TOPICS)
    assert "training" in pkmlm("help", "trainin", code=2).stderr


def test_the_front_door_is_lazy():
    program = "import sys, pkmlm; assert 'torch' not in sys.modules; pkmlm.RowAdam; assert 'torch' in sys.modules"
    run_python(program + "; [getattr(pkmlm, name) for name in pkmlm.__all__]", ROOT)
