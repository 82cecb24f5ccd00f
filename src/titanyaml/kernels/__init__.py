"""Operators of our own, one concept a file."""
