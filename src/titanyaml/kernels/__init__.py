"""Operators of our own, one concept a file, each beside its reference in plain PyTorch."""
