"""Sparsely read memories, used by the transformer: memories with keys (`key_memory`), MemoryFormer's hash tables
(`hash_layer`). Each is a `base.SparseMemory` that reads rows of `values.Values` through a `usage_tap`. A new kind is a
new file here and a line in the transformer's table of kinds.
"""
