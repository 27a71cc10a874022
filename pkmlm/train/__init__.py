"""The training loop: steps, optimizers, checkpoints."""
