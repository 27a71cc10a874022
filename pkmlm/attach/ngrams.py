"""N-gram memories in a model of `transformers`: finds the tokens that it is called with, and those before each.

B: sequences; T: new positions; S: all positions so far; X: entries of a position.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.errors import UserError
from pkmlm.model.memory.ngram import NGramIds, Past

CACHES = ("cache", "past_key_values")  # what a network calls its cache; the first since transformers 5.24


class HostHistory:
    """Keeps what depends on earlier positions in extra layers of a cache of transformers, so that whatever is done to
    the cache (reordering, cropping, copying) is done to them, too.

    Args:
        cache: holds what earlier forwards have left; None: there is no cache, or not yet.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self._new: dict[str, Tensor] = {}

    def append(self, name: str, x_BT: Tensor) -> Tensor:
        """Take new positions (B, T, ...), for `keep`; return all so far (B, S, ...)."""
        self._new[name] = x_BT
        layer = self._layer(name)
        if layer is None:
            return x_BT
        before_BSX = layer.keys[:, 0]
        return torch.cat([before_BSX.reshape(*before_BSX.shape[:2], *x_BT.shape[2:]), x_BT], 1)

    def length(self, name: str) -> int:
        """Positions that the cache has (S)."""
        layer = self._layer(name)
        return 0 if layer is None else int(layer.get_seq_length())

    def keep(self) -> None:
        """Add the new positions to the cache."""
        from transformers.cache_utils import DynamicLayer

        for name, x_BT in self._new.items():
            layer = self._layer(name)
            if layer is None:
                layer = DynamicLayer()
                layer.pkmlm = name
                self.cache.layers.append(layer)
            x_B1TX = x_BT.reshape(len(x_BT), 1, x_BT.shape[1], -1)
            layer.update(x_B1TX, x_B1TX[..., :1])

    def _layer(self, name: str) -> Any:
        layers = () if self.cache is None else self.cache.layers
        return next((layer for layer in layers if getattr(layer, "pkmlm", None) == name), None)


class HostIds(NGramIds):
    """Finds what the n-gram memories need to know about the tokens that a network of transformers is called with.

    Attributes:
        past: what they need, while the network runs; otherwise None.
    """

    past: Past | None = None

    def watch(self, network: nn.Module) -> list[Callable[[], None]]:
        """Hook into every call of a network that maps ids to hidden states; return functions that remove the hooks."""
        hooks = (
            network.register_forward_pre_hook(self.begin, with_kwargs=True),
            network.register_forward_hook(self.end),
        )
        return [hook.remove for hook in hooks]

    def begin(self, network: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Take ids, mask and cache from what a network is called with: its forward pre-hook.

        Raises:
            UserError: there are no ids, the mask is not (B, S), or the cache is static or has unseen positions.
        """
        named = {**dict(zip(inspect.signature(network.forward).parameters, args, strict=False)), **options}
        ids_BT, mask = named.get("input_ids"), named.get("attention_mask")
        if ids_BT is None:
            raise UserError("input_ids is None (n-gram memories need tokens)", "give input_ids, not inputs_embeds")
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        if getattr(cache, "is_compileable", False):  # layers that grow would change its masks
            message = f"the cache is a static {type(cache).__name__} (expected one that grows)"
            raise UserError(message, "call generate without cache_implementation, or with use_cache=False")
        history = HostHistory(cache)
        seen, known = 0 if cache is None else int(cache.get_seq_length()), history.length("ids")
        if seen != known:
            message = f"the cache holds {seen} positions, of which the n-gram memory has seen {known}"
            raise UserError(message, "start with an empty cache")
        expected = (len(ids_BT), known + ids_BT.shape[1])
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != expected):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            message = f"attention_mask is {shape} (expected {expected}: n-gram memories take one that marks padding)"
            raise UserError(message)
        self.past = self(ids_BT, history, None, mask)

    def end(self, network: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Add to the cache what the next call needs: the network's forward hook."""
        assert self.past is not None
        history = self.past.cache
        assert isinstance(history, HostHistory)
        self.past = None
        if history.cache is None:  # the network has made one, or there is none
            parts = output.values() if isinstance(output, dict) else output
            history.cache = next((each for each in parts if hasattr(each, "get_seq_length")), None)
        if history.cache is not None:
            history.keep()
