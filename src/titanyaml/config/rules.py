"""Rules between keys: one table, evaluated as a whole.

A row is a function of the tree and the keys that it reads; it returns a Problem or None. Its hint lists ways out,
separated by " or "; each is what to type (or to install) and leads to a configuration that the rule accepts.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from titanyaml.config import (
    rules_async_tp,
    rules_compile,
    rules_context,
    rules_data,
    rules_expert,
    rules_loop,
    rules_measure,
    rules_mesh,
    rules_model,
    rules_moe,
    rules_pipeline,
    rules_plan,
    rules_quant,
    rules_recompute,
    rules_tensor,
)
from titanyaml.config.check import inspect
from titanyaml.config.trained import with_trained
from titanyaml.config.view import Rule, Unknown, View
from titanyaml.errors import Problem

RULES: tuple[Rule, ...] = (
    *rules_model.RULES, *rules_recompute.RULES, *rules_compile.RULES, *rules_moe.RULES, *rules_mesh.RULES,
    *rules_tensor.RULES, *rules_async_tp.RULES, *rules_context.RULES, *rules_expert.RULES, *rules_pipeline.RULES,
    *rules_quant.RULES, *rules_loop.RULES, *rules_measure.RULES, *rules_data.RULES, *rules_plan.RULES,
)


def check_rules(cfg: DictConfig | dict[str, Any]) -> list[Problem]:
    """Problems of every rule that the tree breaks.

    Args:
        cfg: a composed tree, or the resolved values of one (``check.Tree.values``).
    """
    view = View(with_trained(inspect(cfg).values if isinstance(cfg, DictConfig) else cfg))
    problems = []
    for rule in RULES:
        try:
            problem = rule.check(view)
        except Unknown:
            continue  # a key that the rule reads has a problem of its own
        if problem is not None:
            problems.append(problem)
    return problems
