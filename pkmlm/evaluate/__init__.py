"""A trained run, measured: perplexity, usage, generated text."""
