"""Models as folders for `transformers`: written and read back (folder, config), with a model card (card).

`attached` does the same for attachments to other models. The files *_pkmlm.py are copied into exported folders and
stand alone: they import nothing from pkmlm. Called by evaluate and usage reports (reading), `pkmlm export` and
attachment (writing); imports model, data, runs and below.
"""
