"""Measure and use a trained model: load it (load), score it on text (documents: which text; perplexity) and on
zero-shot tasks (tasks: loaded with their rows; task_file: a user's own; lm_eval: the scores, computed with likelihood),
and generate text (generate). evaluation is what `pkmlm eval` does.

Called by measure, train (validation), sweep and the commands; imports nothing above export. documents and task_file
need no torch.
"""
