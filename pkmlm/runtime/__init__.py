"""The machine: files, run directories, devices, seeds, signals, logs."""
