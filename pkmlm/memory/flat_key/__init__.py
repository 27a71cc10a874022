"""Flat keys: every slot has a key of its own."""
