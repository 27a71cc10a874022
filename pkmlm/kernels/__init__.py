"""The hot loops: reading, searching, summing and updating the rows of large tables, and matrix products.

`reference` defines every kernel in plain torch; `cpu` (numba) and `cuda` (Triton) are the fast ones, and `backend`
chooses between them. The model calls `ops`, which adds the gradients, and `matmul`. The optimizer of tables calls the
kernels on a `row_gradient`. From the rest of pkmlm, only `errors` is imported here.
"""
