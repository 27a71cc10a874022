"""Models as folders for `transformers`: written and read back (folder, config), with a model card (card).

`attached` does the same for what is attached to a model of others. The files *_pkmlm.py travel with exported models and
stand alone: they import nothing of pkmlm. Called by evaluate and usage reports (reading), `pkmlm export` and attachment
(writing); imports model, data, runs and below.
"""
