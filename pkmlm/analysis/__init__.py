"""Measurements of memories, and the reports that show them.

`counters` counts reads, `measure_usage` those of a pass over a text, `usage` computes KL and usage from the counts,
`slots` and `slot_contexts` describe single slots, `ngrams` the rows of n-gram tables, `probe` puts other answers in a
memory's place, `drift` watches training, `background` counts reads for slot-wise fine-tuning. `usage_report` and
`compare` read what runs keep, `equal` and `dense_equivalent` compare runs; `tables`, `plots` and `page` show the
results.
Training (validation, drift), sweeps and the commands use this package; it may import evaluate/ and everything below.
"""
