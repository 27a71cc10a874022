"""Sparsely read memories, and what they have in common: the library that people put into networks of their own.

A kind is a folder with a `spec.py` (its keys, without torch) and a `layer.py` (what it computes); `registry` lists the
kinds. `spec` and `base` say what the rest of pkmlm may ask of a memory, and nothing outside asks its kind. Memories
read rows of a `table` through a tap, on which usage is observed; `tokens` finds what they need to know of the tokens,
`init` draws weights, `row_adam` moves rows. This folder imports only kernels, distributed, errors and seeds.
"""
