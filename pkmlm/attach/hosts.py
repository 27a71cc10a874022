"""What there is in a model of `transformers`: its config and tokenizer, its blocks and their FFNs."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.runs.directory import tokenizer_file

FFNS = ("mlp", "feed_forward", "ffn", "parts.ffn")  # what a block may call its FFN; the last is for our exports


def text_config(model: nn.Module) -> Any:
    """The config of a model of transformers; if it reads more than text, that of its language model.

    Raises:
        UserError: the model has no config, or the config has no width.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(config, "hidden_size"):
        raise UserError(f"{type(model).__name__} has no config with a hidden_size", "give a model of transformers")
    return config


def vocabulary_of(model: Any) -> int:
    """Rows of the embedding of a model of transformers."""
    return int(model.get_input_embeddings().num_embeddings)


def find_tokenizer(model: nn.Module, given: str | Path | None) -> Tokenizer:
    """The tokenizer in a file or folder; None: in the model's folder.

    Raises:
        UserError: there is none, or its kind is not supported.
    """
    if not isinstance(given, str | Path | None):
        message = f"tokenizer has type {type(given).__name__} (expected the file or folder of the model's tokenizer)"
        raise UserError(message, "save it, and give the folder: tokenizer.save_pretrained(DIR)")
    name = str(given or getattr(model.config, "_name_or_path", ""))
    file = tokenizer_file(Path(name)) if Path(name).is_dir() else Path(name)
    if given is None and not (name and file.is_file()):
        message = f"canonical ids need the model's tokenizer, but the model's folder {name!r} has none"
        raise UserError(message, 'give its folder: attach(..., tokenizer=DIR); or set "canonical": False')
    return Tokenizer.load(Path(name))


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a causal model of transformers: its only list with as many modules as its config has hidden layers.

    Raises:
        UserError: it has no config, or none or several such lists.
    """
    config = text_config(model)
    count = getattr(config, "num_hidden_layers", None)
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    fit = {name: each for name, each in lists.items() if len(each) == count}
    fit = {name: each for name, each in fit.items() if not any(name.startswith(f"{other}.") for other in fit)}
    if len(fit) != 1:
        found = ", ".join(f"{name} of {len(each)}" for name, each in list((fit or lists).items())[:8]) or "no list"
        expected = f"expected just one of {count} modules, its config's num_hidden_layers"
        raise UserError(f"{type(model).__name__}: found lists of modules {found} ({expected})")
    return next(iter(fit.values()))


def block_owner(model: nn.Module) -> nn.Module:
    """The module of a causal model that directly contains its list of blocks."""
    blocks = find_blocks(model)
    return next(each for each in model.modules() if blocks in list(each.children()))


def choose_blocks(model: nn.Module, layers: object) -> list[int]:
    """The numbers of the chosen blocks, in order.

    Args:
        layers: as the user gave them, counted from 1.

    Raises:
        UserError: this is not a list of different blocks of the model.
    """
    blocks = len(find_blocks(model))
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else []
    if not given or not all(type(layer) is int and 1 <= layer <= blocks for layer in given):
        raise UserError(f"layers is {layers!r} (expected a list of blocks, numbered from 1 to {blocks})")
    if len(set(given)) < len(given):
        raise UserError(f"layers is {given} (expected each block once)")
    return sorted(given)


def find_ffn(block: nn.Module, layer: int, dim: int, mode: str) -> nn.Module:
    """The FFN of a block, tested with one token.

    Args:
        mode: "replace" needs an FFN that takes one tensor; beside another, it may also add the residual, which it takes
            as a second one.

    Raises:
        UserError: the block has no FFN or several, or its FFN does not map (B, T, D) to (B, T, D).
    """
    found: dict[str, nn.Module] = {}
    for name in FFNS:
        with suppress(AttributeError):
            found[name] = block.get_submodule(name)
    if len(found) != 1:
        parts = ", ".join(found or dict(block.named_children()))
        message = f"block {layer}, a {type(block).__name__}, has {parts} (expected one of {', '.join(FFNS)})"
        raise UserError(message, "attach a memory that needs no FFN: ngram or token; or use a model such as Llama")
    (name, ffn), weight = next(iter(found.items())), next(filter(torch.is_floating_point, block.parameters()))
    inputs = [each for each in signature(ffn.forward).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    more = [each.name for each in inputs[1:] if each.default is each.empty]
    if mode == "replace" and more:
        message = f"block {layer}: its {name} also takes {' and '.join(more)} (expected one tensor of width {dim})"
        raise UserError(message, "attach beside the FFN: mode='add'")
    token = torch.zeros(1, 1, dim, dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad(), torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            out = ffn(token, *(token for _ in more))
    except (TypeError, RuntimeError) as error:
        raise UserError(f"block {layer}: its {name} does not take tensors of width {dim}: {error}") from None
    if not isinstance(out, Tensor) or out.shape != token.shape:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"block {layer}: its {name} maps (1, 1, {dim}) to {shape} (expected the same shape)")
    return ffn


def override(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Give one module a method of its own; return a function that takes it away again."""
    undo = partial(_put_back, module, name, vars(module).get(name))
    setattr(module, name, method)
    return undo


def _put_back(module: nn.Module, name: str, own: Callable[..., Any] | None) -> None:
    if own is None:  # that of its class
        delattr(module, name)
    else:
        setattr(module, name, own)
