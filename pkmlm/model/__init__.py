"""The network: `transformer.build_model` builds it from a recipe.

Training, evaluation, export, benchmarks and the cost estimate use it. It may import memory, recipe, kernels, seeds,
device, distributed and errors, but nothing of data or runs.
"""
