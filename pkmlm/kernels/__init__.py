"""The hot loops: `reference` defines them, `ops` chooses an implementation and knows their gradients."""

SCORES = 1 << 22  # of a search at a time: 16 MB in fp32, which a cache may hold between product and search
