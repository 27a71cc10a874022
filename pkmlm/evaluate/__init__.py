"""A trained model, measured and used: loaded (load; attached: a model of others, with a memory), scored on text
(documents: which text; perplexity), on zero-shot tasks (tasks: definitions; task_file: those of a user; task_rows:
their rows; lm_eval: the scores, with likelihood below it), and made to write (generate). evaluation is `pkmlm eval` as
a whole.

Called by analysis, train (validation), sweep and the commands; imports nothing above export. documents and task_file
need no torch.
"""
