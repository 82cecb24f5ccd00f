"""What was typed on the command line, one override at a time, before anything is composed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from titanyaml.config import schema
from titanyaml.config.degrees import meant_mesh_name
from titanyaml.config.scalar_types import BAD, spell, to_kind
from titanyaml.config.schema_keys import all_keys, find_key, keys_of, nearest, nearest_key
from titanyaml.errors import Problem

#: Groups without a section; there may be no option of them at all.
LATE_GROUPS = ("experiment", "plugin")


@dataclass
class Typed:
    """The overrides sorted out.

    Args:
        kept: those that Hydra can be given. problems: of the others.
        keys: (dotted key or group, what was typed) of those kept, in order. swept: keys with several values.
        doubtful: keys, and sections whose option was refused: nothing is known of their values.
    """

    kept: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)
    swept: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)

    def refuse(self, text: str, problem: Problem) -> None:
        """Record why an override cannot be used."""
        self.problems.append(replace(problem, where=f"override {text!r}"))
        self.doubtful.add(problem.key)


def check_overrides(overrides: list[str], *, loader: Any, multirun: bool) -> Typed:
    """Sort out overrides that cannot be composed, each with its own problem.

    Args:
        loader: ``hydra_hook.Loader``.
        multirun: values such as ``a,b`` are legal.
    """
    typed = Typed()
    for text in overrides:
        try:
            override = loader.parse(text)
        except HydraException as error:
            typed.refuse(text, _unreadable(text, error))
            continue
        key = override.key_or_group
        if not key:
            typed.refuse(text, Problem("", f"{text!r} names no key", allowed="group=option or key=value"))
            continue
        is_group = (loader.is_group(key) or key in LATE_GROUPS) and not isinstance(override.value(), dict)
        problem = None
        if not override.is_hydra_override():
            problem = _check_group(override, loader) if is_group else _check_key(override, loader)
        if problem is None and override.is_sweep_override() and not multirun:
            problem = _unasked_sweep(override)
        if problem is not None:
            typed.refuse(text, problem)
            continue
        if key in LATE_GROUPS and not loader.is_group(key):
            continue  # plugin=[] where no plugin is installed
        typed.kept.append(text)
        typed.keys.append((key, text))
        if override.is_sweep_override():
            typed.swept.add(key)
    return typed


def check_swept_keys(params: dict[str, Any], *, loader: Any) -> list[Problem]:
    """Problems of the keys of ``hydra.sweeper.params``."""
    problems = [
        Problem("hydra.sweeper.params", f"sweeps the unknown key {key}", hint=nearest_key(key))
        for key in params
        if not loader.is_group(key) and find_key(key.lstrip("+")) is None
    ]
    return problems


def _unreadable(text: str, error: HydraException) -> Problem:
    key, equals, value = text.partition("=")
    if not equals:
        return Problem(
            "",
            f"{text!r} is no override",
            allowed="group=option or key=value",
            hint=f"runner={text}" if text in ("check", "train", "eval", "sample") else "",
        )
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    shell = f'{key}="{quoted}"'.replace("'", "'\\''")
    reason = str(error).splitlines()[0]
    return Problem(
        key,
        f"{value!r} cannot be read: {reason}",
        allowed="text with spaces, commas, brackets, colons or '=' in quotes, and these in the shell's",
        hint=f"'{shell}'",
    )


def _unasked_sweep(override: Override) -> Problem:
    key, value = override.get_key_element(), _value(override)
    known = find_key(override.key_or_group)
    ways = [f"-m {key}={value}"]
    if "(" not in value and known is not None and known.kind in (list[str], dict[str, Any]):
        ways.append(f"'{key}=[{value}]'")
    if "(" not in value and known is not None and known.kind in (str, dict[str, Any]):
        ways.append(f"'{key}=\"{value}\"'")
    return Problem(
        override.key_or_group,
        f"{value!r} stands for several values",
        hint=" or ".join(ways),
        allowed="one value; several ones with -m",
    )


def _check_group(override: Override, loader: Any) -> Problem | None:
    group = override.key_or_group
    if override.is_sweep_override() or override.package is not None:
        return None  # Hydra itself tells what is wrong
    value = override.value()
    if override.is_delete():
        return None
    if override.is_force_add():
        return Problem(group, f"{override.input_line!r}: ++ is for keys", hint=f"{group}={spell(value)}")
    several = isinstance(value, list)
    if several and group != "plugin":
        return Problem(
            group,
            f"{spell(value)}: one option at a time",
            allowed=", ".join(loader.options(group)),
            hint=f"{group}={value[0]}" if value else "",
        )
    for option in value if several else [value]:
        if problem := _check_option(group, option, loader):
            return problem
    return None


def _check_option(group: str, option: Any, loader: Any) -> Problem | None:
    options = loader.options(group)
    if not isinstance(option, str):
        off = f"{group}=none" if "none" in options else f"~{group}" if group in LATE_GROUPS and options else ""
        return Problem(group, f"{spell(option)} is no option", allowed=", ".join(options), hint=off)
    bare = re.sub(r"\.ya?ml$", "", option)
    if bare != option:
        return Problem(
            group,
            f"{option!r}: options are named without an ending, and only files in .yaml are found",
            hint=f"{group}={bare}",
        )
    if loader.has_option(group, option):
        return None
    if file := loader.wrong_ending(group, option):
        return Problem(group, f"{file} is not found because of its ending", hint=f"rename it to {option}.yaml")
    mesh = meant_mesh_name(option) if group == "parallel" else ""
    near = [mesh] if mesh else nearest(option, options)
    more = "; any mesh name such as fsdp8 or hsdp2x4" if group == "parallel" else ""
    return Problem(
        group,
        f"there is no option {option!r}",
        allowed=(", ".join(options) or "none is there") + more,
        hint=f"{group}={near[0]}" if near else "",
    )


def _check_key(override: Override, loader: Any) -> Problem | None:
    name = override.key_or_group
    if override.package is not None:
        return Problem(name, f"{override.input_line!r}: there is no group {name!r}", hint=_near_group(name, loader))
    key = find_key(name)
    value = _value(override)
    if key is None:
        near = nearest_key(name) if "." in name else _near_group(name, loader)
        near = near if _fits(near, override) else ""
        return Problem(
            name,
            f"unknown key; did you mean {near}?" if near else "unknown key",
            hint=f"{near}={value}" if near and not override.is_delete() else "",
            allowed="" if near else "user.<name> for keys of your own (+user.<name>=...)",
        )
    if key.kind == dict[str, Any] and name.startswith("pipeline.plugins."):
        return _check_plugin_key(name, value, override)
    if key.kind == dict[str, Any] or key.name != name.rpartition(".")[2]:
        return None  # inside an open section or a list
    if key.is_section and isinstance(override.value(), dict):
        return _check_inside(name, override.value())
    if override.is_delete():
        return Problem(
            name,
            f"{override.input_line!r}: no key can be removed",
            hint=f"{name}={spell(key.default)}" if not key.is_section else "",
        )
    parent = find_key(name.rpartition(".")[0])
    if override.is_add() and not key.is_section and not (parent and parent.optional):
        return Problem(name, f"{override.input_line!r}: the key exists, + is for new ones", hint=f"{name}={value}")
    return None


def _check_inside(name: str, value: dict[str, Any]) -> Problem | None:
    """``optim={lrr: 1}``."""
    for inner, one in value.items():
        dotted = f"{name}.{inner}"
        key = find_key(dotted)
        if key is None:
            near = nearest_key(dotted)
            return Problem(
                dotted,
                f"unknown key; did you mean {near}?" if near else "unknown key",
                hint=f"{near}={spell(one)}" if near else "",
            )
        if key.is_section and isinstance(one, dict) and (problem := _check_inside(dotted, one)):
            return problem
    return None


def _fits(name: str, override: Override) -> bool:
    """Whether a key or group can have the type of the value that was typed."""
    key = find_key(name)
    if override.is_delete() or key is None or key.kind not in (int, float, bool, str) or override.is_sweep_override():
        return True
    value, choices = override.value(), key.rules.get("choices")
    return (value is None and key.optional) or (
        to_kind(key.kind, value) is not BAD and (not choices or value in choices)
    )


def _value(override: Override) -> str:
    """What stands behind the "="."""
    return (override.input_line or "").partition("=")[2]


def _check_plugin_key(name: str, value: str, override: Override) -> Problem | None:
    """``pipeline.plugins.ac.mode``: the node is a reference to the group, which an override would cut."""
    node, _, inner = name.removeprefix("pipeline.plugins.").partition(".")
    if node in keys_of(schema.Config) and inner and not override.is_delete():
        return Problem(
            name, f"the node is the group {node!r}; an override here would replace it", hint=f"{node}.{inner}={value}"
        )
    return None


def _near_group(name: str, loader: Any) -> str:
    groups = {*keys_of(schema.Config), *loader.groups()} - {"hydra"}
    return (
        next((key for key in all_keys() if key.endswith(f".{name}")), "")
        or (nearest(name, groups) or [nearest_key(name)])[0]
    )
