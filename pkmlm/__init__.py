"""pkmlm: language models whose capacity lies in a large, sparsely read memory.

The names below are the public Python interface. Each is imported on first use, so that neither `import pkmlm` nor
`--help` imports torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for editors and type checkers; at run time, `__getattr__` imports
    from pkmlm.attach import attach as attach
    from pkmlm.attach import attach_dense as attach_dense
    from pkmlm.evaluate.load import load_run as load_run
    from pkmlm.measure.counters import UsageCounters as UsageCounters
    from pkmlm.memory.flat_key.layer import FlatKeyMemory as FlatKeyMemory
    from pkmlm.memory.hash.layer import HashLayer as HashLayer
    from pkmlm.memory.ngram.layer import NGramMemory as NGramMemory
    from pkmlm.memory.peer.layer import PEER as PEER
    from pkmlm.memory.product_key.layer import ProductKeyMemory as ProductKeyMemory
    from pkmlm.memory.row_adam import RowAdam as RowAdam
    from pkmlm.memory.token.layer import TokenMemory as TokenMemory
    from pkmlm.model.transformer import build_model as build_model
    from pkmlm.recipe.load import load_recipe as load_recipe

MODULES = {
    "FlatKeyMemory": "pkmlm.memory.flat_key.layer",
    "HashLayer": "pkmlm.memory.hash.layer",
    "NGramMemory": "pkmlm.memory.ngram.layer",
    "PEER": "pkmlm.memory.peer.layer",
    "ProductKeyMemory": "pkmlm.memory.product_key.layer",
    "RowAdam": "pkmlm.memory.row_adam",
    "TokenMemory": "pkmlm.memory.token.layer",
    "UsageCounters": "pkmlm.measure.counters",
    "attach": "pkmlm.attach",
    "attach_dense": "pkmlm.attach",
    "build_model": "pkmlm.model.transformer",
    "load_recipe": "pkmlm.recipe.load",
    "load_run": "pkmlm.evaluate.load",
}
__all__ = list(MODULES)


class _FrontDoor(ModuleType):
    """This package. Importing a file of `attach/` would set `pkmlm.attach` to that folder; it stays the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *MODULES]
