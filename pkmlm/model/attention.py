"""Causal self-attention with its rotary positions and its cache. `efficient_attention` has alternatives to the softmax.

B: sequences; T: new positions; S: all positions so far; D: model width; h: heads; e: width of a head; w: pairs of its
entries that are rotated; N: positions of all sequences in a row.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pkmlm.kernels.matmul import at_least_fp32, without_autocast
from pkmlm.memory.base import outside_compiler
from pkmlm.model.efficient_attention import CosFormer, Linformer, Performer

if TYPE_CHECKING:
    from pkmlm.recipe.schema import Model, RotaryScaling

# Positions up to which a CPU reads a mask: at 128 it is faster than a call per document, at 2,048 far slower; at 512 it
# depends on the documents.
SHORT = 256
MEAN_LENGTH = 64  # and of shorter documents, on average, always: with `data.pack: false` each pad begins one
# With a mask on a GPU, all but cuDNN's: its backward has given NaN (pytorch issue 196678), and its first call with each
# shape takes half a second.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
        positions_BT: the position of each token; None: as many as the tokens that it attends to before itself.
        mask_BTT: which tokens each token attends to (bool), itself included, or what is added to their scores
            (floating); after a cache (B, T, S), of all so far.
    """

    positions_BT: Tensor | None
    mask_BTT: Tensor

    def as_added(self, dtype: torch.dtype) -> "AttentionLayout":
        """The same with its positions, and with a mask of 0 and minus infinity in the dtype of queries, that of the
        autocast or else `dtype`. Of a mask of bools, attention would make such a copy in each layer, and keep it for
        the backward pass.
        """
        kind = self.mask_BTT.device.type
        wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        added_BTT = torch.zeros(self.mask_BTT.shape, dtype=wanted, device=self.mask_BTT.device)
        return AttentionLayout(positions_of(self), added_BTT.masked_fill_(~self.mask_BTT, -math.inf))


class Documents:
    """The layout of packed sequences, of which all positions are new and each document attends to itself alone. With
    it, attention reads the sequences of a batch in a row, so that documents are slices.

    Args:
        positions_BT: the position of each token in its document.
    """

    def __init__(self, positions_BT: Tensor):
        self.positions_BT = positions_BT
        starts = (positions_BT == 0).flatten().nonzero()[:, 0].tolist()
        self._lengths = [stop - start for start, stop in pairwise([*starts, positions_BT.numel()])]

    @outside_compiler  # each batch has other lengths, for which other code would be compiled
    def attend(self, q_1hNe: Tensor, k_1hNe: Tensor, v_1hNe: Tensor, dropout: float, grouped: bool) -> Tensor:
        """Causal softmax attention of each document (1, h, N, e).

        Args:
            q_1hNe, k_1hNe, v_1hNe: of all sequences in a row (N = B T).
            dropout: probability that a weight is dropped.
            grouped: whether several heads of queries share one of keys and values.
        """
        q_s, k_s, v_s = (x_1hNe.split(self._lengths, 2) for x_1hNe in (q_1hNe, k_1hNe, v_1hNe))
        mixed = [
            scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
            for q, k, v in zip(q_s, k_s, v_s, strict=True)
        ]
        return torch.cat(mixed, 2)


def within_documents(
    begins_BS: Tensor, new: int, layout: AttentionLayout | None, cached: bool
) -> AttentionLayout | Documents | None:
    """The layout of tokens that attend to their own document alone, and whose positions are counted from its beginning.

    Args:
        begins_BS: which positions so far begin a document (bool).
        new: how many of them are new (T), the last ones.
        layout: positions and mask of tokens that are not a plain sequence: it keeps the positions.
        cached: whether there is a cache, perhaps an empty one.

    Returns:
        None where all tokens are of one document and a plain sequence. On a GPU neither this nor the documents' lengths
        are found out: it would wait.
    """
    plain_on_cpu = layout is None and begins_BS.device.type == "cpu"
    if plain_on_cpu and not bool(begins_BS[:, 1:].any()):
        return None
    place_S = torch.arange(begins_BS.shape[1], device=begins_BS.device)
    positions_BT = (place_S - (begins_BS * place_S).cummax(1).values)[:, -new:]
    if plain_on_cpu and not cached and new > SHORT and MEAN_LENGTH * int(begins_BS.sum()) <= begins_BS.numel():
        return Documents(positions_BT)
    document_BS = begins_BS.cumsum(1)
    same_BTS = document_BS[:, -new:, None] == document_BS[:, None]
    if layout is not None:
        return layout._replace(mask_BTT=layout.mask_BTT & same_BTS)
    return AttentionLayout(positions_BT, same_BTS & (place_S[-new:, None] >= place_S))


def positions_of(layout: AttentionLayout | Documents) -> Tensor:
    """The position of each token (B, T)."""
    if isinstance(layout, Documents):
        return layout.positions_BT
    if layout.positions_BT is not None:
        return layout.positions_BT
    return (layout.mask_BTT.sum(-1) - 1).clamp(min=0)


def rotation(
    positions_T: Tensor, width: int, base: float, scaling: "RotaryScaling | None" = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., T, width / 2) of rotary positions (..., T), int64, in fp32.

    Args:
        scaling: how frequencies are lowered; None: they are not. llama3 (Llama 3.1's released code): a share of 0 to 1
            of each frequency is kept, by its turns within the earlier context.
    """
    frequency_w = base ** (-torch.arange(0, width, 2, device=positions_T.device, dtype=torch.float32) / width)
    if scaling is not None and scaling.kind != "none":
        kept: Tensor | float = 0.0
        if scaling.kind == "llama3":
            turns_w = scaling.context * frequency_w / (2 * math.pi)
            kept = ((turns_w - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        frequency_w = frequency_w * (kept + (1 - kept) / scaling.factor)
    angle_Tw = positions_T[..., None] * frequency_w
    return angle_Tw.cos(), angle_Tw.sin()


def rotate(x_BhTe: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first 2w entries of each head by position (halves paired, as in GPT-NeoX); keep the rest.

    Args:
        x_BhTe: queries or keys, floating; the result has their shape and dtype.
        cos_sin: from `rotation`: (T, w) each, or anything that broadcasts to (B, h, T, w).
    """
    cos_Tw, sin_Tw = (part.to(x_BhTe.dtype) for part in cos_sin)
    width = cos_Tw.shape[-1]
    # A split, not slices: the gradient of each slice would be a whole tensor of zeros, to be filled and added up.
    a, b, rest = x_BhTe.split_with_sizes((width, width, x_BhTe.shape[-1] - 2 * width), -1)
    return torch.cat([a * cos_Tw - b * sin_Tw, b * cos_Tw + a * sin_Tw, rest], -1)


def normed(norm: nn.RMSNorm, x_BhTe: Tensor) -> Tensor:
    """Each head's queries or keys, normalised in fp32 or wider; in their dtype."""
    with without_autocast(x_BhTe.device):
        return norm(at_least_fp32(x_BhTe)).to(x_BhTe.dtype)


class Attention(nn.Module):
    """Multi-head causal attention. With anything but a softmax it reads whole sequences only: no cache, no layout.

    Args:
        model: the recipe's section.
        qkv: maps (B, T, D) to queries, keys and values, side by side: a linear map, or one hash layer for all three
            (MemoryFormer).
        out: the output projection; None where there is none (MemoryFormer).
        index: of the block, counted from 0, for the cache.

    Attributes:
        efficient: maps q, k and v, each (B, h, T, e), to the attended values; None: softmax attention.
    """

    def __init__(self, model: "Model", qkv: nn.Module, out: nn.Module | None, index: int):
        super().__init__()
        self.heads, self.value_heads, self.width = model.heads, model.value_heads, model.head_width
        self.dropout, self.index = model.dropout, index
        self.qkv, self.out = qkv, out
        self.query_norm = nn.RMSNorm(self.width, model.epsilon("rms")) if model.qk_norm else None
        self.key_norm = nn.RMSNorm(self.width, model.epsilon("rms")) if model.qk_norm else None
        self.efficient: nn.Module | None = None
        match model.attention:
            case "linformer":
                options = model.attention_options
                self.efficient = Linformer(options.block, options.rank, model.dropout)
            case "cosformer":
                self.efficient = CosFormer(model.context)
            case "performer":
                self.efficient = Performer(model.head_width, model.attention_options.features)

    def forward(
        self,
        x_BTD: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layout: AttentionLayout | Documents | None = None,
        more_BTD: Tensor | None = None,
    ) -> Tensor:
        """The attention's output (B, T, D), in the dtype of its last map.

        Args:
            x_BTD: the normalised residual stream, floating.
            more_BTD: what is added to the values of all heads, side by side.
            cos_sin: cosines and sines from `rotation`, for rotary positions; None: no rotation. With `Documents` they
                are those of all sequences in a row.
            cache: keys and values of the tokens before; the new ones are added to it.
            layout: positions and mask of tokens that are not a plain sequence, or documents in sequences.

        Raises:
            ValueError: a cache or a layout with anything but a softmax.
        """
        sizes = (self.heads, self.value_heads, self.value_heads)
        batch, new = (1, x_BTD[..., 0].numel()) if isinstance(layout, Documents) else x_BTD.shape[:2]
        split_BhTe = self.qkv(x_BTD).view(batch, new, -1, self.width).transpose(1, 2)
        q_BhTe, k_BhTe, v_BhTe = split_BhTe.split_with_sizes(sizes, 1)
        if self.query_norm is not None and self.key_norm is not None:
            q_BhTe, k_BhTe = normed(self.query_norm, q_BhTe), normed(self.key_norm, k_BhTe)
        if more_BTD is not None:
            v_BhTe = v_BhTe + more_BTD.to(v_BhTe.dtype).view(batch, new, -1, self.width).transpose(1, 2)
        if cos_sin is not None:
            q_BhTe, k_BhTe = rotate(q_BhTe, cos_sin), rotate(k_BhTe, cos_sin)
        if self.efficient is None:
            mixed_BhTe = self._softmax(q_BhTe, k_BhTe, v_BhTe, cache, layout)
        elif cache is None and layout is None:
            mixed_BhTe = self.efficient(q_BhTe, k_BhTe, v_BhTe)
        else:
            raise ValueError("only softmax attention reads a cache or a layout")
        y_BTE = mixed_BhTe.transpose(1, 2).reshape(*x_BTD.shape[:2], -1)
        return y_BTE if self.out is None else self.out(y_BTE)

    def _softmax(
        self,
        q_BhTe: Tensor,
        k_BhTe: Tensor,
        v_BhTe: Tensor,
        cache: KVCache | None,
        layout: AttentionLayout | Documents | None,
    ) -> Tensor:
        dropout, grouped = self.dropout if self.training else 0.0, self.value_heads < self.heads
        if isinstance(layout, Documents):
            return layout.attend(q_BhTe, k_BhTe, v_BhTe, dropout, grouped)
        if cache is not None:
            k_BhTe, v_BhTe = cache.extend(self.index, k_BhTe, v_BhTe)
        new, total = q_BhTe.shape[2], k_BhTe.shape[2]
        mask = None if layout is None else layout.mask_BTT[:, None]
        if mask is None and 1 < new < total:  # a chunk that continues a cache: no fast causal path for it
            mask = torch.ones(new, total, dtype=torch.bool, device=q_BhTe.device).tril(total - new)
        on_gpu = q_BhTe.device.type != "cpu"
        if on_gpu and grouped and (mask is not None or q_BhTe.dtype not in (torch.float16, torch.bfloat16)):
            # No fused kernel takes heads that share keys then, and the plain one keeps all scores.
            k_BhTe, v_BhTe = repeat_heads(k_BhTe, self.heads), repeat_heads(v_BhTe, self.heads)
            grouped = False
        with sdpa_kernel(BACKENDS) if on_gpu and mask is not None else nullcontext():
            return scaled_dot_product_attention(
                q_BhTe,
                k_BhTe,
                v_BhTe,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None and new == total and new > 1,
                enable_gqa=grouped,
            )


def repeat_heads(x_BgTe: Tensor, heads: int) -> Tensor:
    """The keys or values of g heads (B, g, T, e) for each of `heads` heads, of which heads / g neighbours share one."""
    return x_BgTe.repeat_interleave(heads // x_BgTe.shape[1], 1)
