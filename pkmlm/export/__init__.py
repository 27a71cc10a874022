"""Models as folders for `transformers`: written and read back (folder, config), with a model card (card).

The files *_pkmlm.py are copied into exported folders and stand alone: they import nothing from pkmlm. Called by
evaluate and usage reports (reading) and `pkmlm export` (writing); imports model, data, runs and below.
"""
