"""Rules between keys: one table, evaluated as a whole.

A rule is a function of the configuration that returns a Problem or None. The problem's hint lists fixes separated by
" or ": each is what to type (or to install) for a configuration that the rule accepts.

A constraint that a plugin repeats, because it can be built without this table, is a function ``check_...`` of plain
values beside its rule; the plugin calls it with values of its own.
"""

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
    fsdp,
    measure,
    mesh,
    model,
    moe,
    optim,
    pipeline_parallel,
    planning,
    quant,
    required_plugins,
    tensor_parallel,
    train,
)
from titanyaml.config.rules.view import Rule, Unknown, View
from titanyaml.config.tree_check import check_tree
from titanyaml.errors import Problem

# problems are reported in this order: what the model is, how it is split, how it is trained and measured
_MODEL = (model, activation_checkpointing, compile, moe)
_PARALLEL = (
    mesh,
    required_plugins,
    fsdp,
    tensor_parallel,
    async_tp,
    context_parallel,
    expert_parallel,
    pipeline_parallel,
)
_RUN = (quant, optim, train, measure, data, planning)
RULES: tuple[Rule, ...] = tuple(rule for topic in (*_MODEL, *_PARALLEL, *_RUN) for rule in topic.rule)


def check_rules(cfg: DictConfig | dict[str, Any]) -> list[Problem]:
    """The problem of every rule that is broken.

    Args:
        cfg: a composed tree, or the resolved values of one (``CheckedTree.values``).
    """
    view = View(with_checkpoint_config(check_tree(cfg).values if isinstance(cfg, DictConfig) else cfg))
    problems = []
    for rule in RULES:
        try:
            problem = rule.check(view)
        except Unknown:
            continue  # a key that the rule reads has a problem of its own
        if problem:
            problems.append(problem)
    return problems
