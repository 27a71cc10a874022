"""From text to tokens to batches.

`sources` reads bytes, `text` finds the documents in them, `tokenizer` learns and encodes, `shards` writes a folder of
tokens, `corpus` describes and reads it, `overlap` looks for documents that its splits share, and `batches` draws
training sequences from it. `pkmlm tokenize` calls `shards`; training and evaluation call `corpus` and `batches`.
Imports errors, recipe, seeds and runs only.
"""
