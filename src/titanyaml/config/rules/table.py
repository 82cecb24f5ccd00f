"""Rules between keys: one table, evaluated as a whole.

A row is a function of the tree and the keys that it reads; it returns a Problem or None. Its hint lists ways out,
separated by " or "; each is what to type (or to install) and leads to a configuration that the rule accepts.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from titanyaml.config.checkpoint_config import with_checkpoint_config
from titanyaml.config.rules import (
    activation_checkpointing,
    async_tp,
    compile,
    context_parallel,
    data,
    expert_parallel,
    measure,
    mesh,
    model,
    moe,
    pipeline_parallel,
    planning,
    quant,
    tensor_parallel,
    train,
)
from titanyaml.config.rules.view import Rule, Unknown, View
from titanyaml.config.tree_check import check_tree
from titanyaml.errors import Problem

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *activation_checkpointing.RULES,
    *compile.RULES,
    *moe.RULES,
    *mesh.RULES,
    *tensor_parallel.RULES,
    *async_tp.RULES,
    *context_parallel.RULES,
    *expert_parallel.RULES,
    *pipeline_parallel.RULES,
    *quant.RULES,
    *train.RULES,
    *measure.RULES,
    *data.RULES,
    *planning.RULES,
)


def check_rules(cfg: DictConfig | dict[str, Any]) -> list[Problem]:
    """Problems of every rule that the tree breaks.

    Args:
        cfg: a composed tree, or the resolved values of one (``check.Tree.values``).
    """
    view = View(with_checkpoint_config(check_tree(cfg).values if isinstance(cfg, DictConfig) else cfg))
    problems = []
    for rule in RULES:
        try:
            problem = rule.check(view)
        except Unknown:
            continue  # a key that the rule reads has a problem of its own
        if problem is not None:
            problems.append(problem)
    return problems
