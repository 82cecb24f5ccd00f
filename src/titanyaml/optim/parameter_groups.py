"""Which parameters share a learning-rate factor and a weight decay."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from titanyaml.config import schema
from titanyaml.errors import ConfigError, Problem


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters, by name, with their settings."""

    names: tuple[str, ...]
    lr_scale: float
    weight_decay: float


def make_groups(spec: schema.Optim, named_params: Mapping[str, Tensor]) -> list[ParameterGroup]:
    """Sort parameters by ``spec.groups``: the first matching pattern counts; norms and biases never decay.

    Raises:
        ConfigError: a pattern is no regular expression, or has no effect: it matches nothing, only what earlier
            patterns took, or it sets a weight decay for norms and biases alone.
    """
    matched_names, problems = _match(spec.groups, list(named_params))
    # a last group without a pattern takes all parameters that no pattern matched
    rules = [*spec.groups, schema.ParamGroup(pattern="")]
    matched_names.append([name for name in named_params if not any(name in names for names in matched_names)])
    settings: dict[tuple[float, float], list[str]] = {}
    for index, (rule, names) in enumerate(zip(rules, matched_names, strict=True)):
        decay = spec.weight_decay if rule.weight_decay is None else rule.weight_decay
        # Less than two dimensions: norms and biases. Decay would pull a norm's scale towards 0 instead of 1.
        vectors = [name for name in names if named_params[name].ndim < 2]
        if rule.weight_decay and names and len(vectors) == len(names):
            key, message = f"optim.groups.{index}.weight_decay", f"{decay:g} for norms and biases only"
            allowed, hint = "norms and biases never decay", "weight_decay: null"
            problems.append(Problem(key, f"{message} ({_preview(names)})", allowed=allowed, hint=hint))
        for name in names:
            settings.setdefault((rule.lr_scale, 0.0 if name in vectors else decay), []).append(name)
    if problems:
        raise ConfigError(problems)
    return [ParameterGroup(tuple(names), lr_scale, decay) for (lr_scale, decay), names in settings.items()]


def _match(rules: list[schema.ParamGroup], names: list[str]) -> tuple[list[list[str]], list[Problem]]:
    """Return the names that each pattern takes, and a problem for each pattern that takes none."""
    matched_names: list[list[str]] = []
    problems: list[Problem] = []
    for index, rule in enumerate(rules):
        key, pattern = f"optim.groups.{index}.pattern", rule.pattern
        try:
            matches = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            problems.append(Problem(key, f"{pattern!r} is no regular expression: {error}"))
            matched_names.append([])
            continue
        free = [name for name in matches if not any(name in earlier for earlier in matched_names)]
        matched_names.append(free)
        if not matches:
            allowed, hint = (
                "a regular expression found in a name",
                f"nearest names: {_preview(_nearest(pattern, names))}",
            )
            problems.append(Problem(key, f"{pattern!r} matches no parameter", allowed=allowed, hint=hint))
        elif not free:
            message = f"{pattern!r} matches only what earlier patterns took ({_preview(matches)})"
            hint = "put the narrower pattern first"
            problems.append(Problem(key, message, allowed="the first match wins", hint=hint))
    return matched_names, problems


def _nearest(pattern: str, names: list[str]) -> list[str]:
    """The three parameter names most similar to the pattern's text."""
    literal = re.sub(r"[\\^$*+?()\[\]{}|]", "", pattern)
    return difflib.get_close_matches(literal, names, n=3, cutoff=0.0)


def _preview(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
