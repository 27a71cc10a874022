"""The hot loops: `reference` defines them, `ops` chooses an implementation and knows their gradients."""

# Heads and scores of a search at a time, by device. A CPU's cache may hold 16 MB in fp32 between product and search. A
# GPU wants few large calls (not measured): 128 MB are 128 queries of 262,144 flat keys; 16 would take eight times the
# launches.
HEADS = {"cpu": 1, "cuda": 1 << 30}
SCORES = {"cpu": 1 << 22, "cuda": 1 << 25}
