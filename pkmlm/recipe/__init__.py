"""What to train and how.

`schema.py` has every key with its type, range or choices, default and help, and writes recipes out; `nodes.py` reads
YAML and keeps the lines; `load.py` makes a recipe of files and overrides; `constraints.py` says what must hold between
keys and with the ranks, `warnings.py` what is valid but probably not meant; `shipped.py` finds the recipes that come
with the package.
All of pkmlm reads recipes; this folder imports `errors.py`, pydantic and PyYAML.
"""
