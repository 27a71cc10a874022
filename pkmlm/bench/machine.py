"""What a timing was taken on."""

import torch

from pkmlm.runtime.device import choose_device


def machine() -> dict[str, str]:
    """The device with its threads, and the version of torch."""
    device = choose_device()
    name = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__}
