"""Models as folders for `transformers`: written and read back (folder, config), with a model card (card).

The files *_pkmlm.py travel with exported models and stand alone: they import nothing of pkmlm, and nothing of pkmlm
imports them. Called by evaluate/load (reading) and `pkmlm export` (writing); imports model, data, runs and below.
"""
