"""From the nodes of ``pipeline.plugins`` to checked, ordered transforms, and from a model to the transformed model.

``resolve`` looks at everything and changes nothing; ``run`` applies; ``verify`` asks, after the first step, what only
then can be known. Every step reports what it did, and a step that did nothing is an error: a flag that is accepted
and has no effect is the one failure nobody notices.
"""

from __future__ import annotations

import dataclasses
import graphlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from titanyaml.errors import PipelineError, Problem, ProblemsError
from titanyaml.pipeline.bind import Bound, bind, did_you_mean
from titanyaml.pipeline.protocol import STAGES, Change, Context, Transform, some


@dataclass(frozen=True)
class Resolved:
    """The ordered pipeline.

    Args:
        steps: (node name, transform) in the order in which they are applied.
        off: node name to the reason why it is not among the steps.
        stages: node name to its stage, for every step.
    """

    steps: list[tuple[str, Transform]]
    off: dict[str, str] = field(default_factory=dict)
    stages: dict[str, str] = field(default_factory=dict)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the nodes that are on, in order."""
        return tuple(name for name, _ in self.steps)


def resolve(nodes: Mapping[str, Mapping[str, Any]], ctx: Context) -> Resolved:
    """Bind, filter, check and order the nodes.

    Args:
        nodes: node name to plugin node (plain dicts), in the order of the configuration.
        ctx: the context; ``active`` is filled in here.

    Raises:
        PipelineError: all problems of all nodes at once.
    """
    problems: list[Problem] = []
    off: dict[str, str] = {}
    on: dict[str, Bound] = {}
    failed: set[str] = set()
    for name, node in nodes.items():
        if isinstance(node, Mapping) and node.get("_target_", "") is None:
            off[name] = "switched off (_target_: null)"
            continue
        bound, found = bind(name, node)
        problems += found
        if bound is None:
            failed.add(name)
        elif reason := _reason_off(bound.transform, ctx):
            off[name] = reason
        else:
            on[name] = bound
    ctx = dataclasses.replace(ctx, active=tuple(on))
    for bound in on.values():
        problems += _check_partners(bound, on, off, failed)
        problems += bound.transform.check(ctx)
    ordered = _order(on, problems)
    if problems:
        raise PipelineError(problems)
    return Resolved([(b.name, b.transform) for b in ordered], off, {b.name: b.stage for b in ordered})


def run(model: nn.Module, resolved: Resolved, ctx: Context) -> tuple[nn.Module, list[tuple[str, Change]]]:
    """Apply the steps in order. Each change is logged for debugging; runners show them in their own way.

    Raises:
        PipelineError: a step changed nothing, renamed, added or lost parameters, or untied tied weights. Only a
            step of the stage pp may lose some, to other ranks; the steps after it are told the facts of what is left.
    """
    ctx = dataclasses.replace(ctx, active=resolved.active)
    changes: list[tuple[str, Change]] = []
    for name, transform in resolved.steps:
        before = _identities(model)
        model, change = _apply(name, transform, model, ctx)
        after = _identities(model)
        if resolved.stages[name] == "pp":
            before = {parameter: first for parameter, first in before.items() if parameter in after}
        if damage := _damage(before, after):
            raise PipelineError(damage, key=_key(name))
        ctx = dataclasses.replace(ctx, facts=getattr(model, "facts", ctx.facts))
        ctx.log.debug("%s: %s", name, change.summary)
        for line in change.left_alone():
            ctx.log.debug("%s: %s", name, line)
        changes.append((name, change))
    return model, changes


def verify(model: nn.Module, resolved: Resolved, ctx: Context) -> list[tuple[str, Change]]:
    """Ask every step that has a ``verify`` method; to be called once, after the first step.

    Raises:
        PipelineError: what the steps found, all of it.
    """
    ctx = dataclasses.replace(ctx, active=resolved.active, facts=getattr(model, "facts", ctx.facts))
    problems: list[Problem] = []
    changes: list[tuple[str, Change]] = []
    for name, transform in resolved.steps:
        if not hasattr(transform, "verify"):
            continue
        try:
            change = transform.verify(model, ctx)
        except ProblemsError as error:
            problems += error.problems
            continue
        if change is not None:
            ctx.log.info("%s, after the first step: %s", name, change.summary)
            changes.append((name, change))
    if problems:
        raise PipelineError(problems)
    return changes


def after_step(model: nn.Module, resolved: Resolved) -> None:
    """Tell every step that has an ``after_step`` method that the weights were updated."""
    for _, transform in resolved.steps:
        if hasattr(transform, "after_step"):
            transform.after_step(model)


def _key(name: str) -> str:
    return f"pipeline.plugins.{name}"


def _reason_off(transform: Transform, ctx: Context) -> str:
    return transform.reason_off(ctx) if hasattr(transform, "reason_off") else ""


def _check_partners(bound: Bound, on: Mapping[str, Bound], off: Mapping[str, str], failed: set[str]) -> list[Problem]:
    """Nodes that must be on are on, and nodes that must be off are off. A node that failed to bind counts as on."""
    problems = []
    for other in bound.requires:
        if other in on or other in failed:
            continue
        state = f"is off: {off[other]}" if other in off else "is not in pipeline.plugins"
        meant = did_you_mean(other, [*on, *failed]) if other not in off else ""
        problems.append(
            Problem(
                _key(bound.name),
                f"needs the node {other!r}, which {state}",
                hint=meant or f"switch {other} on, or {bound.name} off",
            )
        )
    for other in bound.conflicts:
        if other in on:
            problems.append(
                Problem(
                    _key(bound.name),
                    f"cannot work together with the node {other!r}, and both are on",
                    hint=f"switch one of them off, e.g. ++{_key(bound.name)}._target_=null",
                )
            )
    return problems


def _order(on: Mapping[str, Bound], problems: list[Problem]) -> list[Bound]:
    """Sort by after/before; among nodes that are free to run, the earliest stage first, then as written.

    Names in after/before that are not on are ignored: they are wishes about neighbours, not requirements.
    """
    predecessors: dict[str, set[str]] = {name: set() for name in on}
    for name, bound in on.items():
        predecessors[name] |= {other for other in bound.after if other in on}
        for other in bound.before:
            if other in on:
                predecessors[other].add(name)
    sorter = graphlib.TopologicalSorter(predecessors)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(error.args[1])
        problems.append(
            Problem(
                "pipeline.plugins",
                f"after/before run in a circle: {cycle}",
                hint="remove one of these _after_ or _before_ entries",
            )
        )
        return []
    position = {name: (STAGES.index(bound.stage), i) for i, (name, bound) in enumerate(on.items())}
    ready: list[tuple[tuple[int, int], str]] = []
    ordered: list[Bound] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (position[name], name))
        _, name = heapq.heappop(ready)
        ordered.append(on[name])
        sorter.done(name)
    return ordered


def _apply(name: str, transform: Transform, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
    """One step, with its result checked; whatever it raises says which node it came from."""
    try:
        result = transform.apply(model, ctx)
    except PipelineError:
        raise
    except Exception as error:
        error.add_note(f"while applying the plugin {name!r} ({type(transform).__qualname__})")
        raise
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Change)):
        raise PipelineError(f"apply() returned {type(result).__name__}, not (model, Change)", key=_key(name))
    model, change = result
    if not isinstance(model, nn.Module):
        raise PipelineError(f"apply() returned {type(model).__name__} instead of the model", key=_key(name))
    if not change.modules:
        raise PipelineError(
            f"was asked for and changed nothing ({'; '.join([change.summary, *change.left_alone()])})",
            key=_key(name),
            hint=f"switch it off: ++{_key(name)}._target_=null",
        )
    return model, change


def _identities(model: nn.Module) -> dict[str, str]:
    """Parameter name to the first name under which the same parameter is found: names and ties in one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _damage(before: dict[str, str], after: dict[str, str]) -> str:
    """What a step did to names and ties, in words; empty where nothing.

    Names are the contract with checkpoints (which must load under every other set of plugins) and with the
    initialisation; a tie that is lost trains two matrices where the configuration says one.
    """
    lost, added = [n for n in before if n not in after], [n for n in after if n not in before]
    retied = [n for n in before if n in after and before[n] in after and after[n] != before[n]]
    parts = []
    if lost:
        parts.append(f"lost {some(lost)}")
    if added:
        parts.append(f"added {some(added)}")
    if retied:
        parts.append(f"changed what is tied: {some([f'{n} was {before[n]}, is {after[n]}' for n in retied])}")
    return f"parameters must keep their names and ties, but the plugin {'; '.join(parts)}" if parts else ""
