"""A memory, in numbers.

`counters` counts reads, `measure_usage` those of a pass over a text, `usage` computes KL and usage from the counts,
`slots` and `slot_contexts` describe single slots, `ngrams` the rows of n-gram tables, `probe` puts other answers in a
memory's place, `drift` watches training, `background` counts reads for slot-wise fine-tuning.
Reports, training (validation, drift) and the commands use this folder; it may import evaluate/ and what is below.
"""
