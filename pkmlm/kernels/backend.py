"""The one place that chooses an implementation of the kernels."""

from types import ModuleType

import torch
from torch import Tensor


def of(x: Tensor) -> ModuleType:
    """The module whose kernels take tensors like x: numba's for fp32 on the CPU, Triton's for up to 32-bit floats on
    CUDA, else the reference. All define the functions of `reference` by the same names.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        from pkmlm.kernels import cpu

        return cpu
    if x.device.type == "cuda" and x.dtype != torch.float64:
        from pkmlm.kernels import cuda

        return cuda
    from pkmlm.kernels import reference

    return reference
