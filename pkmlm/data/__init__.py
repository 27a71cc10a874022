"""From text to tokens to batches.

`sources` reads bytes, `text` finds the documents in them, `tokenizer` learns and encodes (with `sentencepiece_model`
and `byte_level_bpe` below it, and `canonical` for n-grams), `shards` writes a folder of tokens or a part of one,
`join_parts` joins parts, `corpus` describes and reads such a folder, `overlap` looks for documents that its splits
share, and `batches` draws training sequences from it. `pkmlm tokenize` calls `shards` and `join_parts`; training and
evaluation call `corpus` and `batches`.
Imports errors, files, recipe and seeds only; tokenizers, errors and files only.
"""
