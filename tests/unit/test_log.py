"""The training log: events, lines, sinks."""

import json
import re
import sys

import pytest

from pkmlm.errors import UserError
from pkmlm.files import write_json
from pkmlm.recipe.schema import Log
from pkmlm.train.log import TrainingLog


def plain(text: str) -> str:
    """What a terminal shows of a text, without its colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_events_and_lines_go_to_files_and_the_screen(tmp_path, capsys):
    with TrainingLog(tmp_path, "x", 40, Log(every=20)) as log:
        for step in range(1, 41):
            log.event("train", step, loss=1 / step)
            log.progressed(step, 1 / step, 1000.0, "")
        log.say("a line with [bold], :smile: and \x1b[31m in it")
        log.sync()
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events == [{"event": "train", "step": step, "loss": 1 / step} for step in range(1, 41)]
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in shown[:2]] == ["step 20/40", "step 40/40"]
    assert shown[2] == "a line with [bold], :smile: and \\x1b[31m in it"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 3


def test_a_narrow_terminal_shows_the_steps_and_all_that_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with TrainingLog(tmp_path, "a-long-name-that-needs-no-room", 400, Log()) as log:
        for step in range(1, 121):
            log.progressed(step, 5.1234, 6012.0, "layer 3 pkm reads 98%  layer 12 pkm reads 92%  ")
    *_, last = capsys.readouterr().err.replace("\x1b[2K", "\x1b[1A").split("\x1b[1A")  # what stays
    lines = plain(last).strip().splitlines()
    assert max(map(len, lines)) <= 40
    bar, *words = " ".join(lines).split()
    assert set(bar) <= {"\u2501", "\u2578", "\u257a"}
    assert re.fullmatch(
        r"120/400 loss 5.123 6,012 tokens/s layer 3 pkm reads 98% layer 12 pkm reads 92% ETA [\d:]+", " ".join(words)
    )


def test_a_long_line_is_not_broken_where_there_is_no_terminal(tmp_path, capsys):
    line = "training in runs/demo on cpu, fp32: auto: a CPU; train.precision=bf16 may be faster on this one"
    with TrainingLog(tmp_path, "x", 4, Log()) as log:
        log.say(line)
        log.warn(0, line)
    assert capsys.readouterr().err.splitlines() == [line, f"warning: step 0: {line}"]


def test_a_terminal_that_cannot_move_its_cursor_gets_the_lines_of_a_pipe(tmp_path, write_recipe, ranks):
    """TERM=dumb is Emacs' shell, and that of many a build server."""
    recipe, data = write_recipe(tmp_path, "dense"), ["-s", f"name={'long' * 20}"]
    (tmp_path / "grid.yaml").write_text("base: dense.yaml\naxes: {width: {16: {model.dim: 16}, 32: {}}}\n")
    commands = {
        "train": ["train", recipe, "-o", tmp_path / "{}", *data],
        "eval": ["eval", tmp_path / "{}"],
        "sweep": ["sweep", tmp_path / "grid.yaml", "--dry-run", "-s", "train.steps=2"],
    }
    for name, command in commands.items():
        lines = {}
        for term in ("dumb", "xterm"):
            said, words = tmp_path / f"{name}-{term}", [str(word).format(term) for word in command]
            ranks.run(1, "command_on_terminal", words=words, term=term, said=said)
            lines[term] = said.read_text()
        assert "\x1b" in lines["xterm"], "a terminal that is one has moving lines"
        shown = lines["dumb"].replace("\r\n", "\n")
        assert not {"\x1b", "\r"} & set(shown)
        (piped,) = ranks.pkmlm(1, *(str(word).format("piped") for word in command))
        assert [line.split("  ")[0] for line in shown.splitlines()] == [
            line.split("  ")[0].replace("piped", "dumb") for line in piped.stderr.splitlines()
        ]


def test_what_is_done_between_two_steps_is_shown_meanwhile(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with TrainingLog(tmp_path, "x", 4, Log()) as log:
        log.progressed(1, 5.0, 1000.0, "")
        with log.doing("validating"):
            log.progress.refresh()
        assert "1/4 validating" in plain(capsys.readouterr().err)
    assert "1/4 loss 5.000" in plain(capsys.readouterr().err)


def test_numbers_that_are_not_finite_are_a_mistake_of_ours(tmp_path):
    with TrainingLog(tmp_path, "x", 4, Log(), quiet=True) as log, pytest.raises(ValueError, match="JSON"):
        log.event("train", 1, loss=float("nan"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_sink_whose_package_is_missing_is_told(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    settings = Log(tensorboard=name == "tensorboard", wandb="project" if name == "wandb" else None)
    with (
        pytest.raises(UserError, match=f"log.{name}"),
        TrainingLog(tmp_path, "x", 4, settings),
    ):
        pass


def test_a_project_has_a_run_of_its_own_for_each_run_and_the_usage_of_its_memories(tmp_path, monkeypatch):
    begun, logged = [], []

    class Wandb:
        """What of Weights & Biases is called here."""

        def init(self, id: str, **_: object) -> "Wandb":
            begun.append(id)
            return self

        def log(self, scalars: dict[str, float], step: int) -> None:
            logged.append((step, scalars))

        def finish(self) -> None: ...

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    usage = [{"memory": "pkm", "layer": 3, "kind": "product-key", "usage": 0.5, "kl": None}]
    for folder, run in (("one", "a"), ("one", "a"), ("one", "b"), ("copy", "a")):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_json(tmp_path / folder / "run.json", {"started": run})
        with TrainingLog(tmp_path / folder, "x", 4, Log(wandb="project"), quiet=True) as log:
            log.event("valid", 2, loss=4.0, usage=usage)
    assert begun[0] == begun[1], "a resumed run"
    assert len(set(begun)) == 3, "neither another in its place nor a copy"
    assert logged[0] == (2, {"valid/loss": 4.0, "valid/layer 3 pkm/usage": 0.5})


def test_tensorboard_drops_the_steps_that_a_resume_takes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def train(first: int, last: int, loss: float) -> None:
        with TrainingLog(tmp_path, "x", 9, Log(tensorboard=True), quiet=True) as log:
            for step in range(first, last + 1):
                log.event("train", step, loss=loss)

    train(1, 3, 3.0)  # killed before a checkpoint
    train(1, 6, 2.0)  # killed after the checkpoint of step 4
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    train(5, 7, 1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    told = [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]
    assert told == [*((step, 2.0) for step in range(1, 5)), *((step, 1.0) for step in range(5, 8))]
