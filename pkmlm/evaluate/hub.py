"""Whether the hub that data sets come from answers, asked once and quickly."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 3.0  # seconds


def answers(address: str, patience: float = PATIENCE) -> bool:
    """Whether anything answers at an address within `patience` seconds, the look-up of its name included."""
    heard: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=patience).close()
            heard.append(True)
        except urllib.error.HTTPError as error:  # 5xx: a gateway answers, but not the hub behind it
            heard.append(error.code < 500)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return any(heard)


@contextmanager
def asked_once(needed: bool) -> Iterator[bool]:
    """Keep `datasets` to what it has on disk where the hub does not answer, instead of retrying; yields True then.

    Args:
        needed: whether anything comes from the hub; if not, it is not asked.
    """
    import datasets.config
    import huggingface_hub.constants

    modules: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [module.HF_HUB_OFFLINE for module in modules]
    offline = needed and (any(before) or not answers(huggingface_hub.constants.ENDPOINT))
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = offline or module.HF_HUB_OFFLINE
        yield offline
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
