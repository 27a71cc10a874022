"""Grids: what is read from a file, which cells it has, and what is concluded from their numbers."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import pytest

from pkmlm.bench.steps import timed_part, vocab_size_in
from pkmlm.cost import cost_of
from pkmlm.errors import UserError
from pkmlm.files import write_json
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.nodes import parse, yaml_text
from pkmlm.recipe.schema import recipe_sha256
from pkmlm.report.metrics import MEASURES, TASKS
from pkmlm.report.plots import Look
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, read_progress
from pkmlm.signals import StopRequest
from pkmlm.sweep.budget import relative_steps
from pkmlm.sweep.cells import Cell, CellOutcome, Cells, steps_taken, suite_accuracy
from pkmlm.sweep.grid import Claim, Grid, Point, read_grid
from pkmlm.sweep.plots import picture
from pkmlm.sweep.results import Results, SweepFolder
from pkmlm.sweep.run import Runner, Workers, facts_of_cost, tasks_of, with_vocab_sizes
from pkmlm.sweep.verdicts import BySeed, Verdict, pairs_of, rank_correlations, verdict
from tests import PATIENCE
from tests.conftest import ROOT, write_checkpoint

LOOK = Look()
BASE = """name: base
model:
  dim: 32
  layers: 2
  heads: 2
  context: 16
  vocab_size: 100
  memories: {pkm: {kind: product-key, layers: 2, num_keys: 8, topk: 4, key_dim: 16}}
train: {batch_tokens: 64, micro_batch: 4}
"""
GRID = """title: Size and norm
base: base.yaml
seeds: [1, 2]
set: {model.dim: 16}
axes:
  slots:
    none: {model.memories: null}
    64: {model.memories.pkm.num_keys: 8}
    256: {model.memories.pkm.num_keys: 16}
  norm:
    no: {model: {memories: {pkm: {query_norm: none}}}}
    yes: {model.memories.pkm.query_norm: batch, model.memories.pkm.layers: [1, 2]}
without: [{slots: none, norm: yes}]
tune: {values: [1e-3, 2e-3, 4e-3]}
measure: [perplexity, usage, dense]
paper:
  perplexity: {none: [23.0], 64: [22.0, 21.0], 256: {no: 20.5, yes: 19.5}}
claims:
  - {text: norm helps, measure: perplexity, greater: {norm: no}, less: {norm: yes}}
  - {text: size helps, measure: perplexity, falling: slots}
  - {text: used, measure: usage, rising: slots, at: {norm: yes, slots: [64, 256]}}
figures: [{x: slots, y: perplexity, line: norm}, {x: usage, y: perplexity}]
scales:
  small: {seeds: [1], only: {slots: [none, 64]}, set: {model.layers: 1, model.memories.pkm.layers: 1}}
  large: {axes: {slots: {256: {model.memories.pkm.heads: 2}}}}
"""
USED = {"memory": "pkm", "layer": 2, "kind": "product-key", "mass": {"usage": 0.5, "kl": 1.0}}
P = ("none", "no"), ("64", "no"), ("64", "yes"), ("256", "no"), ("256", "yes")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "grid.yaml").write_text(GRID)
    return tmp_path


def grid_of(folder: Path, text: str = GRID, scale: str | None = "large") -> Grid:
    (folder / "grid.yaml").write_text(text)
    return read_grid(folder / "grid.yaml", scale)[0]


def others_of(cells: Cells, chosen: Cell) -> list[Cell]:
    return cells.others(chosen.point, chosen.tuned)


def test_a_cells_steps_are_those_of_its_last_line_however_long(folder):
    cell = Cells(grid_of(folder), folder / "base.yaml").first[P[0], "1e-3"]
    assert steps_taken(cell, folder) == 0, "no log yet"
    (folder / cell.name).mkdir()
    memories = [{"layer": layer, "memory": "tables", "part": "ffn1", "usage": 0.5, "kl": 1.25} for layer in range(72)]
    lines = [{"event": "train", "step": 7}, {"event": "valid", "step": 7, "usage": memories}]
    (folder / cell.name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert steps_taken(cell, folder) == 7


def test_the_example_of_the_manual_has_every_key(tmp_path):
    text = (ROOT / "pkmlm" / "manual" / "sweeps.md").read_text().partition("\n```yaml\n")[2].partition("```")[0]
    (tmp_path / "small.yaml").write_text(BASE)
    assert grid_of(tmp_path, text, "large").points()[-1] == ("4k", "yes", "seconds")
    assert len(Cells(grid_of(tmp_path, text, "small"), tmp_path / "small.yaml")) == 9, "three points, shared by both"
    keys = parse(text, "sweeps.md").value
    assert set(keys) | {"set", "only"} == {field.name for field in fields(Grid)} | {"scales"}


def test_a_grid_without_a_title_is_called_like_its_file(folder):
    assert grid_of(folder).title == "Size and norm"
    assert grid_of(folder, GRID.partition("\n")[2]).title == "grid"


def test_every_cell_is_its_recipe(folder):
    assert grid_of(folder, scale="small").points() == list(P[:3])
    assert read_grid(folder / "grid.yaml")[1] == "small", "the first scale is the one that is taken"
    with pytest.raises(UserError, match=r"huge .*small, large"):
        grid_of(folder, scale="huge")
    assert grid_of(folder).points() == list(P)
    cells = Cells(grid_of(folder), folder / "base.yaml", ["train.steps=7"])
    assert len(cells) == 5 * 3 + 5
    cell = cells.first[("256", "yes"), "2e-3"]
    memory = cell.recipe.model.memories["pkm"]
    assert (memory.num_keys, memory.heads, memory.query_norm, memory.layers) == (16, 2, "batch", ("1", "2"))
    assert (cell.recipe.model.dim, cell.recipe.optim.lr, cell.recipe.train.steps) == (16, 2e-3, 7)
    others = others_of(cells, cell)
    assert [(other.seed, other.tuned, other.recipe.train.seed) for other in others] == [(2, "2e-3", 2)]
    for each in (cell, *others):
        assert load_recipe(folder / "base.yaml", each.overrides) == each.recipe
    (folder / "base.yaml").unlink()
    assert others_of(cells, cell) == others, "the base as it was at first"
    assert cell.name == "256_yes_2e-3_seed-1"


@pytest.mark.parametrize(
    ("key", "cause"),
    [("optim.lr", "optim.lr by its tune"), ("model", "model.memories by its axis slots")],
    ids=["the key", "its section"],
)
def test_what_cells_differ_in_is_not_for_the_command_line(folder, key, cause):
    with pytest.raises(UserError, match=f"-s {key.strip()}: the grid sets {cause}"):
        Cells(grid_of(folder), folder / "base.yaml", [f"{key}=3"])


def test_what_one_axis_drops_is_gone_whatever_others_say_of_it(folder):
    axes = "{first: {with: {}, without: {model.memories: null}},"
    axes += " second: {two: {model.memories.pkm.topk: 2}, none: {model.memories.pkm: ~}}}"
    tune = "{key: model.memories.pkm.optim.lr, values: [1e-3, 1e-2]}"
    grid = grid_of(folder, f"base: base.yaml\naxes: {axes}\ntune: {tune}\n", None)
    cells = Cells(grid, folder / "base.yaml", ["model.memories.pkm.heads=2"])
    for (point, _), cell in cells.first.items():
        memories = cell.recipe.model.memories
        assert [(each.topk, each.heads) for each in memories.values()] == [(2, 2)] * (point == ("with", "two"))
        assert load_recipe(folder / "base.yaml", cell.overrides) == cell.recipe
    with pytest.raises(UserError, match=r"-s model\.memories: the grid sets "):
        Cells(grid, folder / "base.yaml", ["model.memories=null"])


def test_an_axis_adds_a_memory_to_cells_that_have_none(folder):
    axes = "{kind: {none: {}, hash: {model.memories.tables: {kind: hash, bits: 4}}}}"
    grid = grid_of(folder, f"base: base.yaml\nset: {{model.memories: null}}\naxes: {axes}\n", None)
    models = [cell.recipe.model for cell in Cells(grid, folder / "base.yaml").first.values()]
    assert [list(model.memories) for model in models] == [[], ["tables"]]


def test_the_papers_numbers_are_found_in_lists_and_mappings(folder):
    grid = grid_of(folder)
    assert [grid.paper_value("perplexity", point) for point in P] == [23.0, 22.0, 21.0, 20.5, 19.5]
    assert grid.paper_value("usage", P[0]) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("base: base.yaml", "bas: base.yaml", "unknown key bas|base"),
        ("base: base.yaml\n", "", "base"),
        ("seeds: [1, 2]", "seeds: [one]", "grid.yaml:3:|seeds|one"),
        ("seeds: [1, 2]", "seeds: [1, -2]", "slots none, norm no: -s train.seed=-2: train.seed"),
        ("    256: {", "    '': {", "axes.slots"),
        ("  norm:\n", "  norm: 3\n  more:\n", "axes.norm: found 3"),
        (
            "no: {model: {",
            "no: {mode: {",
            "slots none, norm no: -s mode.memories.pkm.query_norm=none: unknown key mode",
        ),
        ("without:", "only: {norm: [no],\n  slots: [65]}\nwithout:", "14:3: only: found 65"),
        ("none, norm: yes", "none, norm: ye", "without: found ye|no, yes"),
        ("tune: {values: [1e-3, 2e-3, 4e-3]}", "tune: {values: []}", "tune|optim.lr"),
        ("[1e-3, 2e-3, 4e-3]", "[1e-3, 2e-3, 1e-3]", "tune.values: found 1e-3"),
        ("tune: {", "tune: {key: model.memories.pkm.num_keys, ", "model.memories.pkm.num_keys|its tune|its axis slots"),
        ("measure: [perplexity, usage", "measure: [perplexity, usag", "15:23: measure: found usag"),
        ("  perplexity: {none", "  perplexities: {}\n  perplexity: {none", "17:3: paper: found perplexities"),
        ("no: 20.5", "no: abc", "paper.perplexity.256.no: found abc"),
        ("no: 20.5", "no: 1e999", "paper.perplexity.256.no: found 1e999|finite"),
        ("no: 20.5", "no: [20.5]", "paper.perplexity.256.no: found a list"),
        ("[22.0, 21.0]", "[22.0, 21.0, 20.0]", "paper.perplexity.64: found a list of 3|norm: no, yes"),
        ("{no: 20.5", "{on: 20.5", "paper.perplexity.256: found a mapping|norm: no, yes"),
        ("norm: no}, less", "norms: no}, less", "claims: found norms|slots, norm"),
        ("less: {norm: yes}", "less: {norm: no}", "norm helps"),
        ("less: {norm: yes}", "less: {slots: none}", "claims|same axes"),
        ("falling: slots}", "falling: size}", "20:5: claims: found size"),
        ("falling: slots}", "falling: slots, rising: slots}", "claims|greater|rising"),
        ("text: size helps, ", "", "20:5: claims|text"),
        ("usage, rising", "usge, rising", "claims: found usge"),
        ("y: perplexity, line", "y: kl, line", "figures: found kl"),
        ("y: perplexity, line: norm", "y: perplexity, line: slots", "figures: found slots|norm"),
        ("{x: usage, y: perplexity}", "{x: slots, y: perplexity}", "figures: found perplexity by slots twice"),
        ("tune: {", "tune: {also: {optim.muon.lr: [1e-2]}, ", "tune.also: found 1 values of optim.muon.lr|expected 3"),
        (
            "tune: {",
            "tune: {also: {model.memories.pkm.num_keys: [8, 16, 32]}, ",
            "model.memories.pkm.num_keys is set by its tune and by its axis slots",
        ),
        ("seeds: [1, 2]", "seeds: [1, 2]\nequal: [tokens, tokens]", "equal: found tokens twice"),
        ("seeds: [1, 2]", "seeds: [1, 2]\nequal: hours", "equal|tokens|operations|seconds"),
        ("axes:\n", "equal: tokens\naxes:\n  equal: {a: {}}\n", "7:3: axes: found equal"),
        (
            "set: {model.dim: 16}",
            "set: {train.epochs: 2}\nequal: tokens",
            "slots none, norm no, equal tokens: train.epochs",
        ),
        (
            "axes:\n",
            "equal: tokens\naxes:\n  length: {x: {train.steps: 9}}\n",
            "5:1: equal: train.steps is set by its axis",
        ),
        ("large: {axes: {slots: {256: {model.memories.pkm.heads: 2}}}}", "large: 5", "scales.large: found 5"),
        ("seeds: [1, 2]", "seeds: 3", "seeds: found 3|a list"),
    ],
)
def test_what_is_wrong_in_a_grid_is_named_in_one_line(folder, before, after, words):
    assert before in GRID
    with pytest.raises(UserError) as error:
        Cells(grid_of(folder, GRID.replace(before, after, 1)), folder / "base.yaml")
    assert all(word in error.value.message for word in words.split("|")), error.value.message
    assert "\n" not in error.value.message


EQUAL = """base: base.yaml
axes:
  model:
    none: {model.memories: null}
    pkm: {}
    half: {train.batch_tokens: 32, train.micro_batch: 2}
"""


def steps_at(folder: Path, equal: str, tune: str = "", **options: bool) -> dict[tuple[Point, str | None], int]:
    """`train.steps` of each whole cell, at an equal amount of 600 of the first model's."""
    grid = grid_of(folder, f"{EQUAL}equal: {equal}\n{tune}", None)
    known = with_vocab_sizes(Cells(grid, folder / "base.yaml", ["train.steps=600"]), None)
    relative = relative_steps(known, grid, folder, lambda line: None, **options)
    cells = Cells(grid, folder / "base.yaml", ["train.steps=600"], relative)
    return {place: cell.recipe.train.steps for place, cell in cells.first.items()}


def test_at_equal_amounts_each_model_has_the_steps_that_take_it(folder):
    found = {point[0]: steps for (point, _), steps in steps_at(folder, "tokens").items()}
    assert found == {"none": 600, "pkm": 600, "half": 1200}
    per_token = {
        name: cost_of(load_recipe(folder / "base.yaml", more), 100).flops_per_token
        for name, more in (("none", ["model.memories=null"]), ("pkm", []))
    }
    found = {point[0]: steps for (point, _), steps in steps_at(folder, "operations").items()}
    expected = 600 * per_token["none"] / per_token["pkm"]
    assert found == {"none": 600, "pkm": round(expected), "half": round(2 * expected)}
    assert found["pkm"] != 600, "or the test says nothing"


def test_steps_at_equal_seconds_are_timed_once_and_kept(folder):
    """Later models are timed beside the first; what is kept decides, also where the machine has become slower."""
    steps_at(folder, "seconds", keep=False)
    assert not (folder / "budget.json").exists()
    found = {point[0]: steps for (point, _), steps in steps_at(folder, "seconds").items()}
    kept = json.loads((folder / "budget.json").read_text())
    assert found["none"] == 600
    relative = sorted(600 / steps for steps in found.values())
    assert sorted(kept["relative"].values()) == pytest.approx(relative, rel=0.01)
    pkm = next(key for key, value in kept["relative"].items() if found["pkm"] == round(600 / value))
    kept |= {"relative": {kept["first"]: 1.0, pkm: 3.0}, "busy_cores": 7.0}
    (folder / "budget.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=r"budget\.json lacks"):
        steps_at(folder, "seconds", table_only=True)
    again = {point[0]: steps for (point, _), steps in steps_at(folder, "seconds").items()}
    assert (again["none"], again["pkm"]) == (600, 200)
    kept_now = json.loads((folder / "budget.json").read_text())
    assert len(kept_now["relative"]) == 3, "the one that was missing"
    assert kept_now["busy_cores"] >= 7.0, "when the others were timed"
    kept["first"] = pkm
    (folder / "budget.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match="first model is another"):
        steps_at(folder, "seconds")
    (folder / "budget.json").write_text("{}")
    with pytest.raises(UserError, match=r"budget\.json"):
        steps_at(folder, "seconds")


def test_epochs_without_tokens_are_left_to_training(folder):
    cells = Cells(grid_of(folder, EQUAL, None), folder / "base.yaml", ["train.epochs=2"])
    assert {cell.recipe.train.epochs for cell in cells.first.values()} == {2}


def test_what_takes_as_many_steps_at_both_is_one_run(folder):
    tune = "tune: {values: [1e-3, 2e-3]}\n"
    short = "    short: {model.memories: null, train.batch_tokens: 32, train.micro_batch: 2}\n"
    grid = grid_of(folder, f"{EQUAL}{short}equal: [tokens, operations]\nseeds: [1, 2]\n{tune}", None)
    known = with_vocab_sizes(Cells(grid, folder / "base.yaml"), None)
    relative = relative_steps(known, grid, None, lambda line: None, retime=False)
    cells = Cells(grid, folder / "base.yaml", relative=relative)
    names = {place[0]: cell.name for place, cell in cells.first.items() if place[1] == "1e-3"}
    assert names["none", "tokens"] == names["none", "operations"] == "none_1e-3_seed-1"
    assert names["pkm", "tokens"] == "pkm_1e-3_seed-1"
    assert names["pkm", "operations"] == "pkm_operations_1e-3_seed-1"
    assert names["half", "tokens"] == "half_tokens_1e-3_seed-1"
    assert names["short", "tokens"] == names["short", "operations"] == "short_tokens_1e-3_seed-1"
    steps = {model: cells.first[(model, "tokens"), "1e-3"].recipe.train.steps for model in ("none", "half")}
    assert steps["half"] == 2 * steps["none"]
    assert len(cells) == 6 * (2 + 1)
    results = Results(grid, cells, {place: {} for place in cells.first})
    ran = []

    class Recorder(Runner):
        def _run_cell(self, cell, measure):
            ran.append((cell.name, measure))
            return measured_by_hand(cell, {"valid_loss": float(cell.tuned)})

    Recorder(folder, grid.measure, Workers(2), StopRequest(), "").run(cells, results.add, lambda running: None)
    assert len(set(ran)) == len(ran)
    assert {name for name, _ in ran} == results.outcomes.keys()
    assert {name for name, measure in ran if measure} == {name for name in results.outcomes if "1e-3" in name}
    assert len(results.in_order()) == results.ended == len(cells)


def test_a_point_without_the_tuned_key_is_one_run(folder):
    tune = "tune: {key: model.memories.pkm.optim.lr, values: [1e-3, 3e-3, 1e-2]}\nseeds: [1, 2]\n"
    cells = Cells(grid_of(folder, EQUAL + tune, None), folder / "base.yaml")
    assert len(cells) == (1 + 1) + 2 * (3 + 1)
    results = Results(cells.grid, cells, {place: {"dense": 1, "memory": 0, "operations": 1} for place in cells.first})
    for cell in cells.first.values():
        results.add(measured_by_hand(cell, {"valid_loss": 5.0 - float(cell.tuned)}))
    rows = {row[0]: row[1:] for row in results.tables()[-1].rows}
    assert rows["none"] == [4.999, 4.999, 4.999, None], "whose best is at no edge"
    assert rows["pkm"] == [4.999, 4.997, 4.99, "yes"]
    assert [row[-1] for row in results.plan({}).rows[:3]] == [2, 4, 4]


def test_a_quoted_value_reaches_the_recipe_as_it_is(folder):
    text = GRID.replace("set: {", r"""set: {data.dir: "a\\b\"c\nd", """)
    cells = Cells(grid_of(folder, text), folder / "base.yaml")
    assert cells.first[P[0], "1e-3"].recipe.data.dir == 'a\\b"c\nd'
    text = GRID.replace("set: {model.dim: 16}", "set:\n  model.dim: 16\n  data.dir:\n    - a\n    - b, c")
    cells = Cells(grid_of(folder, text), folder / "base.yaml")
    assert cells.first[P[0], "1e-3"].recipe.data.folders == ("a", "b, c")


def test_two_values_with_one_name_are_refused(folder):
    text = GRID.replace("    256: {model", "    64!: {}\n    64?: {}\n    256: {model")
    with pytest.raises(UserError, match="64-_no_1e-3_seed-1"):
        Cells(grid_of(folder, text), folder / "base.yaml")


def numbers(table: dict[tuple[str, tuple[str, str]], dict[int, float]]):
    return lambda measure, point: table.get((measure, point), {})


def held(grid: Grid, claim: Claim, values: BySeed, tokenizers: Mapping[Point, str] = MappingProxyType({})) -> Verdict:
    """The verdict on all points, which read as the grid says, with one tokenizer unless `tokenizers` says otherwise."""
    return verdict(grid, claim, values, lambda point: tokenizers.get(point), None, grid.points())


def ranked(grid: Grid, values: BySeed, tokenizers: Mapping[Point, str] = MappingProxyType({})) -> list[Verdict]:
    """The rank correlations over all points, likewise."""
    return rank_correlations(grid, values, lambda point: tokenizers.get(point), None, grid.points())


def test_claims_are_held_against_means_and_seeds(folder):
    grid = grid_of(folder)
    measured = {
        ("perplexity", P[0]): {1: 30.0, 2: 31.2},
        ("perplexity", P[1]): {1: 29.0, 2: 30.2},  # lower than P[0] in each seed, but not beyond the other's
        ("perplexity", P[2]): {1: 28.0, 2: 30.3},  # lower than P[1] on average, not in each seed
        ("perplexity", P[3]): {1: 28.5, 2: 28.6},  # beyond both of P[1]
        ("usage", P[2]): {1: 0.5},
        ("usage", P[4]): {1: 0.4, 2: 0.4},
    }
    norm, size, used = (held(grid, claim, numbers(measured)) for claim in grid.claims)
    assert (norm.pairs, norm.held) == (1, 1), "256 slots with norm were not measured"
    assert (norm.seeded, norm.in_every, norm.clear) == (1, 0, 0)
    assert (size.pairs, size.held, size.seeded, size.in_every, size.clear) == (2, 2, 2, 2, 1)
    assert (used.pairs, used.held, used.seeded) == (1, 0, 0), "one seed that has both says nothing of seeds"
    assert norm.row() == ["norm helps", "1 of 1", "0 of 1", "0 of 1", None]
    alike = {P[1]: {1: 30.0, 2: 31.0}, P[2]: {1: 30.0, 2: 31.0, 3: 30.5}}
    norm = held(grid, grid.claims[0], lambda _, point: alike.get(point, {}))
    assert norm.row() == ["norm helps", "0 of 1", "0 of 1", "0 of 1", None], "what is equal is not less"
    assert used.row() == ["used", "0 of 1", None, None, None]


def test_a_claim_is_held_against_the_seeds_that_both_have(folder):
    grid = grid_of(folder)
    measured = {
        ("perplexity", P[1]): {1: 30.0, 2: 20.0},  # the mean of both is below P[2]'s only one
        ("perplexity", P[2]): {1: 29.0},
        ("perplexity", P[3]): {1: 30.0},
        ("perplexity", P[4]): {2: 20.0},
    }
    norm, size, _ = (held(grid, claim, numbers(measured)) for claim in grid.claims)
    assert norm.row() == ["norm helps", "1 of 1", None, None, None], "the other pair has no seed in common"
    assert size.row() == ["size helps", "0 of 1", None, None, None]
    measured |= {("perplexity", P[2]): {1: 29.0, 2: 19.0, 3: 40.0}, ("perplexity", P[1]): {1: 30.0, 2: 31.0}}
    norm = held(grid, grid.claims[0], numbers(measured))
    assert norm.row() == ["norm helps", "1 of 1", "1 of 1", "1 of 1", None]


def test_what_is_measured_by_the_token_is_not_compared_across_tokenizers(folder):
    claims = "claims:\n  - {text: norm helps, measure: bits_per_byte, greater: {norm: no}, less: {norm: yes}}\n"
    grid = grid_of(
        folder, GRID.replace("[perplexity, usage", "[perplexity, bits_per_byte, usage").replace("claims:\n", claims)
    )
    measured = {(name, P[n]): {1: float(9 - n)} for name in ("perplexity", "bits_per_byte") for n in range(1, 5)}
    bits, ppl, _, _ = grid.claims
    tokenizers = {P[1]: "a", P[2]: "b", P[3]: "a", P[4]: "a"}
    assert held(grid, bits, numbers(measured), tokenizers).row()[1] == "2 of 2"
    assert held(grid, ppl, numbers(measured), tokenizers).row()[1] == "1 of 1; 1 not comparable: other tokenizers"
    tokenizers |= {P[3]: "c"}
    assert held(grid, ppl, numbers(measured), tokenizers).row()[1] == "2 not comparable: other tokenizers"
    assert held(grid, ppl, numbers({}), tokenizers).row()[1] is None, "nothing was measured"


def test_a_claim_along_an_axis_compares_neighbours_with_all_else_equal(folder):
    grid = grid_of(folder)
    assert list(pairs_of(grid, grid.claims[1])) == [(P[1], P[0]), (P[3], P[1]), (P[4], P[2])]
    assert list(pairs_of(grid, grid.claims[0])) == [(P[2], P[1]), (P[4], P[3])]


def test_rank_correlation_with_the_paper(folder):
    grid = grid_of(folder)
    opposite = {("perplexity", point): {1: value} for point, value in zip(P, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True)}
    (found,) = ranked(grid, numbers(opposite))
    assert found.correlation == pytest.approx(-1.0)
    (found,) = ranked(grid, numbers({**opposite, ("perplexity", P[0]): {1: 3.5}}))
    # ranks 3 1 2 4 5 against 5 4 3 2 1: 1 - 6 (4 + 9 + 1 + 4 + 16) / (5 * 24)
    assert found.correlation == pytest.approx(1 - 6 * 34 / 120)
    (found,) = ranked(grid, numbers({**opposite, ("perplexity", P[0]): {1: 3.0}}))
    # 3 2 3 4 5 have the ranks 2.5 1 2.5 4 5, less their mean -0.5 -2 -0.5 1 2; the paper's are 2 1 0 -1 -2
    assert found.correlation == pytest.approx(-8 / (9.5 * 10) ** 0.5)
    assert ranked(grid, numbers(dict(list(opposite.items())[:3])))
    assert not ranked(grid, numbers(dict(list(opposite.items())[:2]))), "two points have no order to speak of"
    (found,) = ranked(grid, numbers(opposite), {P[0]: "other"})
    assert found.row()[1] == "5 not comparable: other tokenizers"
    assert not ranked(grid, lambda measure, point: {1: 20.0}), "nor have equal ones"
    higher = {("perplexity", P[0]): {1: 1.0, 2: 9.0}}  # were its mean taken over both seeds, it would be the greatest
    (found,) = ranked(grid, numbers(opposite | higher))
    assert found.correlation == pytest.approx(-1.0)
    assert not ranked(grid, numbers(opposite | {("perplexity", P[0]): {2: 1.0}})), "no seed is common to all"


def measured_by_hand(cell: Cell, facts: Mapping[str, object]) -> CellOutcome:
    """The outcome of a cell whose run is of a dense model of no known size."""
    return CellOutcome(cell, "measured", {"kind": "dense", "total": None, "step": 20, **facts})


def test_other_seeds_count_at_the_best_tuned_value_only(folder):
    cells = Cells(grid_of(folder), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {"dense": 2_000_000, "memory": 3_000_000} for place in cells.first})
    tuning = cells.tuning(P[2])
    for cell, loss, ppl in zip(tuning, (5.0, 4.0, 4.5), (150.0, 50.0, 80.0), strict=True):
        results.add(measured_by_hand(cell, {"valid_loss": loss, "test_token_ppl": ppl, "seconds": 0.4}))
    (other,) = others_of(cells, tuning[1])
    results.add(measured_by_hand(other, {"valid_loss": 4.1, "seconds": 0.8}))
    half, costs, _, _ = ([row for row in table.rows if tuple(row[:2]) == P[2]] for table in results.tables())
    assert half[0][3:5] == ["1/2", "50.00"], "the other is trained, not evaluated"
    assert (costs[0][3], costs[0][-1]) == (2, "0.6 +-0.3")
    results.add(measured_by_hand(other, {"valid_loss": 4.1, "test_token_ppl": 60.0, "seconds": 0.8}))
    assert results.values("perplexity", P[2]) == (50.0, 60.0)
    table, costs, tried, _ = results.tables()
    row = next(row for row in table.rows if tuple(row[:2]) == P[2])
    assert row == ["64", "yes", "2e-3", 2, "55.00 +-7.07", 21.0, None, "2.00"]
    assert [column.name for column in costs.columns][4:] == ["memory M", "M ops", "MB read", "train s"], (
        "dense is above"
    )
    row = next(row for row in costs.rows if tuple(row[:2]) == P[2])
    assert (row[2:5], row[-1]) == (["2e-3", 2, "3.00"], "0.6 +-0.3")
    assert next(row for row in tried.rows if tuple(row[:2]) == P[2])[2:] == [5.0, 4.0, 4.5, None]
    made = results.as_json("grid", "large")
    point = next(point for point in made["points"] if tuple(point["point"].values()) == P[2])
    assert point["measured"]["perplexity"] == {"mean": 55.0, "values": [50.0, 60.0]}
    assert point["tuned"] == "2e-3"
    assert point["paper"]["perplexity"] == 21.0


def test_nothing_is_chosen_while_values_are_still_to_be_tried(folder):
    cells = Cells(grid_of(folder), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {} for place in cells.first})
    first, second, third = cells.tuning(P[0])
    for cell in (first, second):
        results.add(measured_by_hand(cell, {"valid_loss": 5.0, "test_token_ppl": 9.0}))
        assert results.values("perplexity", P[0]) == ()
    results.add(CellOutcome(third, "stopped", {}))
    assert results.values("perplexity", P[0]) == ()
    assert results.tables()[0].title == "Size and norm: 2 of 20 runs"
    assert results.tables()[2].rows[0][2:] == [5.0, 5.0, None, None], "perhaps it never began"
    results.add(measured_by_hand(third, {"valid_loss": 6.0}))
    assert results.values("perplexity", P[0]) == (9.0,)
    assert results.tables()[0].rows[0][2:5] == ["1e-3", "1/2", "9.00"]
    assert results.tables()[2].rows[0][2:] == [5.0, 5.0, 6.0, "yes"]
    assert results.tables()[2].columns[-1].name == "best at the edge"
    results.add(CellOutcome(first, "failed", {}, "full disk"))  # trained, but not measured: no other takes its place
    assert results.tables()[0].rows[0][2:5] == [None, None, "failed"]
    for cell, status in zip(cells.tuning(P[1]), ("diverged", "failed", "diverged"), strict=True):
        results.add(CellOutcome(cell, status, {}))
    assert results.tables()[0].rows[1][2:5] == [None, None, "diverged and failed"]
    for cell, facts in ((first, {"valid_loss": 5.0}), (third, {})):
        results.add(measured_by_hand(cell, facts))
    with pytest.raises(UserError, match="none_no_4e-3_seed-1 has no validation loss, so that no value can be chosen"):
        results.values("perplexity", P[0])


def test_a_measure_that_a_point_does_not_have_is_no_failure(folder):
    """A dense point, of which one learning rate has diverged, has no usage."""
    text = GRID.replace("[perplexity, usage, dense]", "[usage, perplexity, dense]")
    cells = Cells(grid_of(folder, text), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {"dense": 2_000_000, "memory": 0} for place in cells.first})
    *measured, diverged = cells.tuning(P[0])
    for cell, loss in zip(measured, (5.0, 4.0), strict=True):
        results.add(measured_by_hand(cell, {"valid_loss": loss, "test_token_ppl": 20.0}))
    results.add(CellOutcome(diverged, "diverged", {}))
    assert results.tables()[0].rows[0][2:6] == ["2e-3", "1/2", None, "20.00"]


def test_costs_are_those_of_the_best_tuned_value(folder):
    text = GRID.replace("tune: {values: [1e-3, 2e-3, 4e-3]}", "tune: {key: model.layers, values: [2, 4]}")
    cells = Cells(grid_of(folder, text), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: facts_of_cost(cell.recipe) for place, cell in cells.first.items()})
    two, four = (results.costs[P[0], layers]["dense"] for layers in ("2", "4"))
    assert results.values("dense", P[0]) == pytest.approx([two / 1e6]), "nothing is chosen yet"
    for cell, loss in zip(cells.tuning(P[0]), (4.0, 3.0), strict=True):
        results.add(measured_by_hand(cell, {"valid_loss": loss}))
    assert results.values("dense", P[0]) == pytest.approx([four / 1e6])
    assert results.as_json("grid", None)["points"][0]["cost"]["dense"] == four > two


def test_where_nothing_is_chosen_other_seeds_count_though_the_first_diverged(folder):
    text = GRID.replace("tune: {values: [1e-3, 2e-3, 4e-3]}\n", "")
    cells = Cells(grid_of(folder, text), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {} for place in cells.first})
    (first,) = cells.tuning(P[0])
    results.add(CellOutcome(first, "diverged", {}))
    (other,) = others_of(cells, first)
    results.add(measured_by_hand(other, {"test_token_ppl": 20.0}))
    assert results.values("perplexity", P[0]) == (20.0,)
    assert [outcome.cell.seed for outcome in results.in_order()] == [1, 2]


def test_seeds_that_agree_can_be_drawn(folder):
    cells = Cells(grid_of(folder, GRID.replace("seeds: [1, 2]", "seeds: [1, 2, 3]")), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {} for place in cells.first})
    for cell in cells.first.values():
        for each in (cell, *others_of(cells, cell)):
            results.add(measured_by_hand(each, {"valid_loss": 1.0, "test_token_ppl": 1.2e-2}))
    assert fmean([1.2e-2] * 3) != 1.2e-2, "else this shows nothing"
    assert picture(results, cells.grid.figures[0], LOOK) is not None


def test_a_figure_has_a_panel_for_the_paper_and_a_line_for_each_value(folder):
    cells = Cells(grid_of(folder), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {} for place in cells.first})
    by_slots, by_usage = cells.grid.figures
    assert picture(results, by_slots, LOOK) is None, "nothing measured, nothing drawn"
    lines = [[point for point in P if point[1] == norm] for norm in ("yes", "no")]
    for point in lines[0] + lines[1]:
        if point == lines[1][0]:
            half = picture(results, by_slots, LOOK)
            assert [len(axes.containers) for axes in half.axes] == [1, 2], "the other is not measured"
            assert [text.get_text() for text in half.legends[0].get_texts()] == ["yes", "no"]
        usage = [] if point[0] == "none" else [USED]
        facts = {"valid_loss": 1.0, "test_token_ppl": 20.0, "usage": usage}
        for cell in cells.tuning(point):
            results.add(measured_by_hand(cell, facts))
    canvas = picture(results, by_slots, LOOK)
    assert canvas is not None
    measured, paper = canvas.axes
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["no", "yes"]
    ratios = [high / low for low, high in (axes.get_ylim() for axes in (measured, paper))]
    assert ratios[0] == pytest.approx(ratios[1]), "equal slopes are equal ratios"
    assert [tick.get_text() for tick in paper.get_xticklabels()] == ["none", "64", "256"]
    assert measured.get_yscale() == "linear"
    assert picture(results, replace(by_slots, log="y"), LOOK).axes[0].get_yscale() == "log"
    against = picture(results, by_usage, LOOK)
    assert against is not None
    (panel,) = against.axes  # the paper gives no usage
    assert panel.get_title() == "measured\n(some: 1 of 2 seeds)"
    assert len(panel.texts) == 4, "the point without a memory has no usage"
    (given,) = (line for line in GRID.splitlines() if "{none: [23.0]" in line)
    alike = "  perplexity: {64: [20.5, 20.5]}\n  usage: {64: [0.7, 0.7]}"
    results.grid = grid_of(folder, GRID.replace(given, alike))
    assert len(picture(results, by_usage, LOOK).axes) == 1, "one place of the paper's is no picture"


def test_a_stroke_joins_points_that_differ_along_one_axis(folder):
    axes = "axes:\n  depth: {shallow: {model.layers: 2}, deep: {model.layers: 4}}\n"
    by = "[{x: usage, y: perplexity, line: norm}, {x: slots, y: perplexity, line: norm}]"
    figures = f"measure: [perplexity, usage]\nfigures: {by}\n"
    text = GRID.split("without:")[0].replace("axes:\n", axes) + figures
    cells = Cells(grid_of(folder, text, None), folder / "base.yaml")
    results = Results(cells.grid, cells, {place: {} for place in cells.first})
    for cell in cells.first.values():
        usage = [USED] if cell.recipe.model.memories else []
        results.add(measured_by_hand(cell, {"test_token_ppl": 20.0, "usage": usage}))
        for other in others_of(cells, cell):
            results.add(measured_by_hand(other, {"test_token_ppl": 21.0, "usage": usage}))
    canvas = picture(results, cells.grid.figures[0], LOOK)
    (panel,) = canvas.axes
    assert (canvas.get_suptitle(), panel.get_title()) == ("Size and norm", ""), "no point lacks a seed"
    assert [len(stroke[0].get_xdata()) for stroke in panel.containers] == [2, 2, 2, 2]
    names = [f"{depth} slots {slots}" for depth in ("shallow", "deep") for slots in (64, 256)]
    assert [name.get_text() for name in panel.texts] == names * 2
    assert [name.get_text() for name in canvas.legends[0].get_texts()] == ["no", "yes"]
    (panel,) = picture(results, cells.grid.figures[1], LOOK).axes
    assert [list(stroke[0].get_xdata()) for stroke in panel.containers] == [[0, 1, 2]] * 4, "one for each depth"


def test_a_picture_has_a_panel_for_each_equal_amount(folder):
    text = f"{EQUAL}equal: [tokens, operations]\nfigures: [{{x: model, y: bits_per_byte}}]\n"
    grid = grid_of(folder, text, None)
    known = with_vocab_sizes(Cells(grid, folder / "base.yaml"), None)
    cells = Cells(grid, folder / "base.yaml", relative=relative_steps(known, grid, None, print, retime=False))
    results = Results(grid, cells, {place: {} for place in cells.first})
    for (point, _), cell in cells.first.items():
        results.add(measured_by_hand(cell, {"test_bits_per_byte": 2.0 if point[-1] == "tokens" else 1.0}))
    tokens, operations = picture(results, grid.figures[0], LOOK).axes
    assert [axes.get_title() for axes in (tokens, operations)] == [
        "measured at equal tokens",
        "measured at equal operations",
    ]
    for axes in (tokens, operations):
        (stroke,) = axes.containers
        assert [list(x) for x in (stroke[0].get_xdata(),)] == [[0, 1, 2]], "one line, of the points at this amount"


def test_no_part_of_a_report_ranks_perplexities_of_other_tokenizers(folder):
    """Neither correlations nor, without a word, tables; and each budget is ranked by itself."""
    text = """base: base.yaml
axes:
  model:
    s: {model.dim: 16, model.memories: null}
    m: {model.memories: null}
    l: {model.dim: 48, model.memories: null}
    pkm: {}
equal: [tokens, operations]
measure: [perplexity, bits_per_byte]
paper: {perplexity: [9.0, 8.0, 7.0, 6.0], bits_per_byte: [4.0, 3.0, 2.0, 1.0]}
"""
    cells = Cells(grid_of(folder, text, None), folder / "base.yaml", (), {})

    def told(tokenizers: str) -> Results:
        results = Results(cells.grid, cells, {place: {} for place in cells.first})
        for number, model in enumerate(cells.grid.axes["model"]):
            facts = {"tokenizer": tokenizers[number], "total": 1000 * (number + 1), "run": model}
            facts |= {"kind": "product-key" if model == "pkm" else "dense", "test_token_ppl": 60.0 - 10 * number}
            cell = cells.first[(model, "tokens"), None]
            results.add(CellOutcome(cell, "measured", facts | {"test_bits_per_byte": 5.0 - number}))
        return results

    same, other = told("aaaa"), told("aaab")
    assert [each.row()[1::3] for each in same.verdicts()] == [
        *([["+1.00", "tokens"]] * 2),
        *([["+1.00", "operations"]] * 2),
    ]
    shown = [each.row()[1] for each in other.verdicts()]
    assert shown == ["4 not comparable: other tokenizers", "+1.00"] * 2
    assert "M tokens" in [column.name for column in same.tables()[1].columns], "which differ at equal operations"
    notes = [results.tables()[0].note for results in (same, other)]
    assert notes[0] == ""
    assert "ppl" in notes[1]
    assert "bits" not in notes[1]


def test_a_speed_is_that_of_the_recipe_that_was_timed(folder):
    cells, swept = Cells(grid_of(folder, GRID.replace("dense]", "speed]")), folder / "base.yaml"), folder / "swept"
    other = Cells(grid_of(folder, GRID.replace("model.dim: 16", "model.dim: 32")), folder / "base.yaml")

    def recalled(cells: Cells) -> Results:
        results = Results(cells.grid, cells, {place: {} for place in cells.first})
        assert results.values("speed", P[0]) == (), "nothing is there"
        for cell, loss in zip(cells.tuning(P[0]), (4.0, 5.0, 6.0), strict=True):
            results.add(measured_by_hand(cell, {"valid_loss": loss}))
        SweepFolder(swept, "grid", None).recall(results)
        return results

    results = recalled(cells)
    timed = {"timed_on": {"device": "cpu", "torch": "2"}, "tokens_per_second": [1000.0, 3000.0, 2000.0]}
    recipe = recipe_sha256(cells.tuning(P[0])[0].recipe)
    results.speeds = {P[0]: {"point": cells.grid.place(P[0]), "recipe": recipe, **timed}}
    SweepFolder(swept, "grid", None).write(results)
    assert recalled(cells).values("speed", P[0]) == (2.0,)
    assert recalled(cells).speeds == results.speeds
    assert recalled(other).values("speed", P[0]) == ()
    SweepFolder(swept, "grid", None).write(recalled(other))
    assert recalled(cells).values("speed", P[0]) == (2.0,), "another's table loses no time"


def test_a_folder_keeps_to_the_settings_of_its_runs(folder):
    def results(*extra: str, text: str = GRID) -> Results:
        cells = Cells(grid_of(folder, text), folder / "base.yaml", extra)
        return Results(cells.grid, cells, {place: {} for place in cells.first})

    swept = SweepFolder(folder / "swept", "grid", None)
    swept.runs.mkdir(parents=True)
    swept.begin(results("train.steps=8"))
    swept.recall(results("train.steps=7"))  # nothing was trained with the other
    ours = results("train.steps=7", "data.dir=a b")
    swept.begin(ours)
    cell = ours.cells.first[P[0], "2e-3"]
    run = swept.runs / cell.name
    write_checkpoint(run, cell.recipe, Progress(2))
    with pytest.raises(UserError, match=r"with train.steps=7 'data.dir=a b' .expected nothing"):
        swept.recall(results())
    with pytest.raises(UserError, match=r"expected train.steps=8 'data.dir=a b'"):
        swept.recall(results("train.steps=8", "data.dir=a b"))
    write_json(run / "run.json", {"status": "diverged"})
    ours.add(CellOutcome(cell, "diverged", {}))
    swept.write(ours)
    swept.recall(results("data.dir=a b", "train.steps=7"))  # in another order
    swept.recall(results("data.dir=a b", text=GRID.replace("set: {", "set: {train.steps: 7, ")))
    shutil.rmtree(run)
    with pytest.raises(UserError, match="expected nothing"):
        swept.recall(results())  # the table is there


def test_measures_are_in_the_units_that_they_say():
    cost = {"read": 250_000, "tables": 500_000, "block_flops": 1e9, "map_flops": 1e9, "operations": 1e6, "dense": 1e6}
    for name in ("bytes", "table_mb", "block_flops", "map_flops", "operations", "dense"):
        assert MEASURES[name].read(cost) == pytest.approx(1.0), name
    assert MEASURES["speed"].read({"scoring_tokens_per_second": 1000.0}) == 1.0
    pool = [{"memory": "plus", "layer": layer, "pool": [1, 2], "mass": {"usage": 0.2}} for layer in (1, 2)]
    pool.append({"memory": "plus", "layer": None, "pool": [1, 2], "mass": {"usage": 0.3}})
    assert MEASURES["usage"].read({"usage": pool}) == 0.3


def test_the_average_beside_the_papers_is_over_its_tasks():
    tasks = {name: {"acc": 0.5} for name in TASKS} | {"wsc": {"acc": 0.8}, "boolq": {"acc": 0.1}}
    assert suite_accuracy(tasks) == pytest.approx(0.5 + 0.3 / len(TASKS))
    del tasks["piqa"]
    assert suite_accuracy(tasks) is None, "an average over other tasks would stand beside it"
    assert tasks_of(["wsc", "average_acc"]) == list(TASKS)
    assert tasks_of(["wsc", "usage"]) == ["wsc"]


GRIDS = sorted((ROOT / "recipes").glob("*/grids/*.yaml"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_the_papers_grids_are_possible_at_every_scale(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    scales, tested = parse(yaml_text(path), str(path)).value.get("scales"), set()
    for scale in scales.value if scales else [None]:
        grid, _ = read_grid(path, scale)
        cells = Cells(grid, path.parent / grid.base, ["model.vocab_size=50000"])
        assert len(cells) >= len(grid.points())
        costs = {place: facts_of_cost(cell.recipe) for place, cell in cells.first.items()}
        plan = Results(grid, cells, costs).plan({}).render()
        assert max(map(len, plan.splitlines())) <= 80, "a dry run fits a terminal"
        for measure in grid.paper:
            assert any(grid.paper_value(measure, point) is not None for point in grid.points()), (path, measure)
        tested |= {claim.text for claim in grid.claims if list(pairs_of(grid, claim))}
    assert tested == {claim.text for claim in grid.claims}, "some scale has points for each claim"


def test_every_grid_has_a_make_target():
    targets = {f"{path.parts[-3]}-{path.stem}": path for path in GRIDS}
    command = ["make", "-n", *targets, "SCALE=gpu", "TOKENS=some/tokens", "CORPUS=some", "DEVICES=0,1"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    for target, path in targets.items():
        words = f"sweep {path.relative_to(ROOT)} -o sweeps/{target}"
        (line,) = [line for line in told.splitlines() if words in line]
        if target != "memoryformer-figure-1":  # which trains nothing, and is the same at every scale
            assert ("--scale gpu" in line) == ("scales" in parse(yaml_text(path), str(path)).value), target
            assert "--device 0,1" in line, target


def test_usage_is_told_of_long_runs_with_a_memory_alone():
    command = ["make", "-n", "worth-long", "LONG_MODELS=dense modern modern-ngrams", "LONG_STEPS=500", "CORPUS=some"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    reported = [line.split()[-1] for line in told.splitlines() if "usage-report" in line]
    assert reported == ["sweeps/worth-long/modern-ngrams-500"]
    for model in ("dense", "modern", "modern-ngrams"):
        recipe = load_recipe(ROOT / "recipes" / "worth" / f"long-{model}.yaml")
        assert bool(recipe.model.memories) is (f"sweeps/worth-long/{model}-500" in reported)


@pytest.mark.parametrize("archive", sorted((ROOT / "recipes").rglob("*.tar.xz")), ids=lambda path: path.parent.name)
def test_the_records_that_come_along_are_those_of_runs(archive, tmp_path):
    """Without their logs, which are large: recipes, measurements of their checkpoints, times of their steps."""
    with tarfile.open(archive) as stored:
        for member in stored:
            if (file := stored.extractfile(member)) and not member.name.endswith("metrics.jsonl"):
                path = tmp_path / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
    runs = [RunDirectory(file.parent) for file in tmp_path.rglob("run.json")]
    assert len(runs) >= 6
    for run in runs:
        recipe = run.recipe()
        assert recipe == load_recipe(run.recipe_file)
        if run.steps():
            assert run.of_latest(read_progress).step == run.done()
        assert len(run.evaluations()) == len([*run.path.glob("eval/*.json")])
        used = [{each["memory"] for each in report["memories"]} for report in run.usage_reports()]
        assert used == [recipe.model.memories.keys()] * len([*run.path.glob("usage/*.json")])
        if (times := run.path / "steps.json").exists():
            part = timed_part(recipe, vocab_size_in(run), run.step_tokens())
            assert recipe_sha256(part) in json.loads(times.read_text())["steps"]
