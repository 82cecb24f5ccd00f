"""One node of ``pipeline.plugins`` to one transform: the class found, its arguments checked, the object built."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titanyaml.config import build
from titanyaml.config.nearest import nearest
from titanyaml.errors import Problem, ProblemsError, TitanError
from titanyaml.pipeline.protocol import STAGES, Transform

#: Reserved keys of a node; all others are constructor arguments.
RESERVED = ("_target_", *build.RESERVED)


@dataclass(frozen=True)
class Bound:
    """A node that is ready to be ordered: names of partners are the class's own and the node's together."""

    name: str
    transform: Transform
    stage: str
    after: tuple[str, ...]
    before: tuple[str, ...]
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]


def bind(name: str, node: Any) -> tuple[Bound | None, list[Problem]]:
    """Build the transform of a node.

    Returns:
        The bound node and no problems, or None and all that is wrong with the node.
    """
    key = f"pipeline.plugins.{name}"
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        return None, [Problem(key, f"not a plugin node: {node!r}", allowed="a mapping with _target_: a class's path")]
    problems = _check_reserved(key, node)
    try:
        cls = build.locate(node["_target_"])
    except Exception as error:  # noqa: BLE001 - importing the plugin's module runs its code, which may raise anything
        hint = "check the spelling, and that the package is installed in this environment"
        return None, [*problems, Problem(f"{key}._target_", _words(error), hint=hint)]
    problems += _check_class(key, node, cls) + _check_arguments(key, node, cls)
    if problems:
        return None, problems
    try:
        transform = build.instantiate(dict(node))
    except Exception as error:  # noqa: BLE001 - a constructor may refuse its arguments with any exception
        return None, [Problem(key, f"{cls.__qualname__} refused its arguments: {_words(error)}")]
    return _bound(name, node, transform), []


def _bound(name: str, node: Mapping[str, Any], transform: Transform) -> Bound:
    def both(kind: str) -> tuple[str, ...]:  # of the class: an instance may use such a name for something else
        return tuple(dict.fromkeys([*(getattr(type(transform), kind, None) or ()), *(node.get(f"_{kind}_") or ())]))

    stage = node.get("_stage_") or transform.stage
    return Bound(name, transform, stage, both("after"), both("before"), both("requires"), both("conflicts"))


def _check_reserved(key: str, node: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name, value in node.items():
        if not (isinstance(name, str) and name.startswith("_")):
            continue
        if name not in RESERVED:
            problems.append(
                Problem(
                    f"{key}.{name}",
                    "not a reserved key of a plugin node",
                    allowed=", ".join(RESERVED),
                    hint=did_you_mean(name, RESERVED),
                )
            )
        elif name in RESERVED[2:] and not _is_names(value):
            problems.append(Problem(f"{key}.{name}", f"is {value!r}", allowed="a list of node names"))
    return problems


def _check_class(key: str, node: Mapping[str, Any], cls: Any) -> list[Problem]:
    """The class keeps the protocol, and its stage, or the one given in its place, exists."""
    problems = []
    if missing := [method for method in ("check", "apply") if not callable(getattr(cls, method, None))]:
        what = f"{node['_target_']} is no plugin: it has no {' and no '.join(missing)}"
        problems.append(Problem(f"{key}._target_", what, allowed="a class with check(ctx) and apply(model, ctx)"))
    own = node.get("_stage_")
    stage = own or getattr(cls, "stage", None)
    if stage not in STAGES:
        where = f"{key}._stage_" if own else f"{key}._target_"
        what = f"no such stage: {stage!r}" if stage else f"{node['_target_']} names no stage"
        problems.append(Problem(where, what, allowed=", ".join(STAGES), hint=did_you_mean(str(stage), STAGES)))
    for kind in ("after", "before", "requires", "conflicts"):
        if not _is_names(getattr(cls, kind, ())):
            problems.append(
                Problem(
                    f"{key}._target_",
                    f"{node['_target_']}.{kind} is {getattr(cls, kind)!r}",
                    allowed="a list of node names",
                )
            )
    return problems


def _check_arguments(key: str, node: Mapping[str, Any], cls: Any) -> list[Problem]:
    """Unknown and missing constructor arguments, by name, without calling the constructor."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # not callable, or a signature that Python cannot tell: the call itself will say
        return []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = [name for name in node if not str(name).startswith("_")]
    problems = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        allowed = [p.name for p in named]
        problems += [
            Problem(
                f"{key}.{name}",
                f"{cls.__qualname__} has no argument {name!r}",
                allowed=", ".join(allowed) or "no arguments",
                hint=did_you_mean(name, allowed),
            )
            for name in given
            if name not in allowed
        ]
    problems += [
        Problem(f"{key}.{p.name}", f"{cls.__qualname__} needs the argument {p.name!r}", hint=f"++{key}.{p.name}=...")
        for p in named
        if p.default is p.empty and p.name not in given
    ]
    return problems


def _is_names(value: Any) -> bool:
    """A list of strings; None stands for an empty one. A bare string would be read letter by letter."""
    return value is None or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint that offers the most similar of the names; empty where none is similar."""
    near = nearest(name, names)
    return f"did you mean {near[0]!r}?" if near else ""


def _words(error: Exception) -> str:
    """An exception in one line; our own errors by their message."""
    if isinstance(error, ProblemsError):
        return "; ".join(problem.message for problem in error.problems)
    return error.message if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"
