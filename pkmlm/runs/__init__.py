"""What a run keeps: its directory, results and checkpoints, and how files are written so that none is half-written.

files.py changes files, checks them against manifests, and locks a folder; results.py knows the names and schemas of all
results, directory.py the paths and pointers of a run; checkpoint.py writes, verifies and reads checkpoints.
Everything above calls this folder; it may import `errors`, `console`, `recipe`, `device` and `distributed`.
"""
