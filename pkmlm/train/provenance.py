"""Provenance: what run.json says of the process that trains."""

import platform
import sys
from typing import Any

import numpy as np
import torch

from pkmlm import __version__
from pkmlm.cost import cost_of
from pkmlm.device import DeviceSettings, name_of
from pkmlm.runs.commit import source_commit
from pkmlm.train.job import Job

KEPT = ("versions", "commit", "device", "precision", "precision_reason", "ranks")


def provenance(job: Job, settings: DeviceSettings, ranks: int) -> dict[str, Any]:
    """The command line, versions, commit, device and parameters of a run that this process trains."""
    return {
        "argv": sys.argv[1:],
        "versions": {
            "pkmlm": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": source_commit(),
        "device": name_of(settings.device),
        "precision": settings.precision,
        "precision_reason": settings.reason,
        "ranks": ranks,
        "parameters": cost_of(job.recipe, job.vocab_size).as_json()["parameters"],
    }


def with_earlier(before: dict[str, Any], now: dict[str, Any], step: int) -> dict[str, Any]:
    """The provenance of a resumed run, which lists under "earlier" that of processes that differed.

    Args:
        before: run.json as the process that trained up to `step` has left it.
        now: the `provenance` of this process.
    """
    earlier = list(before.get("earlier") or ())
    if "versions" in before and any(before.get(key) != now[key] for key in KEPT):
        earlier.append({"until_step": step, **{key: before.get(key) for key in KEPT}})
    return {**now, "earlier": earlier}
