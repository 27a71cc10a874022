"""The network: `transformer.build_model` makes it from a recipe.

Training, evaluation, analysis, export, benchmarks and the estimate of costs use it. It may import recipe, kernels,
seeds, device, distributed and errors, and knows nothing of data or of runs.
"""
