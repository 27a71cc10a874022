"""`train.recompute`: activations are computed twice rather than kept."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pkmlm.model.memory.query import QueryBatchNorm
from pkmlm.model.transformer import Transformer


def checkpoint_activations(model: Transformer) -> None:
    """Let each block keep only its input in training, and compute the rest again when its backward pass comes.

    The numbers are the same: dropout draws again what it drew, and running statistics are counted once.
    """
    for block in model.blocks:
        checkpoint_block(block)


def checkpoint_block(block: nn.Module) -> None:
    """Replace a block's forward by one that runs again in its backward pass."""
    plain = block.forward
    norms = [module for module in block.modules() if isinstance(module, QueryBatchNorm)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), uncounted(norms)

    @functools.wraps(plain)
    def forward(*inputs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*inputs)
        return checkpoint(plain, *inputs, use_reentrant=False, context_fn=contexts)

    block.forward = forward


@contextmanager
def uncounted(norms: list[QueryBatchNorm]) -> Iterator[None]:
    """Forwards in this block have been counted in the running statistics already."""
    for norm in norms:
        norm.counts = False
    try:
        yield
    finally:
        for norm in norms:
            norm.counts = True
