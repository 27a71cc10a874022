"""A model with several memories: what is measured of each goes by its name."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from pkmlm.evaluate.documents import TextChoice, chosen_documents
from pkmlm.evaluate.load import load_run
from pkmlm.evaluate.perplexity import score
from pkmlm.memory.base import memories
from pkmlm.report.tables import probe_notes
from pkmlm.runs.directory import RunDirectory
from tests.browser import Browser, find_chromium
from tests.conftest import pkmlm

KEYS = "kind: product-key, heads: 2, topk: 2, key_dim: 8, share_values: true"
MEMORIES = f"""
    small: {{{KEYS}, layers: [1+, 3], num_keys: 8}}
    large: {{{KEYS}, layers: [3+, 4], num_keys: 16}}
    ngrams: {{kind: ngram, layers: 2, orders: [1, 2], heads: 1, rows: 251, row_dim: 8}}
    spellings: {{kind: ngram, layers: 1, orders: [2], heads: 1, rows: 31, row_dim: 32, fusion: add, canonical: false}}
    tables: {{kind: hash, layers: 2, bits: 4, extra_bits: 0}}"""
LAYERS = [  # the memories of each layer, in the order in which a block reads them
    ("spellings", 1, "ngram", None, 31),
    ("small", 1, "product-key", None, 64),
    ("ngrams", 2, "ngram", None, 502),
    ("tables", 2, "hash", "qkv", 128),
    ("tables", 2, "hash", "ffn1", 128),
    ("tables", 2, "hash", "ffn2", 128),
    ("small", 3, "product-key", None, 64),
    ("large", 3, "product-key", None, 256),
    ("large", 4, "product-key", None, 256),
]
POOLS = [("small", None, "product-key", None, 64), ("large", None, "product-key", None, 256)]


@pytest.fixture(scope="module")
def run(write_recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    recipe = write_recipe(folder, "dense")
    text = recipe.read_text().replace("layers: 2\n", "layers: 4\n")
    recipe.write_text(text.replace("memories: null", f"memories:{MEMORIES}"))
    pkmlm("train", recipe, "-o", folder / "mixture", "-q")
    return folder / "mixture"


def told(entries: list[dict]) -> list[tuple]:
    """What entries of a report say of their memories."""
    keys = ("memory", "layer", "kind", "part", "slots")
    return [tuple(entry.get(key) for key in keys) for entry in entries]


def read(*words: object) -> dict:
    return dict(json.loads(pkmlm(*words, "--json").stdout))


def test_usage_tells_of_each_memory_in_each_layer_and_of_each_pool(run: Path, tmp_path: Path) -> None:
    (entry,) = read("usage-report", run)["runs"]
    assert told(entry["memories"]) == LAYERS + POOLS
    small, large = entry["memories"][-2:]
    assert [each["layer"] for each in small["layers"]] == small["pool"] == [1, 3]
    assert [each["layer"] for each in large["layers"]] == large["pool"] == [3, 4]
    for pool in (small, large):
        of_layers = [each for each in entry["memories"][:-2] if each["memory"] == pool["memory"]]
        assert pool["reads"] == sum(each["reads"] for each in of_layers)
    assert [(each["memory"], each["layer"], each["order"]) for each in entry["ngrams"]] == [
        ("spellings", 1, 2), ("ngrams", 2, 1), ("ngrams", 2, 2),
    ]  # fmt: skip
    spelled, _, canonical = entry["ngrams"]
    assert spelled["distinct"] > canonical["distinct"], "each counts the ids that it looks up"
    assert read("usage-report", run)["runs"] == [entry], "as it is kept"

    pkmlm("usage-report", run, "--plots", tmp_path / "plots", "--export", tmp_path / "counts.npz")
    assert {path.stem.removeprefix("mixture-") for path in (tmp_path / "plots").iterdir()} >= {
        "map-layer-1-small", "map-small", "map-layer-3-large", "rows-layer-1-spellings", "rows-layer-2-ngrams",
        "buckets-layer-2-tables",
    }  # fmt: skip
    with np.load(tmp_path / "counts.npz") as arrays:
        assert arrays["2.tables.ffn2.counts"].shape == (8, 16)
        assert arrays["3.small.counts"].shape == (2, 64)
        assert arrays["small.counts"].sum() == small["reads"]
    rows = list(csv.DictReader(io.StringIO(pkmlm("usage-report", run, "--format", "csv").stdout)))
    assert [(row["memory"], row["layer"], row["part"]) for row in rows] == [
        tuple("" if each is None else str(each) for each in (memory, layer, part))
        for memory, layer, _, part, _ in LAYERS + POOLS
    ]
    (compared,) = read("compare", run)["runs"]
    assert compared["kind"] == "product-key + ngram + hash"
    assert told(compared["usage"]) == told(entry["memories"])


def test_training_tells_of_each_memory_by_its_name(run: Path) -> None:
    events = list(RunDirectory(run).metrics())
    (drift, *_) = [event for event in events if event["event"] == "drift"]
    assert told(drift["memories"]) == LAYERS
    (valid, *_) = [event for event in events if event["event"] == "valid"]
    assert [each[:4] for each in told(valid["usage"])] == [each[:4] for each in LAYERS + POOLS]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([], ("large", 4, None)),
        (["--memory", "small"], ("small", 3, None)),
        (["--memory", "small", "--layer", 1], ("small", 1, None)),
        (["--layer", 3], ("large", 3, None)),
        (["--layer", "3:small"], ("small", 3, None)),
        (["--layer", "2:qkv"], ("tables", 2, "qkv")),
        (["--layer", "2:tables:ffn1"], ("tables", 2, "ffn1")),
        (["--memory", "tables"], ("tables", 2, "ffn2")),
    ],
)
def test_slots_are_of_the_memory_that_is_named(run: Path, chosen: list, expected: tuple) -> None:
    found = read("slots", run, *chosen, "He said nothing")
    assert (found["memory"], found["layer"], found.get("part")) == expected


def test_rows_that_tokens_choose_tell_their_ngrams_whatever_the_ids(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("He said nothing. The road was near, said the King; he Said it. " * 9)
    for name, orders in (("spellings", [2]), ("ngrams", [1, 2])):
        found = read("slots", run, "--memory", name, "--text", text, "--top", 2)
        assert [each["order"] for each in found["collisions"]] == orders
        for slot in found["slots"]:
            one = read("slots", run, "--memory", name, "--text", text, "--slot", f"{slot['table']}:{slot['row']}")
            assert {len(each["tokens"]) for each in one["ngrams"]} == {orders[slot["table"] - 1]}
            assert sum(each["count"] for each in one["ngrams"]) == slot["reads"]
    assert "collisions" not in read("slots", run, "--memory", "small", "--text", text, "--top", 1)


def test_probes_are_of_layers_parts_and_whole_memories(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The road to the house was near, and it was in the end of the king. " * 20)
    record = read("probe", run, "--fit-tokens", 600, "--text", text)
    found = {tuple(each.get(key) for key in ("memory", "layer", "part")): each for each in record["memories"]}
    assert list(found) == [
        ("spellings", 1, None), ("small", 1, None), ("ngrams", 2, None), ("tables", 2, "qkv"), ("tables", 2, "ffn1"),
        ("tables", 2, "ffn2"), ("small", 3, None), ("large", 3, None), ("large", 4, None),
        ("small", None, None), ("tables", 2, None), ("large", None, None), ("all", None, None),
    ]  # fmt: skip
    assert found["all", None, None]["kind"] == "ngram + product-key + hash"
    loaded = load_run(run, "latest")
    for memory in memories(loaded.model):
        if memory.tap.name == "small":
            memory.values.weight_KD.zero_()
    without = score(loaded.model, chosen_documents(TextChoice(text=str(text)), loaded), loaded.tokenizer.eos)
    zero = found["small", None, None]["probes"]["zero"]["nats"]
    assert zero == pytest.approx(without.nats_per_token - record["real"]["nats"], abs=1e-9)
    drawn = [found[each]["probes"]["random_slots"]["nats"] for each in (("large", 3, None), ("small", 3, None))]
    assert len(set(drawn)) == 2
    assert "All memories together are" in probe_notes(record)


@pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here")
def test_the_page_calls_each_memory_and_its_slots_as_other_reports_do(run: Path, tmp_path: Path) -> None:
    pkmlm("usage-report", run, "--html", tmp_path / "page.html")
    names = [
        " ".join(filter(None, (layer and f"layer {layer}", name, part))) for name, layer, _, part, _ in LAYERS + POOLS
    ]
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html")
        choice = "document.querySelector('.column select')"
        assert browser.run(f"[...{choice}.options].map(option => option.textContent)") == names
        for index, title, first, last in (
            (0, "Rows of n-gram tables in use", "1:0", "1:30"),
            (1, "Product keys in use", "0:0", "7:7"),
            (2, "Rows of n-gram tables in use", "1:0", "2:250"),
            (5, "Hash buckets in use", "1:0", "8:15"),
            (10, "Product keys in use", "0:0", "15:15"),
        ):
            browser.run(
                f"({choice}.selectedIndex = {index}, document.querySelector('[data-panel=map]').remove(),"
                f" {choice}.dispatchEvent(new Event('change')))"
            )
            browser.wait("document.querySelector('[data-panel=map]') !== null")
            panel = "document.querySelector('[data-panel=map]')"
            assert browser.run(f"{panel}.getAttribute('aria-label')") == title
            trains = browser.run("document.querySelector('[data-panel=training]') !== null")
            assert trains, "the curves of this memory"
            for name in (first, last):
                browser.run(f"{panel}.querySelector('input').value = {name!r}")
                browser.run(f"{panel}.querySelector('form').requestSubmit()")
                assert browser.run(f"{panel}.querySelector('.card h3').textContent") == f"Slot {name}"
        assert browser.complaints == []
