"""N-gram tables: rows found by a hash of the last tokens (Engram)."""
