"""Attention in less than quadratic time, in causal forms: cosFormer, Performer and Linformer.

cosFormer and Performer take time linear in the length. Their weights are products of features: the output of position i
is sum_j w_ij v_j / sum_j w_ij over j <= i, with w_ij = <f(q_i), g(k_j)> >= 0, and a running sum of g(k_j) v_j^T takes
the place of the weights. Linformer attends to its own block, and to a few rows that stand for each earlier block.

B: sequences; T: positions; h: heads; e: width of a head; v: e + 1 (values and a one); M: features; n: chunks, or
blocks; c: positions of one; r: rows that stand for a block; K: such rows in all; S: what a query may see (K + c); N:
sequences x heads.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu, scaled_dot_product_attention

from pkmlm.kernels.matmul import at_least_fp32, linear
from pkmlm.memory.init import InitSpec, Normal, OrthogonalRows

CHUNK = 64  # positions whose weights linear attention computes one by one; it reads earlier ones through their sum
EPSILON = 1e-6


def causal_linear_attention(q_BhTM: Tensor, k_BhTM: Tensor, log_scale_BhT: Tensor, v_BhTe: Tensor) -> Tensor:
    """sum_j w_ij v_j / max(sum_j w_ij, 1e-6) over j <= i, with w_ij = exp(s_j - m_i) <q_i, k_j>; (B, h, T, e).

    Within a chunk the weights are computed; earlier chunks are carried along as one (M, e + 1) sum.

    Args:
        q_BhTM, k_BhTM: features, none negative, in fp32 or wider.
        log_scale_BhT: s, the logarithms of the keys' sizes. m_i, the largest s_j up to i, keeps all exponents at 0 or
            below; no output depends on later positions, not even by rounding.
        v_BhTe: values, in the dtype of the features.
    """
    length = v_BhTe.shape[2]
    size = min(CHUNK, length)
    chunks = -(-length // size)
    v_BhTv = torch.cat([v_BhTe, torch.ones_like(v_BhTe[..., :1])], -1)  # the sum of the weights is one more column
    if chunks * size > length:
        spare = chunks * size - length
        q_BhTM, k_BhTM, v_BhTv = (pad(x, (0, 0, 0, spare)) for x in (q_BhTM, k_BhTM, v_BhTv))
        log_scale_BhT = pad(log_scale_BhT, (0, spare))
    running_max_BhT = log_scale_BhT.detach().cummax(-1).values
    q_BhncM, k_BhncM, v_Bhncv, log_scale_Bhnc, running_max_Bhnc = (
        x.unflatten(2, (chunks, size)) for x in (q_BhTM, k_BhTM, v_BhTv, log_scale_BhT, running_max_BhT)
    )
    later_cc = torch.ones(size, size, dtype=torch.bool, device=q_BhTM.device).triu(1)
    sizes_Bhncc = (log_scale_Bhnc[..., None, :] - running_max_Bhnc[..., None]).masked_fill(later_cc, -math.inf).exp()
    sums_Bhncv = (q_BhncM @ k_BhncM.transpose(-1, -2) * sizes_Bhncc) @ v_Bhncv
    if chunks > 1:
        before_BhnMv, end_Bhn = sums_of_earlier(k_BhncM, log_scale_Bhnc, v_Bhncv, running_max_Bhnc)
        decay_Bhnc = (end_Bhn[..., None] - running_max_Bhnc[:, :, 1:]).exp()
        earlier_Bhncv = (q_BhncM[:, :, 1:] @ before_BhnMv) * decay_Bhnc[..., None]
        sums_Bhncv = torch.cat([sums_Bhncv[:, :, :1], sums_Bhncv[:, :, 1:] + earlier_Bhncv], 2)
    out_Bhnce = sums_Bhncv[..., :-1] / sums_Bhncv[..., -1:].clamp_min(EPSILON)
    return out_Bhnce.flatten(2, 3)[:, :, :length]


def sums_of_earlier(
    k_BhncM: Tensor, log_scale_Bhnc: Tensor, v_Bhncv: Tensor, running_max_Bhnc: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over all positions before each chunk but the first: sum_j exp(s_j - m) k_j v_j^T, and m, the largest s_j."""
    end_Bhn = running_max_Bhnc[:, :, :-1, -1]
    sizes_Bhnc = (log_scale_Bhnc[:, :, :-1] - end_Bhn[..., None]).exp()
    own_BhnMv = (k_BhncM[:, :, :-1] * sizes_Bhnc[..., None]).transpose(-1, -2) @ v_Bhncv[:, :, :-1]
    decay_Bhn = (end_Bhn[..., :-1] - end_Bhn[..., 1:]).exp()
    sums = [own_BhnMv[:, :, 0]]
    for own_BhMv, decay_Bh in zip(own_BhnMv.unbind(2)[1:], decay_Bhn.unbind(2), strict=True):
        sums.append(sums[-1] * decay_Bh[..., None, None] + own_BhMv)
    return torch.stack(sums, 2), end_Bhn


class CosFormer(nn.Module):
    """w_ij = <relu(q_i), relu(k_j)> cos(pi/2 (i - j) / L), L the context (Qin et al. 2022).

    The cosine of a difference is a sum of two products, so the features are relu(x) times the cosine and relu(x) times
    the sine of the position: M = 2e of them. L is the model's context: the current length would leak how many tokens
    follow. Rotary positions rotate before the ReLU, so that no weight is negative; weights then depend on more than the
    distance.

    Args:
        context: L.
    """

    def __init__(self, context: int):
        super().__init__()
        self.context = context

    def forward(self, q_BhTe: Tensor, k_BhTe: Tensor, v_BhTe: Tensor) -> Tensor:
        """(B, h, T, e), in the dtype of the values; in fp32 inside, whatever the autocast."""
        with torch.autocast(q_BhTe.device.type, enabled=False):
            q_BhTM, k_BhTM = self._features(at_least_fp32(q_BhTe)), self._features(at_least_fp32(k_BhTe))
            unscaled_BhT = k_BhTM.new_zeros(k_BhTM.shape[:-1])
            return causal_linear_attention(q_BhTM, k_BhTM, unscaled_BhT, at_least_fp32(v_BhTe)).to(v_BhTe.dtype)

    def _features(self, x_BhTe: Tensor) -> Tensor:
        place_T = torch.arange(x_BhTe.shape[2], device=x_BhTe.device, dtype=x_BhTe.dtype)
        angle_T1 = (math.pi / 2 / self.context * place_T)[:, None]
        positive_BhTe = relu(x_BhTe)
        return torch.cat([positive_BhTe * angle_T1.cos(), positive_BhTe * angle_T1.sin()], -1)


class Performer(nn.Module):
    """w_ij ~ exp(<q_i, k_j> / sqrt(e)) by positive orthogonal random features, FAVOR+ (Choromanski et al. 2021).

    The M features of x / e^(1/4) are exp(<w_m, x> - |x|^2 / 2) / sqrt(M): over draws of the w_m, the mean of their
    products is the softmax's weights. As in the authors' code, features are divided by the largest, and 1e-6 is added;
    there it is the largest of the sequence, which leaks later tokens, here that of each vector. Queries and keys that
    rotary positions have rotated are used as they are: this estimates softmax attention with rotary positions.

    The directions are drawn once from the seed, are the same for all heads of a layer, and are saved with the weights.
    Unlike the authors', which may be, they are not redrawn in training.

    Args:
        width: of a head (e).
        features: M.

    Attributes:
        directions_Me: w, in blocks of e orthogonal rows, each as long as one of N(0, I).
    """

    def __init__(self, width: int, features: int):
        super().__init__()
        self.register_buffer("directions_Me", torch.empty(features, width))

    directions_Me: Tensor

    def init_spec(self) -> dict[str, InitSpec]:
        return {"directions_Me": OrthogonalRows()}

    def forward(self, q_BhTe: Tensor, k_BhTe: Tensor, v_BhTe: Tensor) -> Tensor:
        """(B, h, T, e), in the dtype of the values; in fp32 inside, whatever the autocast."""
        with torch.autocast(q_BhTe.device.type, enabled=False):
            q_BhTM, _ = self._features(at_least_fp32(q_BhTe))
            k_BhTM, size_BhT = self._features(at_least_fp32(k_BhTe))
            return causal_linear_attention(q_BhTM, k_BhTM, size_BhT, at_least_fp32(v_BhTe)).to(v_BhTe.dtype)

    def _features(self, x_BhTe: Tensor) -> tuple[Tensor, Tensor]:
        """Features divided by the largest of their vector, and the logarithm of the largest."""
        x_BhTe = x_BhTe * x_BhTe.shape[-1] ** -0.25
        log_BhTM = linear(x_BhTe, self.directions_Me) - x_BhTe.square().sum(-1, keepdim=True) / 2
        largest_BhT1 = log_BhTM.amax(-1, keepdim=True)
        return (log_BhTM - largest_BhT1).exp() + EPSILON, largest_BhT1[..., 0]


class Linformer(nn.Module):
    """Exact attention within a block of c positions, and to r rows that stand for each earlier block.

    Linformer projects keys and values along the length, E K and F V (eq. 7), so that every row holds all positions:
    that is not causal, and no mask makes it so. Here E and F are block-diagonal: each block becomes r rows, which only
    later blocks see, in one softmax with the exact keys of their own block. E and F are shared by heads, as in the
    paper's headwise sharing, and by blocks, so that all blocks train them and any length can be read. A sequence of one
    block is softmax attention. Keys are rotated by rotary positions before they are projected.

    Args:
        block: positions of a block (c).
        rank: rows that stand for a block (r).
        dropout: probability, in training, that a weight is dropped.

    Attributes:
        key_map_rc, value_map_rc: E and F.
    """

    def __init__(self, block: int, rank: int, dropout: float):
        super().__init__()
        self.block, self.dropout = block, dropout
        self.key_map_rc = nn.Parameter(torch.empty(rank, block))
        self.value_map_rc = nn.Parameter(torch.empty(rank, block))

    def init_spec(self) -> dict[str, InitSpec]:
        return {name: Normal(self.block**-0.5) for name in ("key_map_rc", "value_map_rc")}

    def forward(self, q_BhTe: Tensor, k_BhTe: Tensor, v_BhTe: Tensor) -> Tensor:
        """(B, h, T, e), in the dtype of q, k and v (all of that shape)."""
        dropout = self.dropout if self.training else 0.0
        batch, _, length, _ = q_BhTe.shape
        if length <= self.block:
            return scaled_dot_product_attention(q_BhTe, k_BhTe, v_BhTe, is_causal=True, dropout_p=dropout)
        blocks = -(-length // self.block)
        spare = (0, 0, 0, blocks * self.block - length)
        q_Nnce, k_Nnce, v_Nnce = (
            pad(x, spare).unflatten(2, (blocks, self.block)).flatten(0, 1) for x in (q_BhTe, k_BhTe, v_BhTe)
        )
        k_NnSe, v_NnSe = with_earlier(k_Nnce, self.key_map_rc), with_earlier(v_Nnce, self.value_map_rc)
        seen_1ncS = self._seen(blocks, q_BhTe.device)[None]
        out_Nnce = scaled_dot_product_attention(q_Nnce, k_NnSe, v_NnSe, attn_mask=seen_1ncS, dropout_p=dropout)
        return out_Nnce.unflatten(0, (batch, -1)).flatten(2, 3)[:, :, :length]

    def _seen(self, blocks: int, device: torch.device) -> Tensor:
        """Which rows and keys each position sees: (n, c, S), bool."""
        rank, block = self.key_map_rc.shape
        block_K = torch.arange(blocks - 1, device=device).repeat_interleave(rank)
        earlier_n1K = (block_K < torch.arange(blocks, device=device)[:, None])[:, None]
        own_cc = torch.ones(block, block, dtype=torch.bool, device=device).tril()
        return torch.cat([earlier_n1K.expand(-1, block, -1), own_cc.expand(blocks, -1, -1)], -1)


def with_earlier(x_Nnce: Tensor, weight_rc: Tensor) -> Tensor:
    """Each block's own positions, preceded by the r rows of every block but the last: (N, n, S, e)."""
    rows_NKe = (weight_rc @ x_Nnce[:, :-1]).flatten(1, 2)
    return torch.cat([rows_NKe[:, None].expand(-1, x_Nnce.shape[1], -1, -1), x_Nnce], 2)
