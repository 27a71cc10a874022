"""The list of measures is the only place that says what they are called."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm.report import metrics
from pkmlm.report.metrics import MEASURES, METRICS
from tests import PATIENCE

PACKAGE = Path(metrics.__file__).parents[1]
ALL = (*METRICS.values(), *MEASURES.values())
NAMED = {text for metric in ALL for text in (metric.heading, metric.label)} - METRICS.keys()  # a name is also a key


def spelled(source: str) -> set[str]:
    """The headings of number columns in a program, and the texts in it that are long enough to be no key, if measures
    have them.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        texts = node.args if called in ("number", "numbers") else [node] if isinstance(node, ast.Constant) else []
        found |= {t.value for t in texts if isinstance(t, ast.Constant) and (called or " " in str(t.value))}
    return found & NAMED


@pytest.mark.parametrize("room", ["report", "sweep", "train", "cli"])
def test_a_measure_is_spelled_once(room: str) -> None:
    for path in sorted((PACKAGE / room).glob("*.py")):
        if path.name != "metrics.py":
            assert not spelled(path.read_text()), path


def test_what_is_spelled_again_is_noticed() -> None:
    assert spelled("columns = [*numbers(SHARE, 'Usage', 'random'), number('Gini', '{:.3f}')]") == {"Usage", "Gini"}
    assert spelled("axes.set(ylabel='validation loss (nats per token)')") == {METRICS["valid_loss"].label}
    assert not spelled("facts['usage'], Column('Tokens'), METRICS['gini'].column")


def test_the_list_needs_neither_torch_nor_arrays() -> None:
    program = "import sys, pkmlm.report.metrics; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert not {"torch", "numpy", "matplotlib"} & set(done.stdout.split())
