"""Grids of runs: every cell is trained and measured, and the results are shown beside the paper's numbers.

`run.py` runs a sweep. It reads a grid (`grid.py`), makes its cells (`cells.py`), runs them with the commands of
`pkmlm`, and keeps what they measured in a folder as results (`results.py`), verdicts on the paper's claims
(`verdicts.py`) and plots (`plots.py`). Only `cli/sweep.py` calls it; it may import everything below the command line.
"""
