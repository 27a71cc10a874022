"""`train.compile`: the dense parts of a model run through torch.compile; `train.recompute`: blocks compute activations
twice rather than keep them. Both replace the forward of modules; parameters keep their names.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pkmlm.errors import UserError, first_line
from pkmlm.memory.base import memories
from pkmlm.model.attention import Attention
from pkmlm.model.transformer import FFN, Transformer

# Dropout draws the same numbers as without compiling.
OPTIONS: dict[str, Any] = {"fallback_random": True}


def compile_dense_parts(model: Transformer) -> None:
    """Compile, for training mode, the blocks without a memory, and the attention and FFN of the others.

    Memories run as they are, and so does everything in evaluation, whose shapes vary. Results differ by rounding: sums
    are fused and reordered. Equal blocks share their compiled code.

    Raises:
        UserError: torch.compile does not work on this machine.
    """
    check_compiler(next(model.parameters()).device, "train.compile", "leave train.compile false")
    for block in model.blocks:
        inner = [part for part in block.modules() if isinstance(part, Attention | FFN)]
        for part in inner if memories(block) else [block]:
            run_compiled_in_training(part)


def check_compiler(device: torch.device, asked: str, otherwise: str) -> None:
    """Fail here, at one addition, rather than in the middle of a step.

    Args:
        asked: what asked for the compiler, for the error; otherwise: how to do without it.

    Raises:
        UserError: (exit code 1) torch.compile does not work on this machine.
    """
    try:
        torch.compile(torch.add, options=OPTIONS)(torch.ones(8, device=device), 1)
    except RuntimeError as error:
        message = f"{asked}: torch.compile does not work here: {first_line(error)}"
        raise UserError(message, f"install a C++ compiler (g++ or clang), or {otherwise}", exit_code=1) from None


def run_compiled_in_training(module: nn.Module) -> None:
    """Replace a module's forward by one that is compiled while the module trains."""
    plain = module.forward
    fast = torch.compile(plain, dynamic=False, options=OPTIONS)

    @functools.wraps(plain)
    def forward(*inputs: Any) -> Any:
        return fast(*inputs) if module.training else plain(*inputs)

    module.forward = forward


def recompute_activations(block: nn.Module) -> None:
    """Let a block keep only its input in training, and compute the rest again in its backward pass.

    The numbers are the same: dropout repeats its draws, and running statistics and reads are counted once.
    """
    plain = block.forward

    @functools.wraps(plain)
    def forward(*inputs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return plain(*inputs)
        return checkpoint(plain, *inputs, use_reentrant=False)

    block.forward = forward
