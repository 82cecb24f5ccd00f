"""Checks of the command line's overrides, one at a time, before anything is composed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from titanyaml.config import schema
from titanyaml.config.degrees import meant_mesh_name
from titanyaml.config.scalar_types import BAD, spell, to_kind
from titanyaml.config.schema_keys import all_keys, find_key, keys_of, nearest, nearest_key
from titanyaml.errors import Problem

if TYPE_CHECKING:
    from titanyaml.config.hydra.compose_hook import Loader

#: Groups without a section; there may be no option of them at all.
LATE_GROUPS = ("experiment", "plugin")


@dataclass
class SortedOverrides:
    """Overrides, sorted into those that Hydra can compose and those that it cannot.

    Args:
        composable: texts for Hydra. problems: of the others.
        keys: (dotted key or group, text) of the composable ones, in order. swept: keys with several values.
        doubtful: keys, and sections whose option was refused: nothing is known of their values.
    """

    composable: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    keys: list[tuple[str, str]] = field(default_factory=list)
    swept: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)

    def refuse(self, text: str, problem: Problem) -> None:
        """Record why an override cannot be used."""
        self.problems.append(replace(problem, origin=f"override {text!r}"))
        self.doubtful.add(problem.key)

    def drop(self, text: str) -> None:
        """Take out an override that Hydra refused."""
        self.doubtful |= {key for key, key_text in self.keys if key_text == text}
        self.composable = [composable for composable in self.composable if composable != text]
        self.keys = [(key, key_text) for key, key_text in self.keys if key_text != text]


def sort_overrides(overrides: list[str], *, loader: Loader, multirun: bool) -> SortedOverrides:
    """Sort out overrides that cannot be composed, each with its own problem. multirun: ``a,b`` is legal."""
    result = SortedOverrides()
    for text in overrides:
        try:
            override = loader.parse(text)
        except HydraException as error:
            result.refuse(text, _unreadable(text, error))
            continue
        key = override.key_or_group
        if problem := _check_override(override, loader, multirun=multirun):
            result.refuse(text, problem)
        elif key not in LATE_GROUPS or loader.is_group(key):  # not plugin=[] if no plugin is installed
            result.composable.append(text)
            result.keys.append((key, text))
            if override.is_sweep_override():
                result.swept.add(key)
    return result


def check_swept_keys(params: dict[str, Any], *, loader: Loader) -> list[Problem]:
    """Problems of the keys of ``hydra.sweeper.params``."""
    return [
        Problem("hydra.sweeper.params", f"sweeps the unknown key {key}", hint=nearest_key(key))
        for key in params
        if not loader.is_group(key) and find_key(key.lstrip("+")) is None
    ]


def _unreadable(text: str, error: HydraException) -> Problem:
    key, equals, value = text.partition("=")
    if not equals:
        hint = f"runner={text}" if text in ("check", "train", "eval", "sample") else ""
        return Problem("", f"{text!r} is no override", allowed="group=option or key=value", hint=hint)
    # quoted twice: for Hydra, and in the shell's quotes around the whole
    hydra_quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    shell_quoted = f'{key}="{hydra_quoted}"'.replace("'", "'\\''")
    allowed = "text with spaces, commas, brackets, colons or '=' in quotes, and these in the shell's"
    reason = str(error).splitlines()[0]
    return Problem(key, f"{value!r} cannot be read: {reason}", allowed=allowed, hint=f"'{shell_quoted}'")


def _check_override(override: Override, loader: Loader, *, multirun: bool) -> Problem | None:
    key = override.key_or_group
    if not key:
        return Problem("", f"{override.input_line!r} names no key", allowed="group=option or key=value")
    problem = None
    if not override.is_hydra_override():
        is_group = (loader.is_group(key) or key in LATE_GROUPS) and not isinstance(override.value(), dict)
        problem = _check_group(override, loader) if is_group else _check_key(override, loader)
    if problem is None and override.is_sweep_override() and not multirun:
        problem = _sweep_without_multirun(override)
    return problem


def _sweep_without_multirun(override: Override) -> Problem:
    key, value = override.get_key_element(), _value_text(override)
    schema_key = find_key(override.key_or_group)
    # in brackets or quotes a comma is part of one value; range(1,3) is a sweep in any case
    kind = schema_key.kind if schema_key is not None and "(" not in value else None
    fixes = [f"-m {key}={value}"]
    if kind in (list[str], dict[str, Any]):
        fixes.append(f"'{key}=[{value}]'")
    if kind in (str, dict[str, Any]):
        fixes.append(f"'{key}=\"{value}\"'")
    message, allowed = f"{value!r} stands for several values", "one value; several ones with -m"
    return Problem(override.key_or_group, message, allowed=allowed, hint=" or ".join(fixes))


def _check_group(override: Override, loader: Loader) -> Problem | None:
    group = override.key_or_group
    if override.is_sweep_override() or override.package is not None or override.is_delete():
        return None  # Hydra's own messages are good enough
    value: Any = override.value()
    if override.is_force_add():  # Hydra refuses it too, without saying what to type
        return Problem(group, f"{override.input_line!r}: ++ is for keys", hint=f"{group}={spell(value)}")
    if isinstance(value, list) and group != "plugin":
        hint = f"{group}={value[0]}" if value else ""
        allowed = ", ".join(loader.options(group))
        return Problem(group, f"{spell(value)}: one option at a time", allowed=allowed, hint=hint)
    options = value if isinstance(value, list) else [value]
    return next(filter(None, (_check_option(group, option, loader) for option in options)), None)


def _check_option(group: str, option: Any, loader: Loader) -> Problem | None:
    options = loader.options(group)
    if not isinstance(option, str):
        off = f"{group}=none" if "none" in options else f"~{group}" if group in LATE_GROUPS and options else ""
        return Problem(group, f"{spell(option)} is no option", allowed=", ".join(options), hint=off)
    bare = re.sub(r"\.ya?ml$", "", option)
    if bare != option:
        message = f"{option!r}: options are named without an ending, and only files in .yaml are found"
        return Problem(group, message, hint=f"{group}={bare}")
    if loader.has_option(group, option):
        return None
    if file := loader.wrong_ending(group, option):  # Hydra looks for .yaml alone
        return Problem(group, f"{file} is not found because of its ending", hint=f"rename it to {option}.yaml")
    allowed = ", ".join(options) or "none is there"
    suggestion = next(iter(nearest(option, options)), "")
    if group == "parallel":
        allowed += "; any mesh name such as fsdp8 or hsdp2x4"
        suggestion = meant_mesh_name(option) or suggestion
    hint = f"{group}={suggestion}" if suggestion else ""
    return Problem(group, f"there is no option {option!r}", allowed=allowed, hint=hint)


def _check_key(override: Override, loader: Loader) -> Problem | None:
    name, text = override.key_or_group, override.input_line
    if override.package is not None:
        return Problem(name, f"{text!r}: there is no group {name!r}", hint=_nearest_group(name, loader))
    key = find_key(name)
    value, parsed = _value_text(override), override.value()
    if key is None:
        return _unknown_key(override, loader)
    if key.kind == dict[str, Any] and name.startswith("pipeline.plugins."):
        return _check_plugin_key(name, value, override)
    if key.kind == dict[str, Any] or key.name != name.rpartition(".")[2]:
        return None  # inside an open section or a list
    if key.is_section and isinstance(parsed, dict):
        return _check_inside(name, parsed)
    if override.is_delete():
        hint = "" if key.is_section else f"{name}={spell(key.default)}"
        return Problem(name, f"{text!r}: no key can be removed", hint=hint)
    parent = find_key(name.rpartition(".")[0])  # a null section has no keys yet: there + is right
    if override.is_add() and not key.is_section and not (parent and parent.optional):
        return Problem(name, f"{text!r}: the key exists, + is for new ones", hint=f"{name}={value}")
    return None


def _unknown_key(override: Override, loader: Loader) -> Problem:
    name = override.key_or_group
    suggestion = nearest_key(name) if "." in name else _nearest_group(name, loader)
    if not suggestion or not _fits(suggestion, override):
        return Problem(name, "unknown key", allowed="user.<name> for keys of your own (+user.<name>=...)")
    hint = "" if override.is_delete() else f"{suggestion}={_value_text(override)}"
    return Problem(name, f"unknown key; did you mean {suggestion}?", hint=hint)


def _check_inside(name: str, value: dict[str, Any]) -> Problem | None:
    """``optim={lrr: 1}``."""
    for inner, inner_value in value.items():
        dotted = f"{name}.{inner}"
        key = find_key(dotted)
        if key is None:
            suggestion = nearest_key(dotted)
            message = f"unknown key; did you mean {suggestion}?" if suggestion else "unknown key"
            return Problem(dotted, message, hint=f"{suggestion}={spell(inner_value)}" if suggestion else "")
        if key.is_section and isinstance(inner_value, dict) and (problem := _check_inside(dotted, inner_value)):
            return problem
    return None


def _fits(name: str, override: Override) -> bool:
    """Whether a key or group can have the type of the value that was typed."""
    key = find_key(name)
    if override.is_delete() or key is None or key.kind not in (int, float, bool, str) or override.is_sweep_override():
        return True
    value, choices = override.value(), key.rules.get("choices")
    if value is None:
        return key.optional
    return to_kind(key.kind, value) is not BAD and (not choices or value in choices)


def _value_text(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def _check_plugin_key(name: str, value: str, override: Override) -> Problem | None:
    """``pipeline.plugins.ac.mode``: the node is a reference to the group, which an override would cut."""
    node, _, inner = name.removeprefix("pipeline.plugins.").partition(".")
    if node in keys_of(schema.Config) and inner and not override.is_delete():
        message = f"the node is the group {node!r}; an override here would replace it"
        return Problem(name, message, hint=f"{node}.{inner}={value}")
    return None


def _nearest_group(name: str, loader: Loader) -> str:
    """The key of that name in some section, else the group or key with the most similar name."""
    if same_name := next((key for key in all_keys() if key.endswith(f".{name}")), ""):
        return same_name
    groups = {*keys_of(schema.Config), *loader.groups()} - {"hydra"}
    return next(iter(nearest(name, groups)), "") or nearest_key(name)
