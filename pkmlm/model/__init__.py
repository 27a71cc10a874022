"""The network: `transformer.build_model` makes it from a recipe. Training, evaluation, export and the estimate of costs
use it. It stands on kernels, device and distributed, and knows nothing of data or of runs.
"""
