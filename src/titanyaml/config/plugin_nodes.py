"""Nodes of ``pipeline.plugins`` and the runner's target, checked without importing what they name."""

from __future__ import annotations

import re
from typing import Any

from titanyaml.config import schema
from titanyaml.config.schema_keys import keys_of, nearest
from titanyaml.config.targets import check_target
from titanyaml.errors import Problem

_SECTION_REFERENCE = re.compile(r"\$\{(\w+)\}")


def check_plugins(values: dict[str, Any], literal: dict[str, Any], bad: set[str]) -> list[Problem]:
    """Problems of every plugin node.

    Args:
        values, literal: the tree resolved, and as written. bad: keys that already have a problem.
    """
    nodes = (values.get("pipeline") or {}).get("plugins") or {}
    written = (literal.get("pipeline") or {}).get("plugins") or {}
    problems: list[Problem] = []
    for name, node in nodes.items():
        reference = _SECTION_REFERENCE.fullmatch(str(written.get(name)))
        key = reference[1] if reference else f"pipeline.plugins.{name}"
        if not any(one == key or one.startswith(f"{key}.") for one in bad):
            problems += _check_node(name, node, key, typed=bool(reference))
    return problems


def _check_node(name: str, node: Any, key: str, *, typed: bool) -> list[Problem]:
    if not isinstance(node, dict) or "_target_" not in node:
        section = keys_of(schema.Config).get(name)
        if section is not None and isinstance(node, dict):
            hint = " ".join(f"{name}.{inner}={value}" for inner, value in node.items())
        else:
            hint = f"{key}._target_=package.module.Class or {key}._target_=null"
        return [
            Problem(
                key,
                f"a plugin node without _target_: {node!r}",
                hint=hint,
                allowed="_target_ and the arguments of that class; _target_: null is off",
            )
        ]
    problems = [] if typed else check_reserved_keys(node, key)
    target = node["_target_"]
    if target is None:
        return problems
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", target):
        problems.append(Problem(f"{key}._target_", f"is {target!r}", allowed="package.module.Class, or null for off"))
        return problems
    arguments = [argument for argument in node if not argument.startswith("_")]
    return problems + check_target(target, key=key, arguments=arguments)


def check_reserved_keys(node: dict[str, Any], key: str) -> list[Problem]:
    """Keys with a leading underscore order the node; they are those of schema.PluginNode."""
    known = keys_of(schema.PluginNode)
    problems = []
    for name, value in node.items():
        if not str(name).startswith("_") or name == "_target_":
            continue
        if name not in known:
            near = nearest(name, known)
            problems.append(
                Problem(
                    f"{key}.{name}",
                    "unknown reserved key",
                    allowed=", ".join(known),
                    hint=f"{key}.{near[0]}={value}" if near else "",
                )
            )
        elif known[name].kind == list[str]:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                problems.append(
                    Problem(
                        f"{key}.{name}",
                        f"is {value!r}",
                        allowed="a list of node names",
                        hint=f"{key}.{name}=[{value}]" if isinstance(value, str) else "",
                    )
                )
        elif value is not None and not isinstance(value, str):
            problems.append(Problem(f"{key}.{name}", f"is {value!r}", allowed="a text, or null"))
    return problems


def check_runner(values: dict[str, Any]) -> list[Problem]:
    """Problems of ``runner._target_``."""
    target = (values.get("runner") or {}).get("_target_")
    return check_target(target, key="runner") if isinstance(target, str) else []
