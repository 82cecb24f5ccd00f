"""Nodes of ``pipeline.plugins`` and the runner's target, checked without importing what they name."""

import re
from typing import Any

from titanyaml.config import schema
from titanyaml.config.schema_keys import is_under, keys_of, nearest
from titanyaml.config.targets import check_target
from titanyaml.errors import Problem

_SECTION_REFERENCE = re.compile(r"\$\{(\w+)\}")
_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


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
        if not any(is_under(bad_key, (key,)) for bad_key in bad):
            problems += _check_node(name, node, key, is_section=bool(reference))
    return problems


def _check_node(name: str, node: Any, key: str, *, is_section: bool) -> list[Problem]:
    if not isinstance(node, dict) or "_target_" not in node:
        if isinstance(node, dict) and name in keys_of(schema.Config):
            # ++pipeline.plugins.ac.mode=full has replaced the reference to the group
            hint = " ".join(f"{name}.{inner}={value}" for inner, value in node.items())
        else:
            hint = f"{key}._target_=package.module.Class or {key}._target_=null"
        allowed = "_target_ and the arguments of that class; _target_: null is off"
        return [Problem(key, f"a plugin node without _target_: {node!r}", allowed=allowed, hint=hint)]
    problems = [] if is_section else check_reserved_keys(node, key)  # the schema has checked a section's own
    target = node["_target_"]
    if target is None:
        return problems
    if not isinstance(target, str) or not _DOTTED_PATH.fullmatch(target):
        allowed = "package.module.Class, or null for off"
        return [*problems, Problem(f"{key}._target_", f"is {target!r}", allowed=allowed)]
    arguments = [argument for argument in node if not argument.startswith("_")]  # those order the node
    return problems + check_target(target, key=key, arguments=arguments)


def check_reserved_keys(node: dict[str, Any], key: str) -> list[Problem]:
    """Keys with a leading underscore order the node; they are those of schema.PluginNode."""
    reserved = keys_of(schema.PluginNode)
    problems = []
    for name, value in node.items():
        path, wrong_value = f"{key}.{name}", f"is {value!r}"
        if not str(name).startswith("_") or name == "_target_":
            continue
        if name not in reserved:
            similar = nearest(name, reserved)
            hint = f"{key}.{similar[0]}={value}" if similar else ""
            problems.append(Problem(path, "unknown reserved key", allowed=", ".join(reserved), hint=hint))
        elif reserved[name].kind == list[str]:
            if not isinstance(value, list) or not all(isinstance(node_name, str) for node_name in value):
                hint = f"{path}=[{value}]" if isinstance(value, str) else ""
                problems.append(Problem(path, wrong_value, allowed="a list of node names", hint=hint))
        elif value is not None and not isinstance(value, str):
            problems.append(Problem(path, wrong_value, allowed="a text, or null"))
    return problems


def check_runner(values: dict[str, Any]) -> list[Problem]:
    """Problems of ``runner._target_``."""
    target = (values.get("runner") or {}).get("_target_")
    return check_target(target, key="runner") if isinstance(target, str) else []
