"""The plugin pipeline: nodes of ``pipeline.plugins`` to ordered transforms, and a model to the transformed model."""

import dataclasses
import graphlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titanyaml.errors import PipelineError, Problem, ProblemsError
from titanyaml.pipeline.bind import BoundPlugin, bind, did_you_mean
from titanyaml.pipeline.protocol import STAGES, Change, Context, Transform, first_names


@dataclass(frozen=True)
class ResolvedPipeline:
    """(node name, transform) in order of application; nodes that are off, with the reason; the stage of each step."""

    steps: list[tuple[str, Transform]]
    off: dict[str, str] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.steps)


def resolve(nodes: Mapping[str, Mapping[str, Any]], ctx: Context) -> ResolvedPipeline:
    """Bind, filter, check and order the nodes; PipelineError with the problems of all of them."""
    problems: list[Problem] = []
    off: dict[str, str] = {}
    on: dict[str, BoundPlugin] = {}
    failed: set[str] = set()
    for name, node in nodes.items():
        if isinstance(node, Mapping) and node.get("_target_", "") is None:
            off[name] = "switched off (_target_: null)"
            continue
        bound, node_problems = bind(name, node)
        problems += node_problems
        if bound is None:
            failed.add(name)
        elif hasattr(bound.transform, "reason_off") and (reason := bound.transform.reason_off(ctx)):
            off[name] = str(reason)
        else:
            on[name] = bound
    # checks come last: a plugin may ask which others are on
    ctx = dataclasses.replace(ctx, active=tuple(on))
    for bound in on.values():
        problems += _check_relations(bound, on, off, failed)
        problems += bound.transform.check(ctx)
    ordered = _order(on, problems)
    if problems:
        raise PipelineError(problems)
    return ResolvedPipeline([(b.name, b.transform) for b in ordered], off, {b.name: b.stage for b in ordered})


def run(model: nn.Module, resolved: ResolvedPipeline, ctx: Context) -> tuple[nn.Module, list[tuple[str, Change]]]:
    """Apply the steps in order; PipelineError if one changed nothing, or changed the parameters' names or ties."""
    ctx = dataclasses.replace(ctx, active=resolved.active)
    changes: list[tuple[str, Change]] = []
    for name, transform in resolved.steps:
        before = _parameter_names(model)
        model, change = _apply(name, transform, model, ctx)
        after = _parameter_names(model)
        if resolved.stages[name] == "pp":  # the only stage that may lose parameters: they are on other ranks
            before = {parameter: first for parameter, first in before.items() if parameter in after}
        if damage := _damage(before, after):
            raise PipelineError(damage, key=_key(name))
        # later steps see the blocks that a pp plugin has left on this rank
        ctx = dataclasses.replace(ctx, facts=getattr(model, "facts", ctx.facts))
        ctx.log.debug("%s: %s", name, change.summary)  # runners show changes in their own way
        for line in change.left_alone():
            ctx.log.debug("%s: %s", name, line)
        changes.append((name, change))
    return model, changes


def verify(model: nn.Module, resolved: ResolvedPipeline, ctx: Context) -> list[tuple[str, Change]]:
    """Call the steps' ``verify``, once, after the first training step; PipelineError with all problems."""
    ctx = dataclasses.replace(ctx, active=resolved.active, facts=getattr(model, "facts", ctx.facts))
    problems: list[Problem] = []
    changes: list[tuple[str, Change]] = []
    for name, transform in resolved.steps:
        try:
            change = transform.verify(model, ctx) if hasattr(transform, "verify") else None
        except ProblemsError as error:
            problems += error.problems
            continue
        if change is not None:
            ctx.log.info("%s, after the first step: %s", name, change.summary)
            changes.append((name, change))
    if problems:
        raise PipelineError(problems)
    return changes


def after_step(model: nn.Module, resolved: ResolvedPipeline) -> None:
    """Call every step that has an ``after_step`` method."""
    for _, transform in resolved.steps:
        if hasattr(transform, "after_step"):
            transform.after_step(model)


def _key(name: str) -> str:
    return f"pipeline.plugins.{name}"


def _check_relations(
    bound: BoundPlugin, on: Mapping[str, BoundPlugin], off: Mapping[str, str], failed: set[str]
) -> list[Problem]:
    """Required nodes are on, conflicting nodes are off."""
    problems = []
    key = _key(bound.name)
    # a node that failed to bind counts as on: its own problem is reported, and this one would go with it
    for required in bound.requires:
        if required in off:
            state, hint = f"is off: {off[required]}", ""
        elif required not in on and required not in failed:
            state, hint = "is not in pipeline.plugins", did_you_mean(required, [*on, *failed])
        else:
            continue
        hint = hint or f"switch {required} on, or {bound.name} off"
        problems.append(Problem(key, f"needs the node {required!r}, which {state}", hint=hint))
    for rival in bound.conflicts:
        if rival in on:
            message = f"cannot work together with the node {rival!r}, and both are on"
            problems.append(Problem(key, message, hint=f"switch one of them off, e.g. ++{key}._target_=null"))
    return problems


def _order(on: Mapping[str, BoundPlugin], problems: list[Problem]) -> list[BoundPlugin]:
    """Sort by after/before; among the nodes that are free to run, the earliest stage first, then as written."""
    # names that are not on are ignored: after/before are wishes about neighbours, not requirements
    predecessors = {name: {before for before in bound.after if before in on} for name, bound in on.items()}
    for name, bound in on.items():
        for successor in bound.before:
            if successor in on:
                predecessors[successor].add(name)
    sorter = graphlib.TopologicalSorter(predecessors)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        message = f"after/before run in a circle: {' -> '.join(error.args[1])}"
        hint = "remove one of these _after_ or _before_ entries"
        problems.append(Problem("pipeline.plugins", message, hint=hint))
        return []
    # a heap, since static_order() would break ties by an order of its own
    position = {name: (STAGES.index(bound.stage), i) for i, (name, bound) in enumerate(on.items())}
    ready: list[tuple[tuple[int, int], str]] = []
    ordered: list[BoundPlugin] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (position[name], name))
        _, name = heapq.heappop(ready)
        ordered.append(on[name])
        sorter.done(name)
    return ordered


def _apply(name: str, transform: Transform, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
    """One step, with its result checked."""
    try:
        result: Any = transform.apply(model, ctx)  # a plugin of others may return anything
    except PipelineError:
        raise
    except Exception as error:
        error.add_note(f"while applying the plugin {name!r} ({type(transform).__qualname__})")
        raise
    key = _key(name)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Change)):
        raise PipelineError(f"apply() returned {type(result).__name__}, not (model, Change)", key=key)
    model, change = result
    if not isinstance(model, nn.Module):
        raise PipelineError(f"apply() returned {type(model).__name__} instead of the model", key=key)
    if not change.modules:  # nobody would notice a flag that is accepted without effect
        report = "; ".join([change.summary, *change.left_alone()])
        message = f"was asked for and changed nothing ({report})"
        raise PipelineError(message, key=key, hint=f"switch it off: ++{key}._target_=null")
    return model, change


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """Parameter name to the first name of the same parameter: a tied parameter has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _damage(before: dict[str, str], after: dict[str, str]) -> str:
    """What a step did to names and ties, in words; empty where nothing."""
    # checkpoints load under every set of plugins, and initial values depend on the name: both need names that stay;
    # a lost tie would train two matrices where the configuration says one
    lost, added = [n for n in before if n not in after], [n for n in after if n not in before]
    retied = [n for n in before if n in after and before[n] in after and after[n] != before[n]]
    ties = [f"{n} was {before[n]}, is {after[n]}" for n in retied]
    damages = {"lost": lost, "added": added, "changed what is tied:": ties}
    words = "; ".join(f"{damage} {first_names(names)}" for damage, names in damages.items() if names)
    return f"parameters must keep their names and ties, but the plugin {words}" if words else ""
