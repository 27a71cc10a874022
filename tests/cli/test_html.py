"""`usage-report --html` and `--export`: the numbers against a count of one's own, and the page in a real browser."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from pkmlm.data.corpus import Corpus
from pkmlm.evaluate.load import load_run
from pkmlm.measure.slot_contexts import Context
from pkmlm.measure.slots import PageSlots, SlotDetails, Word
from pkmlm.measure.usage import MemoryUsage
from pkmlm.memory.address import Addresses
from pkmlm.memory.base import UsageTap, memories
from pkmlm.report.page import usage_page
from pkmlm.report.usage_report import RunUsage
from pkmlm.runs.directory import RunDirectory
from tests.browser import Browser, find_chromium
from tests.conftest import pkmlm

PANELS = {"summary", "map", "sorted", "heads", "layers", "overlap", "training"}
HASH_PANELS = PANELS - {"overlap"} | {"rows"}
WILD = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m \u202etxet\u202c <!-- \u2028 &amp; "

in_browser = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.fixture(autouse=True)
def few_deals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of contexts at random: a hundred take a second."""
    monkeypatch.setattr("pkmlm.measure.slots.SHUFFLES", 2)


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a product-key and a hash run."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    pkmlm("usage-report", trained("product-key"), trained("hash"), "--html", path)
    return path


def counted(run: Path, split: str) -> tuple[dict[int, Counter], dict[int, dict[int, float]]]:
    """Reads and mass of each slot by each head, in plain Python: documents one window after another."""
    loaded, index = load_run(run, "latest"), json.loads((run / "usage" / f"{split}-step-30.json").read_text())
    assert index["step"] == 30
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = memories(loaded.model)[0].tap.register_forward_hook(lambda tap, inputs, reads: seen.append(reads))
    counts: dict[int, Counter] = defaultdict(Counter)
    masses: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    corpus, length = Corpus(loaded.recipe.data.dir, split), loaded.model.context
    for document in range(corpus.documents):
        ids = corpus.document(document)
        stream = [loaded.tokenizer.eos, *ids.tolist()]
        for start in range(0, len(ids), length):
            stop = min(len(ids), start + length)
            first = max(0, stop - length)
            with torch.no_grad():
                loaded.model.hidden(torch.tensor([stream[first:stop]]))
            for slots_Hk, weights_Hk in zip(*(x[start - first :] for x in seen.pop()), strict=True):
                for head, pairs in enumerate(zip(slots_Hk.tolist(), weights_Hk.tolist(), strict=True)):
                    for slot, weight in zip(*pairs, strict=True):
                        counts[slot][head] += 1
                        masses[slot][head] += weight
    hook.remove()
    return counts, masses


def test_export_equals_a_plain_count_slot_by_slot(trained, tmp_path: Path) -> None:
    run, path = trained("product-key"), tmp_path / "background.npz"
    (entry,) = json.loads(pkmlm("usage-report", run, "--export", path, "--format", "json").stdout)["runs"]
    counts, masses = counted(run, "test")
    with np.load(path) as arrays:
        of_memory = {f"2.pkm.{name}" for name in ("counts", "masses", "tokens")}
        assert set(arrays) == {"run", "step", "split", "sha256"} | of_memory
        assert (str(arrays["run"]), int(arrays["step"]), str(arrays["split"])) == ("product-key", 30, "test")
        assert str(arrays["sha256"]) == entry["checkpoint"]
        assert int(arrays["2.pkm.tokens"]) == entry["memories"][0]["tokens"]
        expected = [[counts[slot][head] for slot in range(256)] for head in range(2)]
        # A near tie of two keys may fall either way in a batch of another shape.
        assert np.abs(arrays["2.pkm.counts"] - expected).sum() <= 1e-3 * np.sum(expected)
        weights = [[masses[slot][head] for slot in range(256)] for head in range(2)]
        np.testing.assert_allclose(arrays["2.pkm.masses"], weights, atol=0.05, rtol=1e-2)
        found = arrays["2.pkm.masses"].sum(axis=0)
    share = found[found > 0] / found.sum()
    assert entry["memories"][0]["mass"]["kl"] == pytest.approx(float(np.log(256) + (share * np.log(share)).sum()))
    assert entry["memories"][0]["mass"]["usage"] == (found > 0).mean()


def test_files_are_not_overwritten_and_options_make_sense(trained, tmp_path: Path) -> None:
    run, path = trained("product-key"), tmp_path / "there"
    path.write_text("mine")
    for arguments, said in (
        ([run, "--html", path], str(path)),
        ([run, "--export", path], str(path)),
        ([run, "--html", tmp_path / "no" / "page.html"], "page.html"),
        ([run, "--step", "20,30", "--export", tmp_path / "e.npz"], "--export"),
    ):
        done = pkmlm("usage-report", *arguments, code=2)
        assert said in done.stderr
        assert done.stdout == ""
    assert path.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    pkmlm("usage-report", run, "--export", path, "--force")
    assert np.load(path)["step"] == 30


def test_the_page_asks_nothing_of_the_network(page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|img|iframe|script[^>]*\bsrc)\b", text)
    assert not re.findall(r"/\*[\w.]+\*/", text), "every part is in"
    assert "Leon Sorokin" in text, "the licence of the chart library"


class Cells(HTMLParser):
    """The texts of all cells of a page's tables, and the names of all tags."""

    def __init__(self, page: Path):
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()
        self.inside = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.inside = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1] += data


def test_the_page_has_the_tables_of_the_terminal_before_its_script_has_run(page: Path, trained, tmp_path: Path) -> None:
    """As a screenshot, a reader without scripts or a search sees it."""
    told = pkmlm("usage-report", trained("product-key"), trained("hash"), "--format", "md").stdout
    lines = [line for line in told.splitlines() if line.startswith("| ")]
    assert Cells(page).cells == [cell for line in lines for cell in line.strip("| ").split(" | ")]
    wild = Cells(page_of(tmp_path / "wild.html", [made_up(16)]))
    assert any("<img src=x onerror=alert(2)>" in cell for cell in wild.cells)
    assert not {"img", "link", "iframe"} & wild.tags
    assert not any(c in "".join(wild.cells) for c in "\x1b\u202e\u2028")


def values(browser: Browser, place: str) -> list[list[float | None]]:
    """The exact values of the tables in the first element that a CSS selector finds, row by row."""
    rows = browser.run(
        f"[...document.querySelector({place!r}).querySelectorAll('table:not(.u-legend) tbody tr')]"
        ".map(r => [...r.querySelectorAll('td')].map(c => c.dataset.value))"
    )
    return [[None if cell is None else float(cell) for cell in row] for row in rows]


def show_slot(browser: Browser, name: str, column: int = 1) -> None:
    form = f".column:nth-child({column}) [data-panel=map] form"
    browser.run(f"document.querySelector({form + ' input'!r}).value = {name!r}")
    browser.run(f"document.querySelector({form!r}).requestSubmit()")


@in_browser
def test_every_panel_is_drawn_named_and_shows_the_reports_numbers(page: Path, trained, browser: Browser) -> None:
    browser.prefer("light")
    browser.open(page)
    columns = browser.run(
        "[...document.querySelectorAll('.column')].map(c =>"
        "[...c.querySelectorAll('[data-panel]')].map(p => p.dataset.panel))"
    )
    assert [set(panels) for panels in columns] == [PANELS, HASH_PANELS]
    inked = browser.run("""[...document.querySelectorAll('canvas')].map(c => {
        const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size })""")
    assert len(inked) >= 12
    assert min(inked) > 1, "no canvas is blank"
    (entry,) = json.loads(pkmlm("usage-report", trained("product-key"), "--format", "json").stdout)["runs"]
    memory = entry["memories"][0]
    keys = ("usage", "kl", "gini", "top50", "top90", "top99")
    of_all = [[memory[by].get(key) for by in ("mass", "uniform_mass", "count", "uniform")] for key in keys]
    assert values(browser, "[data-panel=summary]") == of_all
    assert values(browser, "[data-panel=heads]")[:2] == [[head["usage"], head["kl"]] for head in memory["heads"]]
    assert values(browser, "[data-panel=overlap]") == memory["head_overlap_matrix"]
    events = [json.loads(line) for line in (trained("product-key") / "metrics.jsonl").read_text().splitlines()]
    valid = [event["usage"][0] for event in events if event["event"] == "valid"]
    drift = [event["memories"][0] for event in events if event["event"] == "drift"]
    training = [[v["usage"], v["kl"], round((1 - v["usage"]) * 256)] for v in valid]
    training += [[d[key] for key in ("read", "died", "woke", "never", "moved")] for d in drift]
    assert values(browser, "[data-panel=training]") == training
    assert browser.run("[...document.querySelectorAll('canvas.map, .chart')].every(c => c.getAttribute('aria-label'))")
    unnamed = "[...document.querySelectorAll('select, input')].filter(c => !c.labels.length && !c.ariaLabel).length"
    assert browser.run(unnamed) == 0
    bare = "[...document.querySelectorAll('.panel:has(.chart)')].filter(p => !p.querySelector('details table')).length"
    assert browser.run(bare) == 0, "every chart has a table behind it"
    assert browser.complaints == []


@in_browser
def test_at_first_the_slot_with_most_mass_is_shown_and_legends_name_lines_alone(
    page, trained, browser: Browser
) -> None:
    browser.open(page)
    with np.load(trained("product-key") / "usage" / "test-step-30.npz") as arrays:
        masses = arrays["0-masses_HK"].sum(axis=0)
    assert browser.run("document.querySelector('.card [data-slot]').dataset.slot") == str(int(masses.argmax()))
    shown = "[...document.querySelectorAll('.u-legend tr:first-child')].map(r => getComputedStyle(r).visibility)"
    assert set(browser.run(shown)) == {"hidden"}
    browser.run("document.querySelector('.chart').plot.setCursor({left: 60, top: 60})")
    browser.wait(f"{shown}[0] === 'visible'")
    assert browser.complaints == []


@in_browser
def test_a_click_and_the_keyboard_show_the_slot(page: Path, trained, browser: Browser) -> None:
    browser.open(page)
    with np.load(trained("product-key") / "usage" / "test-step-30.npz") as arrays:
        reads = arrays["0-counts_HK"].sum(axis=0)
    card = "document.querySelector('[data-panel=map] .card')"
    shown = f"(s => s && [Number(s.dataset.slot), Number(s.dataset.reads)])({card}.querySelector('[data-reads]'))"

    def click(slot: int) -> None:
        x, y, width = browser.run(
            "(c => (c.scrollIntoView(), (r => [r.x, r.y, r.width])(c.getBoundingClientRect())))"
            "(document.querySelector('canvas.map'))"
        )
        browser.click(x + (slot % 16 + 0.5) * width / 16, y + (slot // 16 + 0.5) * width / 16)

    for slot in (0, 17, int(reads.argmax()), 255):
        click(slot)
        assert browser.run(shown) == [slot, int(reads[slot])]
    browser.run("document.querySelector('canvas.map').focus()")
    click(3 * 16 + 2)
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        browser.press(key)
    assert browser.run(shown) == [4 * 16 + 3, int(reads[4 * 16 + 3])]
    by_form = []
    for slot in range(0, 256, 5):
        show_slot(browser, f"{slot // 16}:{slot % 16}")
        by_form.append(browser.run(shown))
    assert by_form == [[slot, int(reads[slot])] for slot in range(0, 256, 5)]
    for name in ("0:16", "16:0", "0:300", "256", "none"):
        show_slot(browser, "3:4")
        show_slot(browser, name)
        assert browser.run(shown) is None, "the one before has gone"
        assert browser.run(f"{card}.textContent").startswith(f"There is no slot {name} ")
    for name, heading in (("8:15", "Slot 8:15"), ("0:3", None), ("9:0", None)):  # 8 tables of 16 buckets, from 1
        show_slot(browser, name, column=2)
        assert browser.run("document.querySelector('.column + .column .card h3')?.textContent") == heading
    best = json.loads(pkmlm("slots", trained("product-key"), "--top", 1, "--json").stdout)["slots"][0]
    browser.run("document.querySelector('[data-panel=map] details button').click()")
    assert browser.run(shown) == [best["slot"], best["reads"]]
    text = browser.run(f"{card}.textContent")
    assert f'"{best["raises"][0]["token"]}"' in text
    assert browser.run(f"{card}.querySelectorAll('mark').length") == min(6, len(best["contexts"]))
    assert browser.complaints == []


@in_browser
@pytest.mark.parametrize("runs", [1, 2])
def test_the_chosen_slot_is_in_view(browser: Browser, tmp_path: Path, runs: int) -> None:
    browser.prefer("light", width=1280, height=900)
    browser.open(page_of(tmp_path / "view.html", *[[made_up(16, "a text of some words")]] * runs))
    edges = "(r => [r.top, r.bottom])(document.querySelector({!r}).getBoundingClientRect())"
    for choose in ("document.querySelector('[data-panel=map] details button').click()", None):
        browser.run("scrollTo(0, 0)")
        browser.run("document.querySelector('[data-panel=map] details').open = true")
        browser.run(choose) if choose else show_slot(browser, "15:3")
        for part in [".card"] + ["canvas.map"] * (runs == 1):
            top, bottom = browser.run(edges.format(part))
            assert 0 <= top < bottom <= 900, part
    browser.prefer("light")
    assert browser.complaints == []


@in_browser
def test_runs_side_by_side_share_their_scales(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_of(tmp_path / "beside.html", [made_up(16)], [made_up(32)]))
    scales = (
        "[...document.querySelectorAll('.column')].map(c => Object.fromEntries([...c.querySelectorAll('.chart')]"
        ".map(b => [b.dataset.scale, ['x', 'y'].map(s => [b.plot.scales[s].min, b.plot.scales[s].max])])))"
    )
    left, right = browser.run(scales)
    assert left == right
    assert len(left) >= 4
    ticks = browser.run("[...document.querySelectorAll('.ticks')].map(t => [...t.children].map(c => c.textContent))")
    assert ticks[0] == ticks[1]
    assert len([float(tick.replace(",", "")) for tick in ticks[0]]) > 1, "the colour bar has numbers"
    browser.run("(c => (c.value = -1, c.dispatchEvent(new Event('change'))))(document.getElementById('right'))")
    browser.wait(
        "document.querySelectorAll('.column').length === 1 && document.querySelector('main').ariaBusy === 'false'"
    )
    assert browser.run(scales)[0] != left, "alone, a run has its own"
    legends = browser.run("[...document.querySelectorAll('.u-legend')].map(l => l.textContent).join()")
    assert "measured" in legends
    assert "--" not in legends, "no legend shows a value of nothing"
    assert browser.complaints == []


@in_browser
def test_heads_and_tables_share_their_scales(page: Path, browser: Browser) -> None:
    browser.open(page)
    highest = "[...document.querySelectorAll('[data-panel=heads]')].map(p => [...p.querySelectorAll('.chart')]"
    left, right = browser.run(f"{highest}.map(b => b.plot.scales.y.max))")
    assert left == right


@in_browser
def test_never_read_is_told_from_little(page: Path, browser: Browser) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    little = luminance("#440154")  # where viridis begins
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(page)
        unread = browser.run("getComputedStyle(document.documentElement).getPropertyValue('--unread').trim()")
        assert (luminance(unread) + 0.05) / (little + 0.05) > 4.5
    browser.prefer("light")


@in_browser
def test_the_map_is_dragged_with_the_left_button_alone(page: Path, browser: Browser) -> None:
    browser.open(page)
    canvas = "document.querySelector('canvas.map')"
    x, y, width = browser.run(
        f"({canvas}.scrollIntoView(), (r => [r.x, r.y, r.width])({canvas}.getBoundingClientRect()))"
    )
    middle, aside = (x + width / 2, y + width / 2), (x + width / 4, y + width / 2)
    card = "document.querySelector('[data-panel=map] .card').textContent"
    before = browser.run(card)
    browser.click(*middle, button="right")
    assert browser.run(card) == before, "no slot is chosen"
    browser.run(f"{canvas}.focus()")
    browser.click(*middle)
    browser.press("+")
    shown = f"{canvas}.ariaLabel"
    before = browser.run(shown)
    browser.drag(middle, aside, held=False)
    assert browser.run(shown) == before
    browser.drag(middle, aside)
    assert browser.run(shown) != before
    assert browser.complaints == []


@in_browser
@pytest.mark.slow
def test_both_themes_and_a_narrow_window(page: Path, browser: Browser, tmp_path: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    for scheme, colour in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 20, 22)")):
        browser.prefer(scheme)
        browser.open(page)
        assert browser.run(back) == colour
        browser.picture(tmp_path / f"{scheme}.png")
        assert (tmp_path / f"{scheme}.png").stat().st_size > 50_000
    browser.run("document.getElementById('theme').click()")
    assert browser.run(back) == "rgb(255, 255, 255)", "the switch overrules the system"
    browser.prefer("light", width=390)
    browser.open(page)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    wide = "[...document.querySelectorAll('.panel, .scroll, .card')].filter(n => n.scrollWidth > n.clientWidth + 1)"
    assert browser.run(f"{wide}.map(n => n.textContent.slice(0, 40))") == [], "nothing is cut"
    browser.prefer("light")
    assert browser.complaints == []


@in_browser
@pytest.mark.slow
def test_a_dark_page_is_printed_whole_and_light(page: Path, browser: Browser) -> None:
    """What is on paper is what the light theme shows, of the memory and the slot that were chosen."""
    inks = "[...document.querySelectorAll('canvas')].map(c => c.toDataURL())"
    choose = """(() => {
        const choice = [...document.querySelectorAll('.column select')].at(-1);
        choice.selectedIndex = 2;
        choice.dispatchEvent(new Event('change'));
    })()"""
    chosen = "[...document.querySelectorAll('.column')].at(-1).querySelector('[data-panel=summary] p').textContent"
    found = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(page)
        browser.run(choose)
        browser.wait(f"{chosen}.includes('hash') && document.querySelectorAll('.column').length === 2")
        show_slot(browser, "3:4")
        browser.run("new Promise(requestAnimationFrame)")
        browser.run(f"addEventListener('beforeprint', () => queueMicrotask(() => {{ window.printed = {inks} }}))")
        before = browser.run(inks)
        pdf = browser.print()
        found[scheme] = before, browser.run("window.printed"), len(pdf), pdf.count(b"/Type /Page\n")
        assert browser.run(inks) == before, "on the screen all is as it was"
        assert "Slot 3:4" in browser.run("document.querySelector('.card').textContent")
    assert found["light"][0] != found["dark"][0]
    assert found["dark"][1] == found["light"][1] == found["light"][0]
    assert found["dark"][2] == pytest.approx(found["light"][2], rel=0.02)
    assert found["dark"][3] == found["light"][3]
    browser.prefer("light")
    assert browser.complaints == []


def made_up(n: int, text: str = WILD) -> tuple[MemoryUsage, PageSlots]:
    """A memory of n * n slots, half of them read, with texts; by default such as would like to be run."""
    random, slots = np.random.default_rng(0), n * n
    counts = (random.pareto(1, (4, slots)) * 20).astype(np.int64) * (random.random(slots) < 0.5)
    masses = counts * random.random((4, slots))
    squares = (masses * masses / np.maximum(counts, 1)).sum(axis=1)
    usage = MemoryUsage(
        "pkm", 3, "product-key", Addresses(slots, n), 10**6, counts, masses, squares, np.full((4, 4), 100)
    )
    context = Context(0, 0, 0, 0.5, text, text, text, text, text)
    words = [Word(text, 1.0)] * 8
    best = [int(slot) for slot in np.argsort(-usage.masses_S)[: min(2000, slots)]]
    tap = UsageTap(3, "pkm", "product-key", usage.addresses, 4)
    contexts = [context._replace(position=i) for i in range(10)]
    held = [SlotDetails.of(tap, usage, slot, words, words, contexts) for slot in best]
    first = np.where(usage.counts_S > 0, random.integers(0, 8000, slots), -1)
    return usage, PageSlots(held, first, [f"{text}{i}" for i in range(8000)])


def page_of(path: Path, *runs: list[tuple[MemoryUsage, PageSlots]]) -> Path:
    """The page of some runs, each of which has some memories."""
    reports = []
    for run in runs:
        usages, slots = map(list, zip(*run, strict=True))
        entry = {"run": WILD, "step": 1, "split": WILD, "memories": [usage.as_json() for usage in usages]}
        reports.append(RunUsage(RunDirectory(path.with_suffix("")), entry, usages, slots))
    path.write_text(usage_page(reports), encoding="utf-8")
    return path


@in_browser
def test_labels_of_many_bars_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    counts = np.ones((64, 4), dtype=np.int64)
    usage = MemoryUsage(
        "tables", 1, "hash", Addresses(256, 4, tables=True), 4, counts, counts / 2, counts.sum(axis=1) / 4, None
    )
    browser.open(page_of(tmp_path / "bars.html", [(usage, PageSlots([], None, []))]))
    drawn = browser.run(
        """(async () => {
            const texts = [], write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                texts.push([text, x, y, this.measureText(text).width]);
                write.call(this, text, x, y);
            };
            document.querySelector('[data-panel=heads] .chart').draw();
            await new Promise(requestAnimationFrame);
            CanvasRenderingContext2D.prototype.fillText = write;
            return texts;
        })()"""
    )
    ((line, _),) = Counter(y for _, _, y, _ in drawn).most_common(1)
    below = [(text, x - width / 2, x + width / 2) for text, x, y, width in drawn if y == line]
    assert below[0][0] == "1"
    assert len(below) > 8
    assert all(end < start for (_, _, end), (_, start, _) in pairwise(below))
    assert browser.complaints == []


@in_browser
def test_a_chart_without_values_does_not_stretch_those_beside_it(browser: Browser, tmp_path: Path) -> None:
    """As of a memory all of whose weights are 0."""
    usage, held = made_up(16)
    nothing = replace(usage, masses_HK=np.zeros_like(usage.masses_HK), squares_H=np.zeros_like(usage.squares_H))
    browser.open(page_of(tmp_path / "zero.html", [(usage, held)], [(nothing, PageSlots([], None, []))]))
    ends = browser.run("[...document.querySelectorAll('.chart')].map(chart => String(chart.plot.scales.y.max))")
    assert len(ends) > 4
    assert all(math.isfinite(float(end)) for end in ends)


@in_browser
def test_zooming_keeps_to_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_of(tmp_path / "map.html", [made_up(64)]))
    shown = "document.querySelector('[data-panel=map] canvas').getAttribute('aria-label')"
    browser.run(
        """(() => {
            const canvas = document.querySelector('[data-panel=map] canvas'), box = canvas.getBoundingClientRect();
            const at = { clientX: box.right - box.width / 8, clientY: box.bottom - box.height / 8 };
            for (let i = 0; i < 6; i++)
                canvas.dispatchEvent(new WheelEvent('wheel', { ...at, deltaY: -1, ctrlKey: true, cancelable: true }));
        })()"""
    )
    before = [int(number) for number in re.findall(r"\d+", browser.run(shown))]
    browser.run(
        "[...document.querySelectorAll('[data-panel=map] button')].find(b => b.textContent === 'Zoom in').click()"
    )
    after = [int(number) for number in re.findall(r"\d+", browser.run(shown))]
    for low, high in ((2, 3), (4, 5)):  # rows, columns
        assert before[low] <= after[low] < after[high] <= before[high]


@in_browser
@pytest.mark.slow
def test_what_is_chosen_last_is_shown(browser: Browser, tmp_path: Path) -> None:
    """A large memory takes longer to unpack than a small one that is chosen right after it."""
    browser.open(page_of(tmp_path / "two.html", [made_up(16), made_up(32)]))
    browser.run(
        """(() => {
            const choice = document.querySelector('.column select'), unpacked = numbers;
            window.ended = 0;
            window.numbers = async (array, Kind) => {
                const found = await unpacked(array, Kind);
                if (found.length > 256) await new Promise((done) => setTimeout(done, 500));
                ended++;
                return found;
            };
            for (const index of [1, 0]) {
                choice.selectedIndex = index;
                choice.dispatchEvent(new Event('change'));
            }
        })()"""
    )
    browser.wait("ended === 6")
    browser.run("new Promise(requestAnimationFrame)")
    assert "of 256 slots" in browser.run("document.querySelector('[data-panel=summary] p').textContent")
    assert browser.complaints == []


@in_browser
def test_text_of_a_corpus_is_never_run(browser: Browser, tmp_path: Path) -> None:
    path = page_of(tmp_path / "wild.html", [made_up(16)])
    browser.open(path)
    browser.run("document.querySelector('[data-panel=map] details button').click()")
    assert "<img src=x onerror=alert(2)>" in browser.run("document.querySelector('.card').textContent")
    assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    text = browser.run("document.body.textContent")
    assert not any(c in text for c in "\x1b\u202e\u2028"), "controls are shown, not obeyed"
    assert "\\u202etxet" in text
    assert browser.complaints == []


@in_browser
@pytest.mark.slow
def test_a_quarter_of_a_million_slots_take_three_megabytes(browser: Browser, tmp_path: Path) -> None:
    usage, held = made_up(512, "of words as long as they come " * 4)
    path = page_of(tmp_path / "large.html", [(usage, held)])
    assert path.stat().st_size < 3e6
    browser.open(path)
    slot = int(np.flatnonzero(usage.counts_S == 3)[0])
    show_slot(browser, str(slot))
    card = "document.querySelector('.card [data-reads]')"
    assert browser.run(f"[{card}.dataset.slot, {card}.dataset.reads]") == [str(slot), "3"]
    shown = browser.run(f"{card}.parentNode.textContent")
    share = 100 * usage.masses_S[slot] / usage.masses_S.sum()
    assert float(re.search(r"([\d.e-]+) %", shown)[1]) == pytest.approx(share, rel=6e-3)
