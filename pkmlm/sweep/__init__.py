"""Grids of runs: every cell trained and measured, and the table that comes of it beside the paper's."""
