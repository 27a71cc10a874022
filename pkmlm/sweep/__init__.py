"""Grids of runs: every cell trained and measured, and a table beside the paper's numbers.

`run.py` tells the life of a sweep. It reads a grid (`grid.py`), makes its cells (`cells.py`), runs them by the commands
of `pkmlm`, and keeps what they measured (`measures.py`) in a folder as results (`results.py`), verdicts on the paper's
claims (`verdicts.py`) and plots (`plots.py`). `cli/sweep.py` alone calls it; it may import everything below the command
line.
"""
