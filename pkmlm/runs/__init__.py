"""What a run keeps: directory.py knows the paths and pointers of a run; record.py what a checkpoint says of itself;
checkpoint.py reads and verifies checkpoints, saving.py writes them in the background; results.py knows the schemas of
all else.

Everything above calls this folder; it may import `errors`, `console`, `files`, `recipe`, `data`, `device` and
`distributed`.
"""
