"""PEER: experts of one neuron, found by product keys."""
