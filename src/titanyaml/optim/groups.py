"""Which parameters share a learning-rate factor and a weight decay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from titanyaml.config import schema
from titanyaml.errors import ConfigError, Problem


@dataclass(frozen=True)
class Group:
    """Parameters, by name, with their settings."""

    names: tuple[str, ...]
    lr_scale: float
    weight_decay: float


def make_groups(spec: schema.Optim, named_params: Mapping[str, Tensor]) -> list[Group]:
    """Sort parameters by ``spec.groups``, where the first match wins; those of less than two dimensions never decay.

    Raises:
        ConfigError: a pattern is no regular expression, or has no effect: it matches nothing, only what earlier
            patterns took, or it sets a weight decay for norms and biases alone.
    """
    rules = [*spec.groups, schema.ParamGroup(pattern="")]  # the last one takes the rest
    taken, problems = _match(spec.groups, list(named_params))
    taken.append([name for name in named_params if not any(name in names for names in taken)])
    settings: dict[tuple[float, float], list[str]] = {}
    for index, (rule, names) in enumerate(zip(rules, taken, strict=True)):
        decay = spec.weight_decay if rule.weight_decay is None else rule.weight_decay
        flat = [name for name in names if named_params[name].ndim < 2]
        if rule.weight_decay and names and len(flat) == len(names):
            problems.append(
                Problem(
                    f"optim.groups.{index}.weight_decay",
                    f"{decay:g} for norms and biases only ({_shown(names)})",
                    allowed="norms and biases never decay",
                    hint="weight_decay: null",
                )
            )
        for name in names:
            settings.setdefault((rule.lr_scale, 0.0 if name in flat else decay), []).append(name)
    if problems:
        raise ConfigError(problems)
    return [Group(tuple(names), lr_scale, decay) for (lr_scale, decay), names in settings.items()]


def _match(rules: list[schema.ParamGroup], names: list[str]) -> tuple[list[list[str]], list[Problem]]:
    """Names that each pattern gets, and the patterns that get none."""
    taken: list[list[str]] = []
    problems: list[Problem] = []
    for index, rule in enumerate(rules):
        key = f"optim.groups.{index}.pattern"
        try:
            matches = [name for name in names if re.search(rule.pattern, name)]
        except re.error as error:
            problems.append(Problem(key, f"{rule.pattern!r} is no regular expression: {error}"))
            matches = []
        else:
            if not matches:
                problems.append(
                    Problem(
                        key,
                        f"{rule.pattern!r} matches no parameter",
                        allowed="a regular expression found in a name",
                        hint=f"nearest names: {_shown(_nearest(rule.pattern, names))}",
                    )
                )
        free = [name for name in matches if not any(name in earlier for earlier in taken)]
        if matches and not free:
            problems.append(
                Problem(
                    key,
                    f"{rule.pattern!r} matches only what earlier patterns took ({_shown(matches)})",
                    allowed="the first match wins",
                    hint="put the narrower pattern first",
                )
            )
        taken.append(free)
    return taken, problems


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """Parameter names that look most like the pattern."""
    plain = re.sub(r"[\\^$*+?()\[\]{}|]", "", pattern)
    return difflib.get_close_matches(plain, names, n=3, cutoff=0.0)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
