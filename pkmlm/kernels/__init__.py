"""The hot loops: `reference` defines them, `ops` chooses an implementation and knows their gradients."""

# Heads and scores of a search at a time, by device. On a CPU 16 MB of scores may stay in the cache between product and
# search. A GPU wants few large calls (not measured): with 262,144 flat keys, 128 MB are the scores of 128 queries, and
# 16 MB would take eight times the launches.
HEADS = {"cpu": 1, "cuda": 1 << 30}
SCORES = {"cpu": 1 << 22, "cuda": 1 << 25}
