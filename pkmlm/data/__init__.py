"""From text to tokens to batches.

`sources` reads bytes, `text` finds the documents in them, `tokenizer` learns and encodes, `shards` writes the folder of
tokens that `index` describes, `corpus` reads it, `warnings` looks for documents that its splits share, and `batches`
draws training sequences from it. `pkmlm tokenize` calls `shards`; training and evaluation call `corpus` and `batches`.
Imports errors, recipe, seeds and runs only.
"""
