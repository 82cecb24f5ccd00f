"""The whole tree against the schema: every problem at once; all values without a problem are kept for the rules.

The tree may be untyped: types are checked and converted here. Integral floats (``1e3``) become integers; no other value
changes its type.
"""

import re
from dataclasses import dataclass, field
from typing import Any, cast, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from titanyaml.config import schema
from titanyaml.config.plugin_nodes import check_plugins, check_runner
from titanyaml.config.rules.hints import find_resets
from titanyaml.config.rules.values import check_value
from titanyaml.config.scalar_types import BAD, assign, describe, spell, to_kind, type_hint
from titanyaml.config.schema_keys import Key, keys_of, nearest, nearest_key
from titanyaml.errors import Problem

_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*\}")
_RESOLVER = re.compile(r"(?<!\\)\$\{\s*([A-Za-z_][\w.]*)\s*:")
_RESOLVERS = ("now", "oc.create", "oc.decode", "oc.dict.keys", "oc.dict.values", "oc.env", "oc.select", "titan.min")
#: Groups without a section of their own: their files must say where their keys go.
_HEADER = {"experiment": "# @package _global_", "local": "# @package _global_", "plugin": "# @package pipeline.plugins"}


@dataclass
class _Container:
    """A section or list: its resolved values, and the literal ones with interpolations as they were written."""

    resolved: Any
    literal: Any


@dataclass
class CheckedTree:
    """The result of the check.

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


def check_tree(cfg: DictConfig, *, partial: bool = False) -> CheckedTree:
    """Check a tree against the schema.

    Args:
        cfg: composed, typed or not, without Hydra's own node.
        partial: more is still to come (the common part of a sweep): only what no later value can heal is a problem.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False, throw_on_missing=False))
    checker = _TreeChecker(raw, partial)
    tree = checker.tree
    tree.values, tree.literal = checker.check_section(schema.Config, raw, checker.untyped, "")
    checker.report_interpolations()
    if not partial:
        tree.problems += check_plugins(tree.values, tree.literal, tree.bad) + check_runner(tree.values)
    return tree


class _TreeChecker:
    """One walk over the tree: ``raw`` is a plain container, ``node`` the same part of ``untyped``, which resolves."""

    def __init__(self, raw: dict[str, Any], partial: bool) -> None:
        self.raw, self.partial = raw, partial
        self.untyped = OmegaConf.create(raw)  # without the schema: access resolves and never converts
        self.tree = CheckedTree()
        self.unresolved: list[tuple[Problem, list[str]]] = []  # with the keys that each refers to

    def refuse(self, key: str, message: str, *, allowed: str = "", hint: str = "", is_unread: bool = False) -> Any:
        self.tree.problems.append(Problem(key, message, allowed=allowed, hint=hint, is_unread=is_unread))
        return self.mark_bad(key)

    def mark_bad(self, key: str) -> Any:
        """For a value whose problem is reported elsewhere."""
        self.tree.bad.add(key)
        return BAD

    def check_section(
        self, cls: type, raw: dict[str, Any], node: DictConfig, path: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(resolved values, literal values) of a section; keys with problems are left out."""
        values: dict[str, Any] = {}
        literal: dict[str, Any] = {}
        keys = keys_of(cls)
        for name in raw:
            if name not in keys:
                self.refuse_unknown(f"{path}{name}", raw[name], keys)
        for name, key in keys.items():
            if name not in raw:
                continue  # inside an optional section: the schema's default
            value, written = self.check_value(key, raw[name], node, path + name)
            if value is not BAD:
                values[name], literal[name] = value, written
        if not self.partial:
            self.refuse_unread(keys, values, literal, path)
        return values, literal

    def refuse_unknown(self, key: str, value: Any, siblings: dict[str, Key]) -> None:
        parent, _, name = key.rpartition(".")
        if key in _HEADER:
            message = f"the file of the group {key!r} put its keys here, where nothing reads them"
            self.refuse(key, message, hint=f"make {_HEADER[key]!r} the first line of the file")
        elif isinstance(value, dict) and parent.rpartition(".")[2] == name:
            message = f"a file of the group {name!r} holds the group's keys themselves, not below {name!r}"
            self.refuse(key, message, hint=f"take out the line '{name}:' and the indent below it")
        else:
            similar = nearest(name, siblings)
            suggestion = f"{parent}.{similar[0]}" if similar and parent else nearest_key(key)
            message = f"unknown key; did you mean {suggestion}?" if suggestion else "unknown key"
            is_scalar = not isinstance(value, dict | list)
            hint = f"{suggestion}={'null' if value is None else value}" if suggestion and is_scalar else suggestion
            # a key inside a list cannot be typed
            self.refuse(key, message, hint="" if "[" in suggestion else hint)

    def check_value(self, key: Key, raw: Any, node: DictConfig, path: str) -> tuple[Any, Any]:
        """(resolved value, literal value) of one key."""
        if raw == "???":
            return (BAD if self.partial else self.refuse(path, "is required and has no value", hint=f"{path}=...")), raw
        if isinstance(raw, str) and "${" in raw:
            value = self.resolve(raw, node, key.name, path)
            if value is not BAD:
                value = self.convert(key, value, node, path)
            # the literal value stays the reference, which config.yaml and the typed tree keep
            return (value.resolved if isinstance(value, _Container) else value), raw
        value = self.convert(key, raw, node, path)
        if isinstance(value, _Container):
            return value.resolved, value.literal
        return value, value

    def convert(self, key: Key, value: Any, node: DictConfig, path: str) -> Any:
        """The value in the key's type and range; BAD, with its problem recorded, if it has another."""
        if value is None:
            return None if key.optional else self.refuse(path, "is null", allowed=describe(key))
        if key.is_section:
            if not isinstance(value, dict):
                return self.refuse(path, f"is {value!r}", allowed=f"a section with {', '.join(keys_of(key.kind))}")
            return _Container(*self.check_section(key.kind, value, node[key.name], f"{path}."))
        if key.kind == dict[str, Any]:
            if not isinstance(value, dict):
                return self.refuse(path, f"is {value!r}", allowed="a mapping of names to values")
            return _Container(self.resolve_open(value, node[key.name], path), value)
        if get_origin(key.kind) is list:
            return self.check_list(key, value, node, path)
        converted = to_kind(key.kind, value)
        if converted is BAD:
            return self.refuse(path, f"is {value!r}", allowed=describe(key), hint=type_hint(key, value, path))
        if problem := check_value(key, converted, path, value):
            self.tree.problems.append(problem)
            return self.mark_bad(path)
        return converted

    def check_list(self, key: Key, value: Any, node: DictConfig, path: str) -> Any:
        if not isinstance(value, list):
            hint = "" if isinstance(value, dict) else f"{path}=[{spell(value)}]"
            return self.refuse(path, f"is {value!r}", allowed=describe(key), hint=hint)
        check_item = self.check_scalar_item if key.kind in (list[str], list[int]) else self.check_param_group
        results = [check_item(key, item, node, index, f"{path}[{index}]") for index, item in enumerate(value)]
        return BAD if any(result is BAD for result in results) else _Container(results, value)

    def check_scalar_item(self, key: Key, item: Any, node: DictConfig, index: int, path: str) -> Any:
        (kind,) = get_args(key.kind)
        item_key = Key(str(index), kind, optional=False, default=None, rules={"choices": key.rules.get("choices")})
        value = self.resolve(item, node[key.name], index, path) if "${" in str(item) else item
        return BAD if value is BAD else self.convert(item_key, value, node, path)

    def check_param_group(self, key: Key, item: Any, node: DictConfig, index: int, path: str) -> Any:
        fields = keys_of(schema.ParamGroup)
        if not isinstance(item, dict):
            return self.refuse(path, f"is {item!r}", allowed=f"a section with {', '.join(fields)}")
        values = self.check_section(schema.ParamGroup, item, node[key.name][index], f"{path}.")[0]
        required = [name for name, inner in fields.items() if inner.default == "???" and name not in item]
        for name in required:
            self.refuse(f"{path}.{name}", "is required and has no value")
        return BAD if required else values

    def resolve_open(self, raw: Any, node: Any, path: str) -> Any:
        """Resolved copy of an open section; only missing values and interpolations can be wrong in it."""
        pairs = raw.items() if isinstance(raw, dict) else enumerate(raw)
        results = {name: self.resolve_open_value(value, node, name, f"{path}.{name}") for name, value in pairs}
        good = {name: value for name, value in results.items() if value is not BAD}
        return good if isinstance(raw, dict) else list(good.values())

    def resolve_open_value(self, value: Any, node: Any, name: Any, path: str) -> Any:
        if value == "???" and not self.partial:
            return self.refuse(path, "is required and has no value", hint=f"{path}=...")
        if isinstance(value, str) and "${" in value:
            return self.resolve(value, node, name, path)
        return self.resolve_open(value, node[name], path) if isinstance(value, dict | list) else value

    def resolve(self, text: str, node: Any, name: Any, path: str) -> Any:
        """The value of an interpolation as plain data."""
        targets = _REFERENCE.findall(text)
        if self.partial or self.refuse_unresolvable(text, targets, path):
            return BAD
        try:
            value = node[name]
        except (InterpolationToMissingValueError, MissingMandatoryValue):
            return self.mark_bad(path)  # reported where the value is missing
        except RecursionError:  # a circle that OmegaConf itself does not notice
            return self.refuse(path, f"{text!r} refers to itself")
        except OmegaConfBaseException as error:
            problem = Problem(path, f"{text!r} cannot be resolved: {str(error).splitlines()[0]}")
            self.unresolved.append((problem, targets))  # its cause may be found later in the walk
            return self.mark_bad(path)
        if OmegaConf.is_config(value):
            try:
                return OmegaConf.to_container(value, resolve=True)
            except OmegaConfBaseException:
                return self.mark_bad(path)  # reported inside the section that is referred to
        if isinstance(value, str) and "${" in value:
            if self.tree.bad.intersection(targets):
                return self.mark_bad(path)
            allowed = "text without '${', which the written configuration would read as a reference"
            return self.refuse(path, f"is {value!r}", allowed=allowed)
        return value

    def refuse_unresolvable(self, text: str, targets: list[str], path: str) -> bool:
        """Report an interpolation that names no key or resolver of ours; whether it does."""
        for resolver in _RESOLVER.findall(text):
            if resolver == "hydra":
                message = f"{text!r} needs Hydra's run time, which the configuration must not depend on"
                self.refuse(path, message, hint=f"a value, or run.dir and run.id in {path}")
                return True
            if not OmegaConf.has_resolver(resolver):
                similar = nearest(resolver, _RESOLVERS)
                message, hint = f"{text!r} uses the unknown resolver {resolver!r}", ""
                if similar:
                    hint = f"${{{similar[0]}:...}}"
                self.refuse(path, message, allowed=", ".join(_RESOLVERS), hint=hint)
                return True
        for target in targets:
            if not self.exists(target):
                suggestion = nearest_key(target)
                hint = f"${{{suggestion}}}" if suggestion else ""
                self.refuse(path, f"{text!r} refers to {target}, which does not exist", hint=hint)
                return True
        return False

    def exists(self, target: str) -> bool:
        value: Any = self.raw
        for name in target.split("."):
            if isinstance(value, str) and "${" in value:
                return True  # through another reference: access will tell
            if isinstance(value, list) and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                return False
        return True

    def report_interpolations(self) -> None:
        """Report interpolations that failed by themselves, not because what they refer to has its own problem."""
        failed = {problem.key for problem, _ in self.unresolved}
        for problem, targets in self.unresolved:
            if not any(target in self.tree.bad - failed or target in failed - {problem.key} for target in targets):
                self.tree.problems.append(problem)

    def refuse_unread(self, keys: dict[str, Key], values: dict[str, Any], literal: dict[str, Any], path: str) -> None:
        """Refuse keys that were given a value while their ``when`` does not hold."""
        for name, key in keys.items():
            sibling, readers = key.rules.get("when") or ("", [])
            if not sibling or name not in literal or sibling not in values or values[sibling] in readers:
                continue
            if literal[name] != key.default:
                # one override that sets this key back, and keys that were read because of it
                defaults = {name: key.default} | find_resets(keys, {**values, name: key.default}, [name])
                set_back = " ".join(assign(f"{path}{unread}", value) for unread, value in defaults.items())
                fixes = [set_back, *(f"{path}{sibling}={spell(reader)}" for reader in readers)]
                condition = f"{path}{sibling} is {spell(values[sibling])}, not {' or '.join(map(spell, readers))}"
                message = f"is {literal[name]!r}, but nothing reads it: {condition}"
                self.refuse(f"{path}{name}", message, hint=" or ".join(fixes), is_unread=True)
