"""Speed: what is timed beside what, always in turn in one run."""

LAYERS = {
    "pkmlm": "this package's layer, row Adam",
    "plain-adam": "plain torch, dense gradient, Adam as it comes",
    "plain-fused": "plain torch, dense gradient, fused Adam",
    "plain-sparse": "plain torch, sparse gradient, SparseAdam",
    "ffn": "the FFN of the same width, fused Adam",
}
PHASES = ("forward", "backward", "step")  # of a layer; each holds the one before it
MODELS = {
    "dense": "the recipe's layers, without its memory",
    "memory": "with its memory",
    "double": "dense, with twice the layers",
    "hash": "a MemoryFormer of the same shape",
}


def short(slots: int) -> str:
    """16384 as 16k, 1048576 as 1M, as the papers write them."""
    return f"{slots // 10**6}M" if slots >= 10**6 else f"{slots // 1000}k" if slots >= 1000 else str(slots)
