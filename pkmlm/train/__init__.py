"""Training: the life of a run (run), its loop and its step (loop and step, on one state), and what these need.

`pkmlm train` calls `job.open_job`, then `run.train` or `dry_run.dry_run`; benchmarks call `step.train_step`.
Imports all folders but attach, bench, sweep and cli: validation measures a model as evaluate and measure do.
"""
