"""Checkpoints that are whole or absent: written aside, checksummed, renamed, and only then is an old one deleted."""

from titanyaml.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
