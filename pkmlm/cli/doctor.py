"""`pkmlm doctor`: versions, devices, memory, disk, and what is wrong."""

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from pkmlm import __version__
from pkmlm.cli.show import Output, report_options
from pkmlm.environment import usable_cores
from pkmlm.errors import printable

# setup.py requires the same; a test compares. (importlib.metadata knows these only where pkmlm is installed.)
NEEDED = (
    *("torch", "numpy", "numba", "sentencepiece", "tokenizers", "click", "rich", "pyyaml", "safetensors", "zstandard"),
    *("pyarrow", "matplotlib", "psutil", "pydantic", "lm-eval", "datasets", "huggingface-hub", "jinja2"),
    "typing-extensions",
)
OPTIONAL = ("transformers", "tensorboard", "wandb")  # setup.py's extras hf and sinks
OLDEST_TORCH = (2, 11)
GIGA = 10**9
LITTLE_DISK, LITTLE_MEMORY = 5 * GIGA, 2 * GIGA


@click.command()
@report_options(("table", "json"))
def command(out: Output) -> int:
    """Show versions, devices, memory, disk, and what is wrong.

    The exit code is 0 if pkmlm can work here, even with warnings, and 1 if it cannot.

    \b
    Examples:
      pkmlm doctor
      pkmlm doctor --json | jq .problems
    """
    facts = examine()
    facts["problems"] = problems(facts)
    out.show(facts, [described(facts)])
    return int(any(problem["broken"] for problem in facts["problems"]))


def examine() -> dict[str, Any]:
    """The facts of this machine; sizes are in bytes, and None means not installed or not known.

    `torch.utils.collect_env` takes seconds (it runs pip, gcc and others) and reports nothing that `problems` needs.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "pkmlm": __version__}
    for name in (*NEEDED, *OPTIONAL):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    total = free = None
    if versions["psutil"]:
        import psutil

        total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    folder = os.getcwd()
    return {
        "versions": versions,
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cores": usable_cores(),
            "memory_bytes": total,
            "memory_free_bytes": free,
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "disk": {
            "folder": folder,
            "free_bytes": shutil.disk_usage(folder).free,
            "writable": os.access(folder, os.W_OK),
        },
        "torch": torch_facts(),
    }


def torch_facts() -> dict[str, Any]:
    """What torch sees and what `train.precision: auto` would choose; or, as "error", why torch fails."""
    try:
        import torch

        from pkmlm.device import select_device
        from pkmlm.kernels.backend import lacking_for_triton
        from pkmlm.kernels.matmul import PREFER_ONEDNN

        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        devices = [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
            for gpu in found
        ]
        settings = select_device("auto")
    except (ImportError, OSError, RuntimeError) as error:
        return {"error": (str(error) or type(error).__name__).splitlines()[0]}
    return {
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "fp32_by_onednn": PREFER_ONEDNN,
        "cuda": devices,
        "kernels_lack": lacking_for_triton() if devices else [],
        "device": str(settings.device),
        "precision": settings.precision,
        "precision_reason": settings.reason,
    }


def problems(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What is wrong and what to do; `broken` where pkmlm cannot work at all."""
    found: list[dict[str, Any]] = []

    def report(what: str, todo: str, broken: bool = False) -> None:
        found.append({"what": what, "todo": todo, "broken": broken})

    torch, versions, here, disk = facts["torch"], facts["versions"], facts["machine"], facts["disk"]
    missing = [name for name in NEEDED if versions[name] is None]
    newer = f"pip install 'torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}'"
    if missing:
        report(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}", broken=True)
    elif "error" in torch:
        report(f"torch does not work: {torch['error']}", newer, broken=True)
    elif tuple(map(int, re.findall(r"\d+", versions["torch"])[:2])) < OLDEST_TORCH:
        report(f"torch {versions['torch']} is too old", newer, broken=True)
    elif not torch["cuda"] and Path("/dev/nvidiactl").exists():
        report(f"there is a GPU, but torch {versions['torch']} cannot use it", "install torch for CUDA: pytorch.org")
    elif torch["kernels_lack"]:
        lacking = " and no ".join(torch["kernels_lack"])
        report(f"the memory's CUDA kernels cannot be built: no {lacking}", "install what is missing", broken=True)
    if not disk["writable"]:
        report(f"cannot write to {disk['folder']}", "change to a folder of yours, or give full paths")
    if disk["free_bytes"] < LITTLE_DISK:
        report(f"{disk['free_bytes'] / GIGA:.1f} GB of disk are free", "free some space: checkpoints are large")
    if here["memory_free_bytes"] is not None and here["memory_free_bytes"] < LITTLE_MEMORY:
        report(f"{here['memory_free_bytes'] / GIGA:.1f} GB of memory are free", "close other programs")
    if here["omp_num_threads"] not in (None, str(here["cores"])):
        report(
            f"OMP_NUM_THREADS={here['omp_num_threads']} with {here['cores']} usable cores",
            "unset OMP_NUM_THREADS, unless several processes share this machine",
        )
    return found


def described(facts: dict[str, Any]) -> str:
    """The facts and their problems as lines for a person."""
    lines = []
    for section in ("versions", "machine", "disk", "torch"):
        lines.append(section)
        for name, value in facts[section].items():
            shown = f"{value / GIGA:.1f} GB" if name.endswith("_bytes") and value is not None else value
            if name == "cuda":
                shown = [
                    f"{gpu['name']} ({gpu['memory_bytes'] / GIGA:.1f} GB, capability {gpu['capability']})"
                    for gpu in value
                ]
            shown = ", ".join(map(str, shown)) or "none" if isinstance(shown, list) else shown
            lines.append(f"  {name.removesuffix('_bytes').replace('_', ' '):<18}{'-' if shown is None else shown}")
    for problem in facts["problems"]:
        lines += [f"{'broken' if problem['broken'] else 'warning'}: {problem['what']}", f"  {problem['todo']}"]
    return "\n".join(printable(line) for line in lines) + ("" if facts["problems"] else "\nnothing is wrong")
