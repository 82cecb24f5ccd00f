"""One node of ``pipeline.plugins`` to one transform: find the class, check its arguments, build the object."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titanyaml.config import instantiate
from titanyaml.config.plugin_nodes import check_reserved_keys
from titanyaml.config.schema_keys import nearest
from titanyaml.config.targets import check_arguments
from titanyaml.errors import Problem, ProblemsError, TitanError
from titanyaml.pipeline.protocol import STAGES, Transform

#: Class attributes of a plugin that name other nodes; a node adds to them by ``_after_`` and so on.
RELATIONS = ("after", "before", "requires", "conflicts")


@dataclass(frozen=True)
class BoundPlugin:
    """A transform ready to be ordered. Its relations are the class's own and the node's together."""

    name: str
    transform: Transform
    stage: str
    after: tuple[str, ...]
    before: tuple[str, ...]
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]


def bind(name: str, node: Any) -> tuple[BoundPlugin | None, list[Problem]]:
    """The transform of a node and no problems, or None and all problems of the node."""
    key = f"pipeline.plugins.{name}"
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        return None, [Problem(key, f"not a plugin node: {node!r}", allowed="a mapping with _target_: a class's path")]
    problems = check_reserved_keys(dict(node), key)
    try:
        cls = instantiate.locate(node["_target_"])  # no registry: a plugin of others is a path like ours
    except Exception as error:  # noqa: BLE001 - importing the plugin's module runs its code, which may raise anything
        hint = "check the spelling, and that the package is installed in this environment"
        return None, [*problems, Problem(f"{key}._target_", _words(error), hint=hint)]
    # before ranks start config.targets asks the same of the source text, and is silent where that is no proof; the
    # class itself has the last word
    problems += _check_class(key, node, cls) + _check_arguments(key, node, cls)
    if problems:
        return None, problems
    try:
        transform = instantiate.instantiate(dict(node))
    except Exception as error:  # noqa: BLE001 - a constructor may refuse its arguments with any exception
        return None, [Problem(key, f"{cls.__qualname__} refused its arguments: {_words(error)}")]
    # relations of the class, not of the object: an object may use such a name for something else
    relations = {
        relation: tuple(dict.fromkeys([*(getattr(cls, relation, None) or ()), *(node.get(f"_{relation}_") or ())]))
        for relation in RELATIONS
    }
    return BoundPlugin(name, transform, node.get("_stage_") or transform.stage, **relations), []


def _check_class(key: str, node: Mapping[str, Any], cls: Any) -> list[Problem]:
    """The class follows the protocol, and its stage, or the node's, exists."""
    problems = []
    target, target_key = node["_target_"], f"{key}._target_"
    if missing := [method for method in ("check", "apply") if not callable(getattr(cls, method, None))]:
        message = f"{target} is no plugin: it has no {' and no '.join(missing)}"
        problems.append(Problem(target_key, message, allowed="a class with check(ctx) and apply(model, ctx)"))
    node_stage = node.get("_stage_")
    stage = node_stage or getattr(cls, "stage", None)
    if stage not in STAGES:
        message = f"no such stage: {stage!r}" if stage else f"{target} names no stage"
        stage_key = f"{key}._stage_" if node_stage else target_key
        problems.append(Problem(stage_key, message, ", ".join(STAGES), did_you_mean(str(stage), STAGES)))
    for relation in RELATIONS:
        names = getattr(cls, relation, None) or ()
        # a bare string would be read letter by letter
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            problems.append(Problem(target_key, f"{target}.{relation} is {names!r}", allowed="a list of node names"))
    return problems


def _check_arguments(key: str, node: Mapping[str, Any], cls: Any) -> list[Problem]:
    """Unknown and missing constructor arguments, by name, without calling the constructor."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # not callable, or without a readable signature: the call itself will tell
        return []
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    required = {p.name: p.default is p.empty for p in named}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    arguments = [name for name in node if not str(name).startswith("_")]
    return check_arguments(required, arguments, name=cls.__qualname__, key=key, takes_any=takes_any)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint that offers the most similar of the names; empty where none is similar."""
    similar = nearest(name, names)
    return f"did you mean {similar[0]!r}?" if similar else ""


def _words(error: Exception) -> str:
    """An exception in one line; our own errors by their message."""
    if isinstance(error, ProblemsError):
        return "; ".join(problem.message for problem in error.problems)
    return error.message if isinstance(error, TitanError) else f"{type(error).__name__}: {error}"
