"""Sparsely read memories: product keys, flat keys, hash tables."""
