"""A memory, measured, and what people see of it.

`counters` counts reads, `usage` computes KL and usage from the counts, `slots` and `slot_contexts` look into single
slots, `probe` puts other answers in a memory's place, `drift` watches training, `usage_report` and `compare` read what
runs keep; `tables`, `plots` and `page` show it.
Training (validation, drift), sweeps and the commands use it; it may import evaluate/ and everything below.
"""
