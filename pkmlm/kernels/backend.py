"""The one place that chooses an implementation of the kernels."""

import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from pkmlm.errors import UserError
from pkmlm.kernels import reference


def of(x: Tensor) -> ModuleType:
    """The module whose kernels take tensors like x: numba's for fp32 on the CPU, Triton's for floats of up to 32 bits
    on CUDA, else the reference. Each defines what `ops` calls, under the same names as `reference`, and two constants:
    LEARNS_BUCKETS, whether it has kernels for all reads of buckets and their gradient, or leaves them to torch, but for
    a few; KEEPS_SUMS, whether `RowGradient.keep_sums` may make an update faster.

    Raises:
        UserError: Triton cannot build its kernels on this machine.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        from pkmlm.kernels import cpu  # only when a kernel is called: numba takes a while to import

        return cpu
    if x.device.type == "cuda" and x.dtype != torch.float64:
        return triton_kernels()
    return reference


@cache
def triton_kernels() -> ModuleType:
    """Triton's kernels. Whether it can build them is checked once, before the first is built.

    Raises:
        UserError: something that it needs is missing.
    """
    lacking = lacking_for_triton()
    if lacking:
        raise UserError(
            f"the memory's CUDA kernels cannot be built: found no {' and no '.join(lacking)}",
            "install what is missing, or set CUDA_VISIBLE_DEVICES= to use the CPU",
            exit_code=1,
        )
    from pkmlm.kernels import cuda

    return cuda


def lacking_for_triton() -> list[str]:
    """What Triton needs and does not find here: at run time, it compiles a launcher in C for each kernel."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    scheme = sysconfig.get_default_scheme()  # Ubuntu's default points to a folder without headers
    include = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    there = {
        "package triton": importlib.util.find_spec("triton") is not None,
        "C compiler (gcc or clang, or what CC names)": any(map(shutil.which, compilers)),
        "Python.h (package python3-dev)": Path(include, "Python.h").exists(),
    }
    return [name for name, found in there.items() if not found]
