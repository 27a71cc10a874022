"""The kinds of memories. A new kind is a folder and a line here."""

from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.peer.spec import PEERSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import Spec
from pkmlm.memory.token.spec import TokenSpec

SPECS: dict[str, type[Spec]] = {
    "product-key": ProductKeySpec,
    "flat-key": FlatKeySpec,
    "peer": PEERSpec,
    "hash": HashSpec,
    "ngram": NGramSpec,
    "token": TokenSpec,
}
