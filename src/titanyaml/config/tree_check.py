"""The whole tree against the schema: every problem at once, whatever is right is kept for the rules.

The tree may be untyped: types are checked and converted here. Integral floats (``1e3``) become integers; nothing
else changes its kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from titanyaml.config import schema
from titanyaml.config.plugin_nodes import check_plugins, check_runner
from titanyaml.config.rules.hints import unread_then
from titanyaml.config.scalar_types import BAD, assign, describe, kind_hint, spell, to_kind
from titanyaml.config.schema_keys import Key, keys_of, nearest, nearest_key
from titanyaml.errors import Problem

_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*\}")
_RESOLVER = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*:")
_RESOLVERS = ("now", "oc.create", "oc.decode", "oc.dict.keys", "oc.dict.values", "oc.env", "oc.select", "titan.min")
#: Groups without a section of their own: their files must say where their keys go.
_HEADER = {"experiment": "# @package _global_", "local": "# @package _global_", "plugin": "# @package pipeline.plugins"}


@dataclass
class _Both:
    """Resolved and literal form of a container."""

    resolved: Any
    literal: Any


@dataclass
class Tree:
    """What the walk found.

    Args:
        problems: everything wrong, in the order of the tree.
        values: the nested tree, resolved; a key with a problem is absent.
        literal: the same with interpolations as they were written.
        bad: dotted keys that have a problem.
    """

    problems: list[Problem] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    literal: dict[str, Any] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)


def check_tree(cfg: DictConfig, *, partial: bool = False) -> Tree:
    """Walk the tree.

    Args:
        cfg: composed, typed or not, without Hydra's own node.
        partial: more is still to come (the common part of a sweep): only what no later value can heal is a problem.
    """
    raw = OmegaConf.to_container(cfg, resolve=False, throw_on_missing=False)
    walk = _Walk(raw, partial)
    tree = walk.tree
    tree.values, tree.literal = walk.section(schema.Config, raw, walk.plain, "")
    walk.report_interpolations()
    if not partial:
        tree.problems += check_plugins(tree.values, tree.literal, tree.bad) + check_runner(tree.values)
    return tree


class _Walk:
    def __init__(self, raw: dict[str, Any], partial: bool) -> None:
        self.raw, self.partial = raw, partial
        self.plain = OmegaConf.create(raw)  # untyped: access resolves and never converts
        self.tree = Tree()
        self.unresolved: list[tuple[Problem, list[str]]] = []

    def refuse(self, key: str, message: str, *, allowed: str = "", hint: str = "") -> Any:
        self.tree.problems.append(Problem(key, message, allowed=allowed, hint=hint))
        self.tree.bad.add(key)
        return BAD

    def section(self, cls: type, raw: dict, node: DictConfig, path: str) -> tuple[dict, dict]:
        """(resolved values, literal values) of a section; keys with problems are left out."""
        values: dict[str, Any] = {}
        literal: dict[str, Any] = {}
        keys = keys_of(cls)
        for name in raw:
            if name not in keys:
                self.unknown(f"{path}{name}", raw[name], keys)
        for name, key in keys.items():
            if name not in raw:
                continue  # inside an optional section: the schema's default
            value, written = self.value(key, raw[name], node, path + name)
            if value is not BAD:
                values[name], literal[name] = value, written
        if not self.partial:
            self.check_when(keys, values, literal, path)
        return values, literal

    def unknown(self, key: str, value: Any, siblings: dict[str, Key]) -> None:
        if key in _HEADER:
            self.refuse(
                key,
                f"the file of the group {key!r} put its keys here, where nothing reads them",
                hint=f"make {_HEADER[key]!r} the first line of the file",
            )
            return
        parent, _, name = key.rpartition(".")
        if isinstance(value, dict) and parent.rpartition(".")[2] == name:
            self.refuse(
                key,
                f"a file of the group {name!r} holds the group's keys themselves, not below {name!r}",
                hint=f"take out the line '{name}:' and the indent below it",
            )
            return
        near = nearest(name, siblings)
        near = f"{parent}.{near[0]}" if near and parent else nearest_key(key)
        simple = near and not isinstance(value, dict | list)
        hint = f"{near}={'null' if value is None else value}" if simple else near
        hint = "" if "[" in near else hint  # a key inside a list cannot be typed
        self.refuse(key, f"unknown key; did you mean {near}?" if near else "unknown key", hint=hint)

    def value(self, key: Key, raw: Any, node: DictConfig, path: str) -> tuple[Any, Any]:
        """(resolved value, literal value) of one key."""
        if raw == "???":
            return (BAD if self.partial else self.refuse(path, "is required and has no value", hint=f"{path}=...")), raw
        if isinstance(raw, str) and "${" in raw:
            value = self.resolve(raw, node, key.name, path)
            if value is not BAD:
                value = self.convert(key, value, node, path)
            return (value.resolved if isinstance(value, _Both) else value), raw
        value = self.convert(key, raw, node, path)
        if isinstance(value, _Both):
            return value.resolved, value.literal
        return value, value

    def convert(self, key: Key, value: Any, node: DictConfig, path: str) -> Any:
        """The value in the key's type and range; BAD, with its problem recorded, where it has another."""
        if value is None:
            return None if key.optional else self.refuse(path, "is null", allowed=describe(key))
        if key.is_section:
            if not isinstance(value, dict):
                return self.refuse(path, f"is {value!r}", allowed=f"a section with {', '.join(keys_of(key.kind))}")
            return _Both(*self.section(key.kind, value, node[key.name], f"{path}."))
        if key.kind == dict[str, Any]:
            if not isinstance(value, dict):
                return self.refuse(path, f"is {value!r}", allowed="a mapping of names to values")
            return _Both(self.free(value, node[key.name], path), value)
        if get_origin(key.kind) is list:
            return self.items(key, value, node, path)
        converted = to_kind(key.kind, value)
        if converted is BAD:
            return self.refuse(path, f"is {value!r}", allowed=describe(key), hint=kind_hint(key, value, path))
        return self.in_range(key, converted, path, value)

    def items(self, key: Key, value: Any, node: DictConfig, path: str) -> Any:
        if not isinstance(value, list):
            hint = "" if isinstance(value, dict) else f"{path}=[{spell(value)}]"
            return self.refuse(path, f"is {value!r}", allowed=describe(key), hint=hint)
        inner = node[key.name]
        results = []
        for index, item in enumerate(value):
            where = f"{path}[{index}]"
            if key.kind in (list[str], list[int]):
                one = Key(str(index), *get_args(key.kind), False, None, {"choices": key.rules.get("choices")})
                done = self.resolve(item, inner, index, where) if "${" in str(item) else item
                results.append(done if done is BAD else self.convert(one, done, node, where))
            elif isinstance(item, dict):
                results.append(self.section(schema.ParamGroup, item, inner[index], f"{where}.")[0])
                for name, field_key in keys_of(schema.ParamGroup).items():
                    if field_key.default == "???" and name not in item:
                        results.append(self.refuse(f"{where}.{name}", "is required and has no value"))
            else:
                allowed = f"a section with {', '.join(keys_of(schema.ParamGroup))}"
                results.append(self.refuse(where, f"is {item!r}", allowed=allowed))
        return BAD if any(result is BAD for result in results) else _Both(results, value)

    def free(self, raw: Any, node: Any, path: str) -> Any:
        """Resolved copy of an open section; only missing values and interpolations can be wrong in it."""
        if isinstance(raw, dict | list):
            pairs = raw.items() if isinstance(raw, dict) else enumerate(raw)
            done = {name: self.free_value(value, node, name, f"{path}.{name}") for name, value in pairs}
            kept = {name: value for name, value in done.items() if value is not BAD}
            return kept if isinstance(raw, dict) else list(kept.values())
        return raw

    def free_value(self, value: Any, node: Any, name: Any, path: str) -> Any:
        if value == "???" and not self.partial:
            return self.refuse(path, "is required and has no value", hint=f"{path}=...")
        if isinstance(value, str) and "${" in value:
            return self.resolve(value, node, name, path)
        return self.free(value, node[name], path) if isinstance(value, dict | list) else value

    def resolve(self, text: str, node: Any, name: Any, path: str) -> Any:
        """The value of an interpolation as plain data."""
        if self.partial:
            return BAD
        for resolver in _RESOLVER.findall(text):
            if resolver == "hydra":
                return self.refuse(
                    path,
                    f"{text!r} needs Hydra's run time, which the configuration must not depend on",
                    hint=f"a value, or run.dir and run.id in {path}",
                )
            if not OmegaConf.has_resolver(resolver):
                near = nearest(resolver, _RESOLVERS)
                return self.refuse(
                    path,
                    f"{text!r} uses the unknown resolver {resolver!r}",
                    allowed=", ".join(_RESOLVERS),
                    hint=f"${{{near[0]}:...}}" if near else "",
                )
        targets = _REFERENCE.findall(text)
        for target in targets:
            if not self.exists(target):
                near = nearest_key(target)
                return self.refuse(
                    path, f"{text!r} refers to {target}, which does not exist", hint=f"${{{near}}}" if near else ""
                )
        try:
            value = node[name]
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            self.tree.bad.add(path)  # reported where the value is missing
            return BAD
        except RecursionError:
            return self.refuse(path, f"{text!r} refers to itself")
        except OmegaConfBaseException as error:
            problem = Problem(path, f"{text!r} cannot be resolved: {str(error).splitlines()[0]}")
            self.unresolved.append((problem, targets))
            self.tree.bad.add(path)
            return BAD
        if OmegaConf.is_config(value):
            try:
                return OmegaConf.to_container(value, resolve=True)
            except OmegaConfBaseException:
                self.tree.bad.add(path)  # reported inside the section that is referred to
                return BAD
        if isinstance(value, str) and "${" in value:
            if self.tree.bad.intersection(targets):
                self.tree.bad.add(path)
                return BAD
            return self.refuse(
                path,
                f"is {value!r}",
                allowed="text without '${', which the written configuration would read as a reference",
            )
        return value

    def exists(self, target: str) -> bool:
        here: Any = self.raw
        for name in target.split("."):
            if isinstance(here, str) and "${" in here:
                return True  # through another reference: access will tell
            if isinstance(here, list) and name.isdigit() and int(name) < len(here):
                here = here[int(name)]
            elif isinstance(here, dict) and name in here:
                here = here[name]
            else:
                return False
        return True

    def report_interpolations(self) -> None:
        """Interpolations that failed by themselves, not because what they refer to has a problem of its own."""
        failed = {problem.key for problem, _ in self.unresolved}
        for problem, targets in self.unresolved:
            if not any(target in self.tree.bad - failed or target in failed - {problem.key} for target in targets):
                self.tree.problems.append(problem)

    def in_range(self, key: Key, value: Any, path: str, written: Any) -> Any:
        choices = key.rules.get("choices")
        if choices and value not in choices:
            near = nearest(str(value), map(str, choices))
            hint = f"{path}={near[0]}" if near and "[" not in path else ""  # a key inside a list cannot be typed
            return self.refuse(path, f"is {written!r}", allowed=describe(key), hint=hint)
        low, high = key.rules.get("low"), key.rules.get("high")
        if high is None and isinstance(value, int) and abs(value) > 2**53:  # torch overflows
            return self.refuse(path, f"is {written!r}", allowed=f"{describe(key)}, up to 2**53")
        above, below = key.rules.get("above"), key.rules.get("below")
        if low is not None and value < low or high is not None and value > high:
            return self.refuse(
                path,
                f"is {written!r}",
                allowed=describe(key),
                hint=f"{path}={low if low is not None and value < low else high}",
            )
        if above is not None and value <= above or below is not None and value >= below:
            return self.refuse(path, f"is {written!r}", allowed=describe(key))
        return value

    def check_when(self, keys: dict[str, Key], values: dict, literal: dict, path: str) -> None:
        """Keys that were given a value where nothing reads them."""
        for name, key in keys.items():
            sibling, needed = key.rules.get("when") or ("", [])
            if not sibling or name not in literal or sibling not in values or values[sibling] in needed:
                continue
            if literal[name] != key.default:
                back = {name: key.default} | unread_then(keys, {**values, name: key.default}, [name])
                ways = [
                    " ".join(assign(f"{path}{one}", value) for one, value in back.items()),
                    *(f"{path}{sibling}={spell(one)}" for one in needed),
                ]
                self.refuse(
                    f"{path}{name}",
                    f"is {literal[name]!r}, but nothing reads it: {path}{sibling} is "
                    f"{spell(values[sibling])}, not {' or '.join(map(spell, needed))}",
                    hint=" or ".join(ways),
                )
