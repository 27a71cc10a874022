"""Causal self-attention with its rotary positions and its cache. `efficient_attention` has alternatives to the softmax.

B: sequences; T: new positions; S: all positions so far; D: model width; h: heads; e: width of a head; w: pairs of its
entries that are rotated.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pkmlm.model.efficient_attention import CosFormer, Linformer, Performer

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model

ROTARY_BASE = 10_000.0


@dataclass
class KVCache:
    """Keys and values of the positions that a model has already read, and what else depends on them, for generation.
    All positions are allocated at once, so that a new token copies nothing.

    Attributes:
        room: positions that it can hold (C): the model's context.
        length: positions held; the next token has this position.
        held: by name; uninitialized beyond `length`.
    """

    room: int
    length: int = 0
    held: dict[str, Any] = field(default_factory=dict)

    def append(self, name: str, x: Tensor, dim: int = 1) -> Tensor:
        """Write the new positions of `held[name]`, along the dimension `dim`; return all of its positions so far."""
        if name not in self.held:
            self.held[name] = x.new_empty(*x.shape[:dim], self.room, *x.shape[dim + 1 :])
        whole: Tensor = self.held[name]
        whole.narrow(dim, self.length, x.shape[dim]).copy_(x)
        return whole.narrow(dim, 0, self.length + x.shape[dim])

    def extend(self, block: int, k_BhTe: Tensor, v_BhTe: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new positions' keys and values in a block, counted from 0; return those of all positions so far."""
        return self.append(f"keys of block {block}", k_BhTe, 2), self.append(f"values of block {block}", v_BhTe, 2)


class AttentionLayout(NamedTuple):
    """Positions and mask of tokens that are not a plain sequence, but several sequences in a row that share a prefix.

    Attributes:
        positions_BT: the position of each token.
        mask_BTT: which tokens each token attends to (bool), itself included; after a cache (B, T, S), of all so far.
    """

    positions_BT: Tensor
    mask_BTT: Tensor


def rotation(positions_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., T, width / 2) of rotary positions (..., T), int64, in fp32."""
    frequency = ROTARY_BASE ** (-torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width)
    angle_Tw = positions_T[..., None] * frequency
    return angle_Tw.cos(), angle_Tw.sin()


def rotate(x_BhTe: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first 2w entries of each head by position (halves paired, as in GPT-NeoX); keep the rest.

    Args:
        x_BhTe: queries or keys, floating; the result has their shape and dtype.
        cos_sin: from `rotation`: (T, w) each, or anything that broadcasts to (B, h, T, w).
    """
    cos_Tw, sin_Tw = (part.to(x_BhTe.dtype) for part in cos_sin)
    width = cos_Tw.shape[-1]
    a, b, rest = x_BhTe[..., :width], x_BhTe[..., width : 2 * width], x_BhTe[..., 2 * width :]
    return torch.cat([a * cos_Tw - b * sin_Tw, b * cos_Tw + a * sin_Tw, rest], -1)


class Attention(nn.Module):
    """Multi-head causal attention. With anything but a softmax it reads whole sequences only: no cache, no layout.

    Args:
        model: the recipe's section: its `dim`, `heads`, `context`, `dropout`, `attention` and `attention_options`.
        qkv: maps (B, T, D) to (B, T, 3D): a linear map, or one hash layer for all three (MemoryFormer).
        out: the output projection; None where there is none (MemoryFormer).
        index: of the block, counted from 0, for the cache.

    Attributes:
        efficient: maps q, k and v, each (B, h, T, e), to the attended values; None: softmax attention.
    """

    def __init__(self, model: "Model", qkv: nn.Module, out: nn.Module | None, index: int):
        super().__init__()
        self.heads, self.dropout, self.index = model.heads, model.dropout, index
        self.qkv, self.out = qkv, out
        self.efficient: nn.Module | None = None
        match model.attention:
            case "linformer":
                options = model.attention_options
                self.efficient = Linformer(options.block, options.rank, model.dropout)
            case "cosformer":
                self.efficient = CosFormer(model.context)
            case "performer":
                self.efficient = Performer(model.dim // model.heads, model.attention_options.features)

    def forward(
        self,
        x_BTD: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layout: AttentionLayout | None = None,
        more_BTD: Tensor | None = None,
    ) -> Tensor:
        """The attention's output (B, T, D), in the dtype of its last map.

        Args:
            x_BTD: the normalised residual stream, floating.
            more_BTD: what is added to the values of all heads, side by side.
            cos_sin: cosines and sines from `rotation`, for rotary positions; None: no rotation.
            cache: keys and values of the tokens before; the new ones are added to it.
            layout: positions and mask of tokens that are not a plain sequence.

        Raises:
            ValueError: a cache or a layout with anything but a softmax.
        """
        batch, new, dim = x_BTD.shape
        split = self.qkv(x_BTD).view(batch, new, 3, self.heads, dim // self.heads)
        q_BhTe, k_BhTe, v_BhTe = split.permute(2, 0, 3, 1, 4)
        if more_BTD is not None:
            v_BhTe = v_BhTe + more_BTD.to(v_BhTe.dtype).view(batch, new, self.heads, -1).transpose(1, 2)
        if cos_sin is not None:
            q_BhTe, k_BhTe = rotate(q_BhTe, cos_sin), rotate(k_BhTe, cos_sin)
        if self.efficient is None:
            mixed_BhTe = self._softmax(q_BhTe, k_BhTe, v_BhTe, cache, layout)
        elif cache is None and layout is None:
            mixed_BhTe = self.efficient(q_BhTe, k_BhTe, v_BhTe)
        else:
            raise ValueError("only softmax attention reads a cache or a layout")
        y_BTD = mixed_BhTe.transpose(1, 2).reshape(batch, new, dim)
        return y_BTD if self.out is None else self.out(y_BTD)

    def _softmax(
        self, q_BhTe: Tensor, k_BhTe: Tensor, v_BhTe: Tensor, cache: KVCache | None, layout: AttentionLayout | None
    ) -> Tensor:
        if cache is not None:
            k_BhTe, v_BhTe = cache.extend(self.index, k_BhTe, v_BhTe)
        new, total = q_BhTe.shape[2], k_BhTe.shape[2]
        mask = None if layout is None else layout.mask_BTT[:, None]
        if mask is None and 1 < new < total:  # a chunk that continues a cache: no fast causal path for it
            mask = torch.ones(new, total, dtype=torch.bool, device=q_BhTe.device).tril(total - new)
        return scaled_dot_product_attention(
            q_BhTe,
            k_BhTe,
            v_BhTe,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and new == total and new > 1,
        )
