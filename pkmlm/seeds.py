"""Random numbers as pure functions of a seed and names, so that nothing has to be saved to go on."""

import hashlib

import torch


def derived_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed from a seed and names: the same on every machine, unrelated between names."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator of its own for `names`."""
    return torch.Generator().manual_seed(derived_seed(seed, *names))
