"""Rules that a plugin is on where the configuration needs what it does.

Without it nothing fails: all tp or pp ranks would silently do the same work, cp ranks would count the same tokens,
ep ranks would hold all experts, and data ranks would each train a model of their own.
"""

from typing import Any

from titanyaml.config.rules.hints import use_one_rank, with_resets
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.config.world import count_ranks, has_plugin_for, is_node_on, resolve_degree
from titanyaml.errors import Problem

rule = RuleTable()

#: node: (class that ships, what the ranks of its axis share).
_PLUGINS = {
    "tp": ("tp.TensorParallel", "are to share every matrix"),
    "cp": ("cp.ContextParallel", "are to share every sequence"),
    "pp": ("pp.PipelineParallel", "are to share the layers"),
    "ep": ("ep.ExpertParallel", "are to share out the experts"),
    "fsdp": ("fsdp.FullyShard", "share the data: nothing would sum their gradients"),
}


def _refuse_missing(node: str, ranks: int, fix: str) -> Problem:
    shipped, purpose = _PLUGINS[node]
    allowed = f"titanyaml.plugins.{shipped}, or a plugin of yours in its place"
    return problem(f"pipeline.plugins.{node}", f"is off, but {ranks} ranks {purpose}", allowed, fix)


def _add_axis_rule(axis: str) -> None:
    def check(c: Any) -> Problem | None:
        ranks = resolve_degree(c, axis)
        if ranks is None or ranks < 2 or has_plugin_for(c, axis):
            return None
        return _refuse_missing(axis, ranks, f"parallel.{axis}=1")

    check.__name__ = f"{axis}_needs_its_plugin"
    rule("parallel", "launch", "pipeline.plugins")(check)


for _axis in ("tp", "cp", "pp", "ep"):
    _add_axis_rule(_axis)


@rule("parallel", "launch", "pipeline.plugins")
def data_ranks_need_fsdp_plugin(c: Any) -> Problem | None:
    # ranks of one tp or pp group work on the same sequences
    ranks = (count_ranks(c) or 1) // max((resolve_degree(c, "tp") or 1) * (resolve_degree(c, "pp") or 1), 1)
    return None if ranks <= 1 or has_plugin_for(c, "fsdp") else _refuse_missing("fsdp", ranks, use_one_rank(c))


@rule("compile.async_tp", "pipeline.plugins")
def async_tp_needs_its_plugin(c: Any) -> Problem | None:
    if not c.compile.async_tp or is_node_on(c, "async_tp"):
        return None
    return refuse_missing_async_tp(with_resets(c, "compile.async_tp=false", async_tp=False))


def refuse_missing_async_tp(*fixes: str) -> Problem:
    """The problem of ``compile.async_tp`` without the node that does it."""
    allowed = "titanyaml.plugins.async_tp.AsyncTensorParallel where compile.async_tp is true"
    return problem("pipeline.plugins.async_tp", "is off, but compile.async_tp is true", allowed, *fixes)
