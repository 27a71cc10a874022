"""Pictures: what is drawn is what was counted, and what has no data is not drawn."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import rc_context

from pkmlm.measure.usage import MemoryUsage
from pkmlm.memory.address import Addresses, entry_of
from pkmlm.report import plots
from pkmlm.report.metrics import MEASURES

LOOK = plots.Look()
RANDOM = np.random.default_rng(0)


def memory(kind: str = "product-key", n: int = 6, heads: int = 2, layer: int = 3) -> MemoryUsage:
    tokens, slots = 50, n * n
    counts = RANDOM.integers(0, 9, (heads, slots))
    squares, masses = counts.sum(axis=1) / 3, counts * RANDOM.random((heads, slots))
    if kind in ("hash", "ngram"):
        addresses, part = Addresses(heads * slots, slots, tables=True), "qkv" if kind == "hash" else ""
        return MemoryUsage("tables", layer, kind, addresses, tokens, counts, masses, squares, None, part=part)
    addresses = Addresses(slots, n if kind == "product-key" else None)
    return MemoryUsage("pkm", layer, kind, addresses, tokens, counts, masses, squares, np.full((heads, heads), 7))


def valid(step: int, usage: float = 0.5, kl: float | None = 1.0) -> dict[str, object]:
    floor = {"usage": 0.9, "kl": 0.1}
    entry = entry_of("pkm", 3, "product-key") | {"usage": usage, "kl": kl, "uniform": floor}
    return {"event": "valid", "step": step, "loss": 9 / step, "usage": [entry]}


def train(step: int, loss: float | None) -> dict[str, object]:
    return {"event": "train", "step": step, "loss": loss}


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(
    ("kind", "heads", "expected"),
    [
        ("product-key", 2, {"slot-mass", "map-layer-3-pkm", "overlap-layer-3-pkm", "usage-over-training"}),
        ("flat-key", 1, {"slot-mass", "usage-over-training"}),  # one head has no overlap
        ("hash", 2, {"slot-mass", "buckets-layer-3-tables", "usage-over-training"}),
        ("ngram", 2, {"slot-mass", "rows-layer-3-tables", "usage-over-training"}),
    ],
)
def test_the_pictures_of_a_kind(tmp_path: Path, kind: str, heads: int, expected: set[str]) -> None:
    one = memory(kind, heads=heads)
    drawn = plots.draw_usage(tmp_path / "new" / "folder", "my-run", [one], [valid(10), valid(20)], LOOK)
    assert {path.name for path in drawn} == {f"my-run-{name}.png" for name in expected}
    assert {png_size(path)[0] for path in drawn} == {1800}
    assert sorted(drawn) == sorted((tmp_path / "new" / "folder").iterdir())


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    counts = np.zeros((1, 4), np.int64)
    unread = MemoryUsage("pkm", 1, "product-key", Addresses(4, 2), 0, counts, counts * 1.0, np.zeros(1), counts[:, :1])
    assert plots.draw_usage(tmp_path, "r", [], [], LOOK) == []
    assert plots.draw_usage(tmp_path, "r", [unread], [valid(1, 0.0, None), train(1, 2.0)], LOOK) == []
    assert plots.draw_curves(tmp_path, {"a": [(1, [])], "b": [(1, [train(1, None)])]}, "tokens", LOOK) == []
    assert list(tmp_path.iterdir()) == []


def test_slot_mass_falls_and_ends_where_use_ends() -> None:
    one = memory()
    figure = plots.slot_mass("r", [one], LOOK)
    measured, uniform = figure.axes[0].lines
    mass = np.sort(one.masses_S[one.masses_S > 0])[::-1] / one.masses_S.sum()
    assert np.allclose(measured.get_ydata(), mass)
    assert measured.get_xdata()[-1] == np.count_nonzero(one.masses_S)
    assert uniform.get_ydata().max() < mass[0], "uniform reading is flatter"
    assert 1 <= uniform.get_xdata().min() < 3
    assert uniform.get_xdata().max() <= 36
    assert uniform.get_ydata().min() * one.reads > 1, "no slot is expected to be read so seldom"
    slots, mass = map(torch.from_numpy, uniform.get_data())  # numpy 1 has no trapezoid
    assert 0.3 < -torch.trapezoid(mass, slots).item() <= 1.05
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["layer 3 pkm", "random reading"]


def test_map_is_the_square_of_slots_relative_to_uniform() -> None:
    one = memory()
    image = plots.key_map("r", one, LOOK).axes[0].images[0].get_array()
    expected = one.masses_S.reshape(6, 6) / one.masses_S.mean()
    assert np.allclose(image.filled(0), expected)
    assert (image.mask == (expected == 0)).all()


def test_large_maps_are_binned_and_keep_their_mean() -> None:
    n = 1100
    counts = RANDOM.integers(0, 3, (1, n * n))
    image = plots.key_map(
        "r",
        MemoryUsage(
            "pkm", 1, "product-key", Addresses(n * n, n), 9, counts, counts * 1.0, counts.sum(axis=1), np.eye(1)
        ),
        LOOK,
    ).axes[0]
    relative = image.images[0].get_array()
    assert max(relative.shape) <= plots.MOST_PIXELS
    sizes = np.diff(np.append(np.arange(0, n, 3), n))
    assert float((relative * np.outer(sizes, sizes)).sum()) == pytest.approx(n * n)
    assert image.images[0].get_extent() == [0, n, n, 0]


def test_overlap_writes_every_pair() -> None:
    one = memory(heads=3)
    assert one.overlap_HH is not None
    axes = plots.head_overlap("r", one, one.overlap_HH, LOOK).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts == [f"{100 * 7 / (one.reads / 3):.2f}"] * 6


def test_buckets_of_the_first_and_last_table() -> None:
    one = memory("hash", heads=5)
    figure = plots.table_reads("r", "layer 3 tables", [one], LOOK)
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    for axes, table in zip(figure.axes, (0, 4), strict=True):
        drawn = axes.patches[0].get_data().values
        assert np.allclose(drawn, 100 * one.counts_HK[table] / one.counts_HK[table].sum())
        assert axes.lines[0].get_ydata()[0] == pytest.approx(100 / 36), "the uniform line"
        assert f"table {table + 1} of 5" in axes.get_title()
    assert len(plots.table_reads("r", "layer 3 tables", [memory("hash", heads=1)], LOOK).axes) == 1


def test_usage_over_training_is_that_of_the_valid_events() -> None:
    figure = plots.usage_over_training("r", [valid(10, 0.25, 2.0), train(15, 3.0), valid(20, 0.75, 1.0)], LOOK)
    assert figure is not None
    usage, kl = (axes.lines[0] for axes in figure.axes)
    assert usage.get_xdata().tolist() == [10, 20]
    assert usage.get_ydata().tolist() == [25, 75]
    assert kl.get_ydata().tolist() == [2, 1]
    assert plots.usage_over_training("r", [valid(10)], LOOK) is None, "one is not over training"


def test_many_memories_are_thinned_by_layers() -> None:
    layers = [layer for layer in range(1, 25) for _ in range(3)]
    assert [layers[index] for index in plots.spread(layers)[0]] == [1, 1, 1, 24, 24, 24]
    assert plots.spread([6, 12]) == ([0, 1], None)
    mass = plots.slot_mass("r", [memory("hash", layer=layer) for layer in layers], LOOK)
    assert sum(str(line.get_label()).startswith("layer ") for line in mass.axes[0].lines) == 6
    entries = [
        valid(10)["usage"][0] | {"layer": layer, "memory": f"of {number}"} for number, layer in enumerate(layers)
    ]  # type: ignore[index]
    training = plots.usage_over_training("r", [valid(step) | {"usage": entries} for step in (10, 20)], LOOK)
    assert training is not None
    assert [each.legends[0].get_title().get_text() for each in (mass, training)] == ["2 of 24 layers"] * 2


def test_learning_curves() -> None:
    many = [train(step, 5 - step / 4000 + 0.5 * (-1) ** step) for step in range(1, 4001)]
    figure = plots.learning_curves({"a": [(1, [*many, valid(2000)]), (1, many)], "_b": [(1, many[:10])]}, "steps", LOOK)
    assert figure is not None
    thin, points, twin, other = figure.axes[0].lines
    assert len(thin.get_xdata()) == plots.MOST_POINTS
    assert np.allclose(thin.get_ydata()[100:], 5 - thin.get_xdata()[100:] / 4000, atol=0.02), "the noise is gone"
    assert points.get_ydata().tolist() == [9 / 2000]
    assert len(other.get_xdata()) == 10
    assert twin.get_color() == thin.get_color() != other.get_color(), "seeds share a colour"
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["a", " _b", "training", "validation"]


def test_all_validations_lie_within_learning_curves() -> None:
    events = [train(step, 3 + 9 / step) for step in range(1, 401)] + [valid(step) for step in range(1, 41)]
    for log, hidden in ((False, True), (True, False)):
        figure = plots.learning_curves({"a": [(1, events)]}, "steps", LOOK, log)
        assert figure is not None
        least, most = figure.axes[0].get_ylim()
        training, validation = (line.get_ydata() for line in figure.axes[0].lines)
        assert least < validation.min() < validation.max() < most
        assert bool(training.max() > most) is hidden
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert (texts[1] != "training") is hidden, "what is cut is said to be"


def test_learning_curves_over_what_a_step_takes() -> None:
    events = [train(1, 3.0), train(3, 2.0), valid(2)]
    figure = plots.learning_curves({"a": [(0.5, events)], "b": [(2.0, events)]}, "seconds", LOOK)
    assert figure is not None
    drawn = [line.get_xdata().tolist() for line in figure.axes[0].lines]
    assert drawn == [[0.5, 1.5], [1.0], [2.0, 6.0], [4.0]]
    logarithmic = plots.learning_curves({"a": [(1e4, events)]}, "tokens", LOOK, log=True)
    assert logarithmic is not None
    assert (figure.axes[0].get_xscale(), logarithmic.axes[0].get_xscale()) == ("linear", "log")
    logarithmic.draw_without_rendering()


def test_over_tokens() -> None:
    """Dense and memory, each with a branch of the same length: the lead is over what has been trained alike."""

    def run(losses: list[float], first: int = 1) -> list[dict[str, object]]:
        events = [valid(step, usage=step / 10) | {"loss": loss} for step, loss in enumerate(losses, first)]
        slots = [{"layer": 3, "slots": 8, "read": 6}, {"layer": 4, "slots": 8, "read": 8}]
        return [*events, {"event": "drift", "step": 2, "memories": slots}]

    curves = {
        "dense": [(100, run([6.0, 5.0, 4.0]))],
        "memory": [(100, run([5.0, 4.5, 3.0, 2.0]))],
        "memory-2": [(100, run([5.0, 4.5, 2.0]))],
        "dense-2": [(100, run([6.0, 5.0, 3.5]))],
    }
    branches = {"dense": ["dense-2"], "memory": ["memory-2"]}
    figure = plots.over_tokens(curves, branches, "dense", list(curves), LOOK)
    assert figure is not None
    perplexity, lead, usage, _, dead = figure.axes  # effective reads were not logged
    assert [line.get_xdata().tolist() for line in perplexity.lines] == [
        [100, 200, 300],
        [300],
        [100, 200, 300, 400],
        [300],
    ]
    assert perplexity.lines[3].get_ydata() == pytest.approx([np.exp(2.0)])
    assert perplexity.lines[3].get_color() == perplexity.lines[2].get_color() != perplexity.lines[0].get_color()
    zero, curve, end = lead.lines
    assert zero.get_color() == perplexity.lines[0].get_color() != curve.get_color()
    assert curve.get_xdata().tolist() == [100, 200, 300], "where the dense run was, too"
    assert curve.get_ydata() == pytest.approx([100 * (1 - np.exp(-less)) for less in (1.0, 0.5, 1.0)])
    assert end.get_ydata() == pytest.approx([100 * (1 - np.exp(-1.5))])
    assert usage.lines[2].get_ydata() == pytest.approx([10, 20, 30, 40])
    assert [line.get_xdata().tolist() for line in dead.lines] == [[200], [200]], "not of the branches' ends"
    assert dead.lines[1].get_ydata() == pytest.approx([100 * 2 / 16])
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
    only = plots.over_tokens({"dense": curves["dense"]}, {"dense": []}, "dense", ["dense"], LOOK)
    assert only is not None
    assert "lead" not in " ".join(axes.get_ylabel() for axes in only.axes)
    bytewise = plots.over_tokens(curves, branches, "dense", list(curves), LOOK, by_byte=True)
    assert bytewise is not None
    assert [axes.get_ylabel() for axes in bytewise.axes[:2]] == ["bits per byte", "slots used (%)"], "without a lead"
    assert bytewise.axes[0].lines[3].get_ydata() == pytest.approx([2.0])
    alone = plots.over_tokens({"one": [(1, [valid(1)])]}, {"one": []}, None, [], LOOK)
    assert alone is None, "one validation is not over tokens"


def test_effective_reads_are_those_of_memories_with_heads() -> None:
    event = valid(1)
    event["usage"] = [
        entry | more
        for entry, more in zip(
            event["usage"] * 2, ({"effective": 8.0}, {"effective": None, "memory": "ngrams"}), strict=True
        )
    ]
    assert plots.token_lines(10, [event])["effective"].tolist() == [[10, 8.0]]
    assert MEASURES["effective"].read(event) == 8.0


def test_pictures_for_a_paper(tmp_path: Path) -> None:
    """As wide as asked, in each format, without a title; whatever is in them lies within."""
    look, eight, hashes = plots.Look(("png", "pdf", "svg"), 3.0), memory(heads=8), memory("hash", heads=3)
    curves = {"run": [(1, [valid(10), train(20, 3.0)])], "a long name of another run": [(1, [valid(10)])]}
    drawn = plots.draw_curves(tmp_path, curves, "steps", look)
    assert [path.name for path in drawn] == [f"learning-curves.{format}" for format in ("png", "pdf", "svg")]
    assert png_size(drawn[0])[0] == 900
    assert eight.overlap_HH is not None
    with rc_context(plots.STYLE):
        figures = [
            plots.learning_curves(curves, "steps", look),
            plots.slot_mass("run", [eight, hashes], look),
            plots.key_map("run", eight, look),
            plots.table_reads("run", "layer 3 tables", [hashes], look),
            plots.usage_over_training("run", [valid(10), valid(20)], look),
            plots.head_overlap("run", eight, eight.overlap_HH, look),
        ]
        for figure in figures:
            assert figure is not None
            assert figure.get_suptitle() == ""
            figure.draw_without_rendering()
            needed, page = figure.get_tightbbox().extents, figure.bbox_inches.extents
            assert (needed[:2] > -0.02).all()
            assert (needed[2:] < page[2:] + 0.02).all()
    cells = figure.axes[0].bbox
    assert cells.width == pytest.approx(cells.height)


def test_strange_run_names(tmp_path: Path) -> None:
    for name in ("../$x^$ \x1b[31m\n" + "long" * 20, "\u65e5" * 20):
        stem = f"{plots.file_name(name)}-overlap-layer-12-pkm"
        (path,) = LOOK.save(tmp_path, stem, plots.slot_mass(name, [memory()], LOOK))
        assert path.parent == tmp_path
        assert path.name.isprintable()
    assert len({plots.file_name(name) for name in ("a b", "a-b", "a/b", "a@2", "a-2", ".a", "a")}) == 7
