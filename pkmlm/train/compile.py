"""`train.compile`: the dense parts of a model through torch.compile."""

import functools
from typing import Any

import torch
from torch import nn

from pkmlm.errors import UserError
from pkmlm.model.attention import Attention
from pkmlm.model.memory.values import tables_of
from pkmlm.model.transformer import FFN, Transformer

# Dropout draws the same numbers as without compiling.
OPTIONS: dict[str, Any] = {"fallback_random": True}


def compile_dense_parts(model: Transformer) -> None:
    """Let blocks without a memory, and the attention and FFN of the others, run compiled in training mode.

    Memories run as they are, and so does everything in evaluation, whose shapes vary. Parameters keep their names.
    Results differ by rounding: sums are fused and reordered. Equal blocks share their compiled code.

    Raises:
        UserError: torch.compile does not work on this machine.
    """
    try_compiler(next(model.parameters()).device)
    for block in model.blocks:
        inner = [part for part in block.modules() if isinstance(part, Attention | FFN)]
        for part in inner if tables_of(block) else [block]:
            run_compiled_in_training(part)


def run_compiled_in_training(module: nn.Module) -> None:
    """Replace a module's forward by one that is compiled while the module trains."""
    plain = module.forward
    fast = torch.compile(plain, dynamic=False, options=OPTIONS)

    @functools.wraps(plain)
    def forward(*inputs: Any) -> Any:
        return fast(*inputs) if module.training else plain(*inputs)

    module.forward = forward


def try_compiler(device: torch.device) -> None:
    """Compile one addition: what is missing shows here, not in the middle of a step.

    Raises:
        UserError: it failed, mostly for want of a C++ compiler.
    """
    try:
        torch.compile(torch.add, options=OPTIONS)(torch.ones(8, device=device), 1)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"train.compile: torch.compile does not work here: {reason}",
            "install a C++ compiler (g++ or clang), or leave train.compile false",
            exit_code=1,
        ) from None
