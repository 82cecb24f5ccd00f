"""Optimizers and learning-rate schedules."""

from titanyaml.optim.adamw import AdamW as AdamW
from titanyaml.optim.adamw import Optimizer as Optimizer
from titanyaml.optim.adamw import build as build
