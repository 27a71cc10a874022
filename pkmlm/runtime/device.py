"""Which device and which arithmetic a command uses, and why."""

from typing import Literal

import torch

from pkmlm.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device() -> torch.device:
    """The current CUDA device where there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def choose_precision(requested: str, device: torch.device) -> tuple[Precision, str]:
    """Resolve `train.precision` for a device.

    Returns:
        the precision and the reason for it, for the log and run.json.

    Raises:
        UserError: bf16 was asked for on a GPU that has none.
    """
    if device.type == "cpu":
        if requested == "auto":
            return "fp32", "auto: a CPU"
        return requested, "as the recipe asks"  # type: ignore[return-value]
    name = torch.cuda.get_device_name(device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if requested == "auto":
        return ("bf16", f"auto: {name} has bf16") if has_bf16 else ("fp16", f"auto: {name} has no bf16")
    if requested == "bf16" and not has_bf16:
        raise UserError(f"train.precision: bf16 is not supported by {name}", "use -s train.precision=fp16")
    return requested, "as the recipe asks"  # type: ignore[return-value]


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a forward runs under `precision`; fp32 runs as it is."""
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32", cache_enabled=True)
