"""Hash tables in place of linear maps (MemoryFormer)."""
