"""Product keys: two sets of sub-keys find the best of their pairs."""
