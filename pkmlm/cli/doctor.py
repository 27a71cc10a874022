"""`pkmlm doctor`: versions, devices, memory, disk, and what is wrong."""

import json
import os
import platform
import re
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from pkmlm.cli.options import json_option
from pkmlm.errors import printable

# setup.py asks for the same; a test compares. (importlib.metadata knows it only where pkmlm is installed.)
NEEDED = (
    *("torch", "numpy", "numba", "sentencepiece", "click", "rich", "pyyaml", "safetensors", "zstandard", "pyarrow"),
    *("matplotlib", "psutil", "lm-eval", "datasets", "huggingface-hub", "jinja2"),
)
OPTIONAL = ("transformers", "tensorboard", "wandb")  # setup.py's extras hf and sinks
OLDEST_TORCH = "2.11"
GIGA = 10**9
LITTLE_DISK, LITTLE_MEMORY = 5 * GIGA, 2 * GIGA


@click.command(short_help="Versions, devices, memory, disk, and what is wrong.")
@json_option
def command(as_json: bool) -> None:
    """Versions, devices, memory, disk, and what is wrong.

    Exits with 0 when pkmlm can work here, also with warnings, and with 1 when it cannot.

    \b
    Examples:
      pkmlm doctor
      pkmlm doctor --json | jq .problems
    """
    facts = examine()
    click.echo(json.dumps(facts, indent=2) if as_json else described(facts))
    if any(problem["broken"] for problem in facts["problems"]):
        raise click.exceptions.Exit(1)


def examine() -> dict[str, Any]:
    """All facts of this machine, and the problems among them."""
    facts: dict[str, Any] = {
        "versions": versions(),
        "machine": machine(),
        "disk": disk(),
        "torch": torch_facts(),
    }
    facts["problems"] = problems(facts)
    return facts


def versions() -> dict[str, str | None]:
    """Versions of Python, pkmlm and the libraries; None where one is not installed."""
    from pkmlm import __version__

    found: dict[str, str | None] = {"python": platform.python_version(), "pkmlm": __version__}
    for name in (*NEEDED, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """System, usable cores, and memory in bytes (None without psutil)."""
    from pkmlm.environment import usable_cores

    try:
        import psutil

        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
    except ImportError:
        total = free = None
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": usable_cores(),
        "memory_bytes": total,
        "memory_free_bytes": free,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def disk() -> dict[str, Any]:
    """Where we stand, what is free there in bytes, and whether a file can be written."""
    folder = os.getcwd()
    try:
        with tempfile.TemporaryFile(dir=folder):
            writable = True
    except OSError:
        writable = False
    return {"folder": folder, "free_bytes": shutil.disk_usage(folder).free, "writable": writable}


def torch_facts() -> dict[str, Any]:
    """What torch sees and what `train.precision: auto` would choose; or why torch fails."""
    try:
        return seen_by_torch()
    except (ImportError, OSError, RuntimeError) as error:
        return {"error": (str(error) or type(error).__name__).splitlines()[0]}


def seen_by_torch() -> dict[str, Any]:
    """Threads, instruction set, whose fp32 products, CUDA devices and what their kernels lack, device and precision."""
    import torch

    from pkmlm.device import select_device
    from pkmlm.kernels.backend import lacking_for_triton
    from pkmlm.kernels.matmul import PREFER_ONEDNN

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability})
    settings = select_device("auto")
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

    torch, versions, here = facts["torch"], facts["versions"], facts["machine"]
    missing = [name for name in NEEDED if versions[name] is None]
    if missing:
        report(f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}", broken=True)
    elif "error" in torch:
        report(f"torch does not work: {torch['error']}", f"pip install 'torch>={OLDEST_TORCH}'", broken=True)
    elif release(versions["torch"]) < release(OLDEST_TORCH):
        report(f"torch {versions['torch']} is too old", f"pip install 'torch>={OLDEST_TORCH}'", broken=True)
    elif not torch["cuda"] and Path("/dev/nvidiactl").exists():
        report(f"a GPU is here, but torch {versions['torch']} cannot use it", "install torch for CUDA: pytorch.org")
    elif torch["kernels_lack"]:
        lacking = " and no ".join(torch["kernels_lack"])
        report(f"the memory's CUDA kernels cannot be built: no {lacking}", "install what is missing", broken=True)
    if not facts["disk"]["writable"]:
        report(f"cannot write in {facts['disk']['folder']}", "change to a folder of yours, or give full paths")
    if facts["disk"]["free_bytes"] < LITTLE_DISK:
        report(f"{facts['disk']['free_bytes'] / GIGA:.1f} GB of disk are free", "make room: checkpoints are large")
    if here["memory_free_bytes"] is not None and here["memory_free_bytes"] < LITTLE_MEMORY:
        report(f"{here['memory_free_bytes'] / GIGA:.1f} GB of memory are free", "close other programs")
    threads = here["omp_num_threads"]
    if threads is not None and threads != str(here["cores"]):
        report(
            f"OMP_NUM_THREADS={threads} with {here['cores']} usable cores",
            "unset OMP_NUM_THREADS, unless several processes share this machine",
        )
    return found


def release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version; (0, 0) of what is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def described(facts: dict[str, Any]) -> str:
    """The facts as lines for a person."""
    here, torch, room = facts["machine"], facts["torch"], facts["disk"]
    absent = dict.fromkeys(OPTIONAL, "not installed (optional)")
    versions = facts["versions"].items()
    lines = [f"{name:<16}{version or absent.get(name, 'not installed')}" for name, version in versions]
    lines += ["", f"{'system':<16}{here['system']}"]
    lines.append(f"{'cores':<16}{here['cores']}")
    if "error" not in torch:
        products = ", fp32 products by oneDNN" if torch["fp32_by_onednn"] else ""
        threads = f"{torch['threads']} thread{'s' * (torch['threads'] != 1)}"
        lines[-1] += f" (torch uses {threads}, {torch['cpu']}{products})"
    if here["memory_bytes"] is not None:
        total, free = here["memory_bytes"] / GIGA, here["memory_free_bytes"] / GIGA
        lines.append(f"{'memory':<16}{total:.1f} GB, {free:.1f} GB free")
    lines.append(f"{'disk':<16}{room['free_bytes'] / GIGA:.1f} GB free in {room['folder']}")
    if "error" not in torch:
        for gpu in torch["cuda"]:
            size = gpu["memory_bytes"] / GIGA
            lines.append(f"{'gpu':<16}{gpu['name']}, {size:.1f} GB, capability {gpu['capability']}")
        lines.append(f"{'device':<16}{torch['device']}, {torch['precision']} ({torch['precision_reason']})")
    lines.append("")
    for problem in facts["problems"]:
        lines.append(f"{'broken' if problem['broken'] else 'warning'}: {problem['what']}")
        lines.append(f"  {problem['todo']}")
    if not facts["problems"]:
        lines.append("nothing is wrong")
    return "\n".join(printable(line) for line in lines)
