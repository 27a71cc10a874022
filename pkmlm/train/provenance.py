"""What run.json says about a run and the process that trains it."""

import platform
import sys
import time
from typing import Any

import numpy as np
import torch

from pkmlm import __version__
from pkmlm.cost import cost_of
from pkmlm.data.batches import Batches
from pkmlm.device import DeviceSettings, cpu_name, name_of
from pkmlm.environment import source_commit, source_sha256
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.job import Job

# keys of the provenance
ENVIRONMENT = ("versions", "commit", "source_sha256", "device", "cpu", "precision", "precision_reason", "ranks")


def provenance(job: Job, settings: DeviceSettings, ranks: int, run: RunDirectory) -> dict[str, Any]:
    """What run.json says about the run's parameters, the tokens that a step reads on average, and the process that
    trains it (command line, versions, commit and digest of the code, device, CPU, precision and ranks). If the run is
    resumed, "earlier" lists the environments of earlier processes that differed.
    """
    before = run.facts()
    now = {
        "started": before.get("started") or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": sys.argv[1:],
        "versions": {
            "pkmlm": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": source_commit(),
        "source_sha256": source_sha256(),
        "device": name_of(settings.device),
        "cpu": cpu_name(),
        "precision": settings.precision,
        "precision_reason": settings.reason,
        "ranks": ranks,
        "step_tokens": Batches.of(job.corpus, job.recipe).mean_read,
        "parameters": cost_of(job.recipe, job.vocab_size).as_json()["parameters"],
    }
    if run.steps():
        now["earlier"] = list(before.get("earlier") or ())
        if "versions" in before and any(before.get(key) != now[key] for key in ENVIRONMENT):
            now["earlier"].append({"until_step": run.steps()[-1], **{key: before.get(key) for key in ENVIRONMENT}})
    return now
