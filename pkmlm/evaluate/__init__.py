"""A trained model, measured and used: loaded (load), scored on text (documents, perplexity) and on tasks (lm_eval, with
likelihood and adapter below it), and made to write (generate). evaluation is `pkmlm eval` as a whole.

Called by analysis, train (validation), sweep and the commands; imports nothing above export. text_choice and tasks need
no torch.
"""
