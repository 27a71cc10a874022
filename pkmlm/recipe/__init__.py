"""Recipes: what to train and how.

`schema.py` has every key with its type, range or choices, default and help, and writes recipes out; `nodes.py` reads
YAML and keeps the lines; `load.py` builds a recipe from files and overrides; `constraints.py` checks what must hold
between keys and for the ranks, `warnings.py` what is valid but probably not meant; `shipped.py` finds the recipes that
come with the package.
All of pkmlm uses recipes; this folder imports only `errors.py`, `memory` (the kinds' specs), pydantic and PyYAML.
"""
