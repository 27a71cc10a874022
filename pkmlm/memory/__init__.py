"""Sparsely read memories: memories with keys (`key_memory`), experts found by keys (`peer`), MemoryFormer's hash tables
(`hash_layer`), and tables of n-grams (`ngram`).

Each is a `base.SparseMemory`: it reads rows of its `values.Values` through a tap, on which usage is observed; `init`
draws weights, `row_adam` moves rows. The transformer builds memories; costs, the optimizer and the reports find them by
what `base` defines. This folder may import kernels, distributed and recipe. A new kind with keys takes a new file here,
a line in the transformer's table of kinds, and its name in the recipe's schema.
"""
