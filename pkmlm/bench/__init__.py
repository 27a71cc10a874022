"""Speed: what is compared is timed in turn, in one process. There is one file per benchmark (`memory`, `train`,
`generate`); `rounds` times them, `models` makes whole models from a recipe, and `steps` times the training steps of
runs. The command line and the sweep use this package.
"""

# The layers of `bench memory`: this package's with row Adam; the same in plain torch, with a dense gradient and torch's
# default or fused Adam, with fused Adam and compiled, or with a sparse gradient and SparseAdam; the FFN of the same
# width with fused Adam.
LAYERS = ("pkmlm", "plain-adam", "plain-fused", "plain-compiled", "plain-sparse", "ffn")
COMPILED = "plain-compiled"  # for which a CPU compiles one or two minutes, so there it is timed only if it is named
# Models made from a recipe: without its memories, with them, without them but twice as deep, and a MemoryFormer of its
# shape.
MODELS = ("dense", "memory", "double", "hash")


def short(slots: int) -> str:
    """16384 as 16k, 1048576 as 1M, as the papers write them."""
    return f"{slots // 10**6}M" if slots >= 10**6 else f"{slots // 1000}k" if slots >= 1000 else str(slots)
