"""Random numbers as pure functions of a seed and names, so that a run can resume without saved state."""

import hashlib

import torch


def derived_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed from a seed and names: the same on every machine, unrelated between names."""
    digest = hashlib.sha256("\0".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator, seeded by `derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, *names))
