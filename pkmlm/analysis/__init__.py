"""A memory, measured: which slots are read, what they hold, runs side by side, and the tables, plots and page of it."""
