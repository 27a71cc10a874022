"""A memory, measured, and what people see of it.

`counters` counts reads, `usage` computes KL and usage from the counts, `slots` and `slot_contexts` look into single
slots, `ngrams` into the rows of n-gram tables, `probe` puts other answers in a memory's place, `drift` watches
training, `background` counts for slot-wise fine-tuning. `usage_report` and `compare` read what runs keep, `equal` and
`dense_equivalent` compare it; `tables`, `plots` and `page` show it.
Training (validation, drift), sweeps and the commands use it; it may import evaluate/ and everything below.
"""
