"""What a timing was taken on."""

import torch

from pkmlm.runtime.device import choose_device, name_of


def machine() -> dict[str, str]:
    """The device with its threads, and the version of torch."""
    return {"device": name_of(choose_device()), "torch": torch.__version__}
