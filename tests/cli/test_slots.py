"""`pkmlm slots` on small trained runs."""

import json
from pathlib import Path

import pytest

from tests.conftest import pkmlm


def slots(*arguments: object) -> dict:
    return dict(json.loads(pkmlm("slots", *arguments, "--json").stdout))


def test_the_most_read_slots_of_a_split(trained) -> None:
    run = trained("product-key")
    found = slots(run, "--top", 12)
    assert (found["run"], found["step"], found["split"]) == ("product-key", 30, "test")
    assert (found["memory"], found["layer"], found["kind"]) == ("pkm", 2, "product-key")
    usage = json.loads(pkmlm("usage-report", run, "--format", "json").stdout)["runs"][0]["memories"][0]
    assert found["tokens"] == usage["tokens"]
    shares = [slot["share"] for slot in found["slots"]]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 12
    for slot in found["slots"]:
        assert slot["slot"] == 16 * slot["subkeys"][0] + slot["subkeys"][1]
        assert slot["reads"] == sum(head["reads"] for head in slot["heads"])
        assert slot["mass"] == pytest.approx(sum(head["mass"] for head in slot["heads"]))
        assert len(slot["contexts"]) == min(10, slot["reads"])
        weights = [context["weight"] for context in slot["contexts"]]
        assert weights == sorted(weights, reverse=True)
        assert 0 < weights[0] <= 2
    text = pkmlm("slots", run, "--top", 12).stdout
    assert f"{found['patterns']['patterned']} of 12" in text.splitlines()[-1]
    assert "shuffled" in text.splitlines()[-1]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert found["patterns"]["patterned"] == sum(slot["pattern"] is not None for slot in found["slots"])


def test_one_slot_is_named_three_ways(trained) -> None:
    run = trained("product-key")
    best = slots(run, "--top", 1)["slots"][0]
    for name in (best["slot"], best["name"], "{}:{}".format(*best["subkeys"])):
        found = slots(run, "--slot", name, "--top", 4)["slots"][0]
        assert found["contexts"] == best["contexts"][:4]
        assert found["raises"] == best["raises"]
        assert found["pattern"] == best["pattern"], "of ten, however many are shown"
    text = pkmlm("slots", run, "--slot", best["slot"]).stdout
    assert best["name"] in text.splitlines()[0]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert f"[{best['contexts'][0]['token']}]" in text.replace("\n                        ", "")


def test_hash_tables_by_table_and_bucket(trained) -> None:
    run = trained("hash")
    found = slots(run, "--layer", "1:ffn1", "--top", 3)
    assert [found[key] for key in ("memory", "layer", "kind", "part")] == ["tables", 1, "hash", "ffn1"]
    first = found["slots"][0]
    assert first["name"] == f"{first['table']}:{first['row']}"
    assert first["raises"] is None
    assert slots(run, "--layer", "1:ffn1", "--slot", first["name"])["slots"][0]["reads"] == first["reads"]
    assert slots(run, "--slot", "8:3")["slots"][0]["raises"], "by default the last memory, which reaches the output"
    assert "1 later layer" in pkmlm("slots", run, "--layer", 1, "--slot", 3).stdout


def test_a_text_with_markup_and_controls_is_escaped_on_a_terminal(trained, tmp_path: Path) -> None:
    text = tmp_path / "wild.txt"
    text.write_text("[bold]\x1b[31m\u202e\x00" * 60)
    shown = pkmlm("slots", trained("flat-key"), "--text", text).stdout
    shown += pkmlm(
        "slots",
        trained("flat-key"),
        "--text",
        text,
        "--slot",
        slots(trained("flat-key"), "--text", text, "--top", 1)["slots"][0]["slot"],
    ).stdout
    assert not any(c in shown for c in "\x1b\x00\u202e")
    assert "bold]" in shown


def test_errors_are_one_line(trained, tmp_path: Path) -> None:
    run = trained("product-key")
    for arguments, said in (
        ([tmp_path / "none"], "none"),
        ([run, "--slot", "256"], "15:15"),
        ([run, "--slot", "x"], "--slot x"),
        ([run, "--layer", "1"], "2:pkm"),
        ([run, "--memory", "other"], "2:pkm"),
        ([run, "--memory", "pkm", "--layer", "1"], "2:pkm"),
        ([trained("dense")], "memory"),
        ([run, "word", "--slot", "3"], "PROMPT"),
        ([run, "--text", "-"], "--text -"),
        ([run, "--text", tmp_path / "none.txt"], "none.txt"),
        ([run, "--top", "0"], "--top"),
    ):
        done = pkmlm("slots", *arguments, code=2)
        assert said in done.stderr, done.stderr
        assert done.stdout == ""
