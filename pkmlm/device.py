"""Which device and which arithmetic a command uses, and why."""

import gc
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import psutil
import torch

from pkmlm.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# For each kind of cgroup, by its controllers in /proc/self/cgroup (none: version 2): the root's folder, the files with
# the limit and the use, and the entry of memory.stat for pages that can be dropped.
CGROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# What torch calls the instructions that multiply in half precision, on x86 and on ARM.
CPU_INSTRUCTIONS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def default_device() -> torch.device:
    """The current CUDA device where there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_device(device: torch.device) -> None:
    """Refuse (UserError) a device for which there are no kernels. (What is on "meta" is moved before it computes.)"""
    if device.type not in ("cpu", "cuda", "meta"):
        raise UserError(f"device {device} is not supported (expected cpu or cuda)")


def name_of(device: torch.device) -> str:
    """A GPU by its name; a CPU by its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' * (threads > 1)}"


def cpu_name() -> str:
    """The CPU, with a mark of its instructions, on which its arithmetic depends: virtual machines shorten names."""
    abilities = torch.cpu.get_capabilities()
    mark = hashlib.sha256(repr(sorted(abilities.items())).encode()).hexdigest()[:8]
    return f"{abilities.get('cpu_name', '')} {mark}".strip()


def machine() -> dict[str, str]:
    """What a timing depends on: the device with its threads, the CPU, and the version of torch."""
    return {"device": name_of(default_device()), "cpu": cpu_name(), "torch": torch.__version__}


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on a GPU, including the blocks that torch has cached; in main memory, without
    swapping and within the limits of a container or a job.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return kept + int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *free_bytes_of_cgroups()])


def free_bytes_of_cgroups(root: str = "/") -> list[int]:
    """Bytes that each cgroup of this process still lets it allocate: the limit less the use, without inactive pages of
    files, which can be dropped. Empty if there are no such limits.
    """
    free = []
    with suppress(OSError):  # not Linux
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers in CGROUP_FILES:
                folder, limit, held, droppable = CGROUP_FILES[controllers]
                for place in accumulate(Path(own.lstrip("/")).parts, Path.joinpath, initial=Path(root, folder)):
                    with suppress(OSError, ValueError):  # in another container, or "max"
                        most, now = (int((place / name).read_text()) for name in (limit, held))
                        stat = dict(each.split() for each in (place / "memory.stat").read_text().splitlines())
                        free.append(max(0, most - now + int(stat.get(droppable, 0))))
    return free


def give_back(device: torch.device) -> None:
    """Give back to other processes what torch keeps of a GPU's memory for tensors that are gone."""
    if device.type == "cuda":
        gc.collect()  # modules and hooks that refer to each other hold tensors
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> tuple[int, str]:
    """Bytes that this process has held on a GPU at most, or holds in main memory now, and words that say so."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "on the GPU at most"
    return psutil.Process().memory_info().rss, "resident"


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on a device. It is copied to a GPU from pinned memory: the host waits neither for the copy nor for
    what is queued on the GPU before it.
    """
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Queue the copy of a tensor to the CPU. What this returns waits for the copy, though not for what is queued on the
    GPU after it, and returns it.
    """
    if x.device.type != "cuda":
        return lambda: x
    copy, done = x.to("cpu", non_blocking=True), torch.cuda.Event()  # in pinned memory
    done.record(torch.cuda.current_stream(x.device))

    def wait() -> torch.Tensor:
        done.synchronize()
        return copy

    return wait


@dataclass(frozen=True)
class DeviceSettings:
    """The device and the precision of a command, and the reason for this precision."""

    device: torch.device
    precision: Precision
    reason: str


def select_device(requested: str) -> DeviceSettings:
    """`default_device`, and `resolve_precision` for it."""
    device = default_device()
    return DeviceSettings(device, *resolve_precision(requested, device))


def is_native_on_cpu(precision: str) -> bool:
    """Whether this CPU has instructions that multiply in `precision`, bf16 or fp16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in CPU_INSTRUCTIONS[precision])


def resolve_precision(requested: str, device: torch.device) -> tuple[Precision, str]:
    """Resolve `train.precision` for a device.

    On a CPU, "auto" is fp32 even where bf16 is fast. With AVX512-BF16, steps in bf16 were 0.95 times as fast at width
    128, and 1.4 to 1.5 times as fast at width 512: there bf16 is worth asking for, but another CPU would not reproduce
    the losses.

    Returns:
        the precision and the reason for it, for the log and run.json.

    Raises:
        UserError: bf16 was asked for on a GPU that does not support it.
    """
    if device.type == "cpu":
        native = {name: is_native_on_cpu(name) for name in CPU_INSTRUCTIONS}
        if requested == "auto":
            faster = "; train.precision=bf16 may be faster on this one" if native["bf16"] else ""
            return "fp32", f"auto: a CPU{faster}"
        reason = "as the recipe asks"
        if not native.get(requested, True):
            reason += f", but slow: this CPU has no {requested} instructions"
        return requested, reason  # type: ignore[return-value]
    name = torch.cuda.get_device_name(device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if requested == "auto":
        return ("bf16", f"auto: {name} has bf16") if has_bf16 else ("fp16", f"auto: {name} has no bf16")
    if requested == "bf16" and not has_bf16:
        raise UserError(f"train.precision: bf16 is not supported by {name}", "use -s train.precision=fp16")
    return requested, "as the recipe asks"  # type: ignore[return-value]


def is_finite(x: torch.Tensor) -> bool:
    """Whether all entries of x, of any shape and dtype, are finite; nothing of its size is allocated."""
    return x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all())  # a NaN is both the least and the largest


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context for a forward in `precision`; fp32 needs no autocast."""
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32", cache_enabled=True)
