"""pkmlm: language models whose capacity lies in a large, sparsely read memory."""

__version__ = "0.1.0"
