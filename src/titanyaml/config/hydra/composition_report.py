"""One composition, one report: everything wrong with the overrides and with the files behind them, all at once.

Overrides are checked one by one, the rest is composed leniently (``Loader.compose``), the tree is checked against the
schema (``config/tree_check.py``), then against the rules between keys (``config/rules``).
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from titanyaml.config import dump, schema
from titanyaml.config.hydra.origins import Origins
from titanyaml.config.hydra.overrides import SortedOverrides, check_swept_keys, sort_overrides
from titanyaml.config.rules.table import check_rules
from titanyaml.config.schema_keys import find_key, is_under, keys_of, nearest
from titanyaml.config.tree_check import CheckedTree, check_tree
from titanyaml.errors import Problem

if TYPE_CHECKING:
    from titanyaml.config.hydra.compose_hook import Loader

# What Hydra, OmegaConf and PyYAML raise for what a user wrote.
_USER_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, AssertionError)

EXPERIMENT_FORM = (
    "an experiment begins with the line '# @package _global_', and its defaults list says 'override /group: option'"
)


@dataclass(frozen=True)
class CompositionReport:
    """cfg: with Hydra's own node; typed and converted if there are no problems; None if nothing composes.
    problems: everything wrong, each with the file and line or the override that holds the value."""

    cfg: DictConfig | None
    problems: list[Problem]

    def config(self) -> schema.Config:
        """The configuration as dataclasses; its values may be in the wrong range if there are problems."""
        assert self.cfg is not None, self.problems
        return dump.to_dataclass(without_hydra(self.cfg))


def compose_report(overrides: list[str], *, loader: Loader, multirun: bool = False) -> CompositionReport:
    """Compose leniently and check everything.

    Args:
        multirun: the common part of a sweep: problems that single jobs can have are left to the jobs.
    """
    overrides, problems = _use_search_path(loader, overrides)
    result = sort_overrides(overrides, loader=loader, multirun=multirun)
    problems += result.problems
    cfg = _compose(loader, result, problems, multirun=multirun)
    if cfg is None:
        return CompositionReport(None, list(dict.fromkeys(problems)))
    tree = check_tree(without_hydra(cfg), partial=multirun)
    # not those that repeat the problem of an override, nor of values that the jobs of a sweep replace
    problems += [problem for problem in tree.problems if not is_under(problem.key, result.doubtful | result.swept)]
    if multirun:
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or OmegaConf.create({})
        problems += check_swept_keys(cast(dict[str, Any], OmegaConf.to_container(params)), loader=loader)
    elif "experiment" not in result.doubtful:  # without its file the tree is not the one that was meant
        # the file of a device sets its links too
        unknown = result.doubtful | ({"cluster"} if "hardware" in result.doubtful else set())
        problems += check_rules(_without(tree.values, unknown))
        reported = problems
        problems = [_with_final_fixes(p, cfg, unknown, reported) if p.is_unread else p for p in reported]
    if problems:
        # two checks may find the same problem
        return CompositionReport(cfg, list(dict.fromkeys(_located(problems, loader, result, multirun=multirun))))
    return CompositionReport(cfg if multirun else _typed(cfg, tree), [])


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A copy of the tree that lacks Hydra's own node."""
    return OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])


def _use_search_path(loader: Loader, overrides: list[str]) -> tuple[list[str], list[Problem]]:
    """(overrides that are left, problems of ``hydra.searchpath``)."""
    paths = [text for text in overrides if text.startswith("hydra.searchpath=")]
    try:
        loader.use_search_path(paths)
    except _USER_ERRORS as error:
        origin = " ".join(f"override {text!r}" for text in paths)
        allowed = "a list such as [file:///folder, pkg://package]"
        problem = Problem("hydra.searchpath", _first_sentence(error), allowed=allowed, origin=origin)
        return [text for text in overrides if text not in paths], [problem]
    return overrides, []


def _compose(loader: Loader, result: SortedOverrides, problems: list[Problem], *, multirun: bool) -> DictConfig | None:
    """Compose what is left; an override that Hydra refuses is reported and dropped, then the rest is tried."""
    while True:  # each pass drops an override
        try:
            return loader.compose(result.composable, multirun=multirun)
        except _USER_ERRORS as error:
            problem, culprit = _translate(error, result, loader)
        problems.append(problem)
        if culprit is None:
            return None
        result.drop(culprit)


def _translate(error: Exception, result: SortedOverrides, loader: Loader) -> tuple[Problem, str | None]:
    """(Hydra's exception in our words, the override that caused it or None).

    The patterns are Hydra 1.3's messages; one that is not recognised is shown as it is.
    """
    message, culprit = _first_sentence(error), _culprit(error, result)
    key = next((key for key, text in result.keys if text == culprit), "")
    file = re.search(r"In '([^']+)'", message)
    origin = f"{file[1]}.yaml" if file and "/" in file[1] else f"override {culprit!r}" if culprit else ""
    missing = re.search(r"Could not (?:find|load) '([\w-]+)/([^']+)'", message)
    refused = re.search(r"Could not override '([^']+)'", message)
    hint = ""
    if isinstance(error, yaml.YAMLError):
        message = f"a file is no YAML: {message}"
    elif missing:
        key, option = missing.groups()
        similar = nearest(option, loader.options(key))
        message, hint = f"there is no option {option!r}", f"override /{key}: {similar[0]}" if similar else ""
    elif culprit and culprit.startswith("+") and re.search("Multiple values for|more than once", message):
        message, hint = "the group has an option already", culprit[1:]
    elif "Multiple values for" in message or re.search(r"@experiment\.|'experiment/[^']*'\. No match", message):
        hint = EXPERIMENT_FORM
    elif "Unsupported item value in defaults" in message:
        hint = "quotes around names that YAML reads as true, false or null"
    elif file and refused:
        similar = nearest(refused[1], keys_of(schema.Config))
        hint = f"override /{similar[0]}: ..." if similar else ""
    elif "No match in the defaults list" in message and loader.is_group(key):
        hint = f"+{culprit} (a replay merges options over what was recorded), or single keys: {key}.<key>=<value>"
    elif refused and find_key(key) is not None and "Did you mean" not in message:
        message, hint = "is not there yet; + adds it", f"+{culprit}"
    return Problem(key, message, hint=hint, origin=origin), culprit


def _culprit(error: Exception, result: SortedOverrides) -> str | None:
    """The override that an exception is about: by its file, its group or its text; if none matches, the experiment."""
    messages = [str(error), str(error.__cause__ or "")]
    experiment = next((text for text in result.composable if text.startswith("experiment=")), None)
    mark = getattr(error, "problem_mark", None)  # of a YAML error
    files = mark.name if mark is not None else " ".join(re.findall(r"In '([^']+)'", messages[0]))
    for text in reversed(result.composable):
        key, _, value = text.lstrip("+").partition("=")
        if value and re.search(rf"(^|/){re.escape(f'{key}/{value}')}(\.yaml)?($| )", files):
            return text
    if repeated := re.match(r"Multiple values for ([\w-]+)|([\w-]+) appears more than once", messages[0]):
        group = repeated[1] or repeated[2]
        return next((text for text in result.composable if text.startswith(f"+{group}=")), experiment)
    if not files:
        for text in reversed(result.composable):
            key = text.lstrip("+~").partition("=")[0]
            if any(text in message or f"'{key}'" in message or f"{key}." in message for message in messages):
                return text
    return experiment


def _first_sentence(error: Exception) -> str:
    """The first sentence of an exception and of its cause, on one line."""
    first = " ".join(str(error).split("\nAvailable options")[0].split("\nTo append")[0].split())
    cause = error.__cause__
    if cause is not None and not isinstance(error, yaml.YAMLError):
        first = f"{first.rstrip('.')}: {str(cause).splitlines()[0]}" if first else str(cause).splitlines()[0]
    return first or type(error).__name__


def _without(values: dict[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """A copy of a nested tree that lacks some dotted keys."""
    return {
        name: _without(value, keys, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if f"{prefix}{name}" not in keys
    }


def _with_final_fixes(problem: Problem, cfg: DictConfig, unknown: set[str], reported: list[Problem]) -> Problem:
    """The problem of an unread key, with only those fixes in its hint that lead to no other problem."""
    first, *alternatives = problem.hint.split(" or ")
    plain = OmegaConf.to_container(without_hydra(cfg))
    # problems of other keys are reported anyway; those of this key must end with the fix
    elsewhere = {(p.key, p.message) for p in reported if p.key != problem.key}

    def is_final(fix: str) -> bool:
        changed = OmegaConf.create(plain)
        for assignment in shlex.split(fix):
            key, _, value = assignment.partition("=")
            if "." not in key:
                return True  # an option: only a composition would tell
            OmegaConf.update(changed, key, yaml.safe_load(value))
        tree = check_tree(cast(DictConfig, changed))
        remaining = [*tree.problems, *check_rules(_without(tree.values, unknown))]
        return all((p.key, p.message) in elsewhere for p in remaining)

    # the first stays in any case: a problem without a way out helps nobody
    return dataclasses.replace(problem, hint=" or ".join([first, *filter(is_final, alternatives)]))


def _located(problems: list[Problem], loader: Loader, result: SortedOverrides, *, multirun: bool) -> list[Problem]:
    origins = Origins(result.keys, lambda: loader.files(result.composable, multirun=multirun))
    return [
        problem if problem.origin or not problem.key else dataclasses.replace(problem, origin=origins.of(problem.key))
        for problem in problems
    ]


def _typed(cfg: DictConfig, tree: CheckedTree) -> DictConfig:
    """The tree with the schema's types and the values converted, as Hydra itself would have given it."""
    typed = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema.Config), tree.literal))
    with flag_override(typed, ["struct", "no_deepcopy_set_nodes"], [False, True]):
        typed["hydra"] = cfg.hydra
    # as Hydra's own loader leaves them: an unknown key raises, and Hydra can write into its node
    OmegaConf.set_struct(typed, True)
    OmegaConf.set_readonly(typed.hydra, False)
    return typed
