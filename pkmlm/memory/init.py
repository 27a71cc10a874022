"""Initial values: each module states them, one function fills them in.

Every parameter and buffer has a random stream of its own, named by its path in the model, in which a memory is called
by its place and not by its name. The numbers depend on the seed and this path alone: not on the device (meta included),
the order of construction, or what else the model holds.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pkmlm.kernels.matmul import Linear
from pkmlm.seeds import generator


class Normal(NamedTuple):
    """Entries of N(0, std^2). With `width`, the tensor holds columns of a matrix that wide, from column `first` on."""

    std: float
    width: int | None = None
    first: int = 0


class Uniform(NamedTuple):
    """Entries of U(-bound, bound)."""

    bound: float


class Constant(NamedTuple):
    """One value in every entry."""

    value: float


class OrthogonalRows(NamedTuple):
    """Rows in orthogonal blocks, each row by itself distributed as N(0, I)."""


class Counting(NamedTuple):
    """0, 1, 2, ..."""


class Multipliers(NamedTuple):
    """Row h: `numbers[h]` odd integers below 2^32, and zeros."""

    numbers: tuple[int, ...]


InitSpec = Normal | Uniform | Constant | OrthogonalRows | Counting | Multipliers
BLOCK = 1 << 16  # rows drawn at a time, a multiple of 16: torch draws normal numbers in groups of 16


def linear_std(dim_in: int, dim_out: int) -> float:
    """The standard deviation of a linear map's or an embedding's initial weights: sqrt(2 / 5d), where d is the narrower
    of its two widths, usually the model's (Nguyen and Salazar 2019, "small init"; also Pythia's).

    GPT-2's 0.02 is this at a width of 1,000. In narrow models 0.02 makes the residual stream start so small that the
    first steps move all embeddings the same way: gradients have norms of 10 to 75 in the warm-up, and losses stay 0.2
    nats higher.
    """
    return math.sqrt(2 / (5 * min(dim_in, dim_out)))


def init_spec_of(module: nn.Module) -> dict[str, InitSpec]:
    """The initial values of a module's own parameters and buffers, by name."""
    own = getattr(module, "init_spec", None)
    if own is not None:
        return own()
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return {"weight": Constant(1.0), "bias": Constant(0.0)}
    if isinstance(module, Linear):
        small = linear_std(module.in_features, module.out_features)
        std = small if module.initial_std is None else module.initial_std
        return {"weight": Normal(std), "bias": Constant(0.0)}
    if isinstance(module, nn.Embedding):
        return {"weight": Normal(linear_std(module.embedding_dim, module.embedding_dim))}
    return {}


def initialise(model: nn.Module, seed: int, streams: Mapping[str, str] | None = None) -> None:
    """Fill every parameter and buffer of a model.

    Args:
        model: its tensors must have storage.
        seed: any integer; for a recipe's model, its `train.seed`.
        streams: paths of modules -> what stands for them in the names of their random streams, and of those within.

    Raises:
        KeyError: a module owns a tensor for which it states no initial value (a programming error).
    """
    named: dict[str, str] = {}
    for path, module in model.named_modules():
        stated = init_spec_of(module)
        above, dot, last = path.rpartition(".")
        named[path] = (streams or {}).get(path, f"{named.get(above, '')}{dot}{last}")
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            fill(tensor, stated[name], generator(seed, "initial", f"{named[path]}.{name}"))


@torch.no_grad()
def fill(tensor: Tensor, spec: InitSpec, random: torch.Generator) -> None:
    """Fill a tensor with its initial values; random ones are drawn from a generator of the CPU."""
    with torch.device("cpu"):  # the generator's, whatever torch's default device
        match spec:
            case Constant(value):
                tensor.fill_(value)
            case Normal(std, width, first):
                draw_columns(tensor, std, width, first, random)
            case Uniform(bound):
                tensor.copy_(torch.empty(tensor.shape).uniform_(-bound, bound, generator=random))
            case OrthogonalRows():
                tensor.copy_(orthogonal_rows(len(tensor), tensor.shape[1], random))
            case Counting():
                tensor.copy_(torch.arange(len(tensor)))
            case Multipliers(numbers):
                odd = 2 * torch.randint(2**31, tensor.shape, generator=random) + 1
                tensor.copy_(odd * (torch.arange(tensor.shape[1]) < torch.tensor(numbers)[:, None]))


def orthogonal_rows(rows: int, width: int, random: torch.Generator) -> torch.Tensor:
    """Rows (fp64) of uniform direction, orthogonal within each block of `width`, as long as rows of N(0, 1) entries
    (Choromanski et al. 2021, sec. 2.4)."""
    blocks = -(-rows // width)
    q_bww, r_bww = torch.linalg.qr(torch.randn(blocks, width, width, dtype=torch.float64, generator=random))
    # QR's signs are arbitrary; without this, directions are not uniform.
    q_bww = q_bww * r_bww.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    lengths_r1 = torch.randn(rows, width, dtype=torch.float64, generator=random).norm(dim=1, keepdim=True)
    return q_bww.transpose(1, 2).flatten(0, 1)[:rows] * lengths_r1


def draw_columns(tensor: Tensor, std: float, width: int | None, first: int, random: torch.Generator) -> None:
    """Fill a matrix as `Normal` says. Its numbers are drawn in fp32 by blocks of rows; they equal those of one draw."""
    width = width or tensor.shape[1]
    for block in tensor.split(BLOCK) if width >= 16 else [tensor]:
        drawn = torch.empty(len(block), width, dtype=torch.float32).normal_(0, std, generator=random)
        block.copy_(drawn[:, first : first + block.shape[1]])
