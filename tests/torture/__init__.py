"""What pkmlm must survive, tried many times: `make torture`, or `python -m tests.torture`."""
