"""Linformer (Wang et al. 2020) in a causal form.

B: sequences; T: positions; h: heads; e: width of a head; n: blocks; c: positions of a block; r: rows that stand for a
block; K: such rows in all; S: what a query may see (K + c); N: sequences x heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from pkmlm.model.initial import Initial, Normal


class Linformer(nn.Module):
    """Exact attention within a block of c positions, and to r rows that stand for each earlier block.

    Linformer projects keys and values along the length, E K and F V (eq. 7), so that every row holds all positions:
    that is not causal, and no mask makes it so. Here E and F are block-diagonal: a whole block becomes r rows, which
    later blocks alone may see, in one softmax with the exact keys of the own block. E and F are shared by heads, as in
    the paper's headwise sharing, and by blocks, so that all blocks train them and any length can be read. A sequence of
    one block is softmax attention. Keys are rotated by rotary positions before they are projected.

    Attributes:
        key_map_rc, value_map_rc: E and F.
    """

    def __init__(self, block: int, rank: int, dropout: float):
        super().__init__()
        self.block, self.dropout = block, dropout
        self.key_map_rc = nn.Parameter(torch.empty(rank, block))
        self.value_map_rc = nn.Parameter(torch.empty(rank, block))

    def initial(self) -> dict[str, Initial]:
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
        """What each position sees: (n, c, S), bool."""
        rank, block = self.key_map_rc.shape
        block_K = torch.arange(blocks - 1, device=device).repeat_interleave(rank)
        earlier_n1K = (block_K < torch.arange(blocks, device=device)[:, None])[:, None]
        own_cc = torch.ones(block, block, dtype=torch.bool, device=device).tril()
        return torch.cat([earlier_n1K.expand(-1, block, -1), own_cc.expand(blocks, -1, -1)], -1)


def with_earlier(x_Nnce: Tensor, weight_rc: Tensor) -> Tensor:
    """The r rows of every block but the last, before each block's own: (N, n, S, e)."""
    rows_NKe = (weight_rc @ x_Nnce[:, :-1]).flatten(1, 2)
    return torch.cat([rows_NKe[:, None].expand(-1, x_Nnce.shape[1], -1, -1), x_Nnce], 2)
