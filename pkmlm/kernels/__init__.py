"""The hot loops. `reference` defines every kernel in plain torch, `cpu` (numba) and `cuda` (Triton) are fast, `backend`
chooses between them. The model calls `ops`, which knows the gradients, and `matmul`; the optimizer of tables calls the
kernels on a `row_gradient`. Nothing here imports more of pkmlm than its errors.
"""
