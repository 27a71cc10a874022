"""Models for `transformers`: writing them (folder.py, card.py), reading them back, and the code that goes with them."""
