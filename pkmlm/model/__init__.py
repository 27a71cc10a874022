"""The network: a decoder-only transformer and its memories."""
