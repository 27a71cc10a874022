"""From text to tokens to batches.

`sources` reads bytes, `text` finds the documents in them, `tokenizer` learns and encodes (with `sentencepiece_model`
and `byte_level_bpe` below it, and `canonical` for n-grams), `shards` writes a folder of tokens, `corpus`
describes and reads such folders, `overlap` looks for documents that the splits of one share, and `batches` draws
training sequences. `pkmlm tokenize` calls `shards`; training and evaluation call `corpus` and `batches`.
Imports errors, files, recipe and seeds only; tokenizers, errors and files only.
"""
