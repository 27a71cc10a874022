"""Models as folders for `transformers`: written and read back (folder, config), with their code (bundle) and a card.

The files *_pkmlm.py are written for `transformers`; with all of pkmlm that they import, they are copied into exported
folders, where they need nothing else of it. Called by evaluate and usage reports (reading) and `pkmlm export`
(writing); imports model, data, runs and below.
"""
