"""One composition, one report: whatever is wrong with what was typed and with the files behind it, all at once."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from titanyaml.config import schema
from titanyaml.config.hydra.origins import Origins
from titanyaml.config.hydra.overrides import Typed, check_overrides, check_swept_keys
from titanyaml.config.rules.table import check_rules
from titanyaml.config.schema_keys import find_key, keys_of, nearest
from titanyaml.config.tree_check import Tree, check_tree
from titanyaml.errors import Problem

# What Hydra, OmegaConf and PyYAML raise for what a user wrote.
_USER_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, AssertionError)

EXPERIMENT_FORM = (
    "an experiment begins with the line '# @package _global_', and its defaults list says 'override /group: option'"
)


@dataclass(frozen=True)
class Report:
    """What came out of a composition.

    Args:
        cfg: with Hydra's own node; typed and converted where there are no problems; None where nothing composes.
        problems: everything wrong, each with the file and line or the override that holds the value.
    """

    cfg: DictConfig | None
    problems: list[Problem]


def compose_report(
    overrides: list[str],
    *,
    loader: Any = None,
    config_dir: str | None = None,
    config_name: str = "config",
    multirun: bool = False,
) -> Report:
    """Compose leniently and check everything.

    Args:
        overrides: as typed. config_dir: a folder of the user's own options (``--config-dir``).
        loader: Hydra's loader in use (``hydra_hook.Loader``) in place of the two names.
        multirun: the common part of a sweep: problems that single jobs can have are left to the jobs.
    """
    if loader is None:
        from titanyaml.config.hydra.compose_hook import main_loader  # that module builds on this one

        loader = main_loader(config_dir=config_dir, config_name=config_name)
    overrides, problems = _use_search_path(loader, overrides)
    typed = check_overrides(overrides, loader=loader, multirun=multirun)
    problems += typed.problems
    cfg = _compose(loader, typed, problems, multirun=multirun)
    if cfg is None:
        return Report(None, _unique(problems))
    tree = check_tree(OmegaConf.masked_copy(cfg, [name for name in cfg if name != "hydra"]), partial=multirun)
    problems += [problem for problem in tree.problems if not _hidden(problem.key, typed)]
    if multirun:
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
        problems += check_swept_keys(OmegaConf.to_container(params) if params else {}, loader=loader)
    elif "experiment" not in typed.doubtful:
        # the file of a device brings its links
        brought = {"cluster"} if "hardware" in typed.doubtful else set()
        left_out = typed.doubtful | brought
        problems += check_rules(_without(tree.values, left_out))
        problems = [
            _with_ways_on(problem, cfg, left_out, problems) if "but nothing reads it: " in problem.message else problem
            for problem in problems
        ]
    if problems:
        return Report(cfg, _unique(_located(problems, loader, typed, multirun=multirun)))
    return Report(cfg if multirun else _typed(cfg, tree), [])


def _use_search_path(loader: Any, overrides: list[str]) -> tuple[list[str], list[Problem]]:
    """(overrides that are left, problems of ``hydra.searchpath``)."""
    paths = [text for text in overrides if text.startswith("hydra.searchpath=")]
    try:
        loader.use_search_path(paths)
    except _USER_ERRORS as error:
        problem = Problem(
            "hydra.searchpath",
            _words(error),
            allowed="a list such as [file:///folder, pkg://package]",
            where=" ".join(f"override {text!r}" for text in paths),
        )
        return [text for text in overrides if text not in paths], [problem]
    return overrides, []


def _compose(loader: Any, typed: Typed, problems: list[Problem], *, multirun: bool) -> DictConfig | None:
    """Compose what is left; an override that Hydra refuses is reported and dropped, then the rest is tried."""
    while True:
        try:
            return loader.compose(typed.kept, multirun=multirun)
        except _USER_ERRORS as error:
            problem, culprit = _translate(error, typed, loader)
        problems.append(problem)
        if culprit is None:
            return None
        typed.doubtful |= {key for key, text in typed.keys if text == culprit}
        typed.kept = [text for text in typed.kept if text != culprit]
        typed.keys = [(key, text) for key, text in typed.keys if text != culprit]


def _translate(error: Exception, typed: Typed, loader: Any) -> tuple[Problem, str | None]:
    """(what Hydra's exception says, the override that caused it or None)."""
    words, culprit = _words(error), _culprit(error, typed)
    key = next((key for key, text in typed.keys if text == culprit), "")
    place = re.search(r"In '([^']+)'", words)
    where = f"{place[1]}.yaml" if place and "/" in place[1] else f"override {culprit!r}" if culprit else ""
    missing = re.search(r"Could not (?:find|load) '([\w-]+)/([^']+)'", words)
    refused = re.search(r"Could not override '([^']+)'", words)
    hint = ""
    if isinstance(error, yaml.YAMLError):
        words = f"a file is no YAML: {words}"
    elif missing:
        key, option = missing.groups()
        near = nearest(option, loader.options(key))
        words, hint = f"there is no option {option!r}", f"override /{key}: {near[0]}" if near else ""
    elif culprit and culprit.startswith("+") and re.search("Multiple values for|more than once", words):
        words, hint = "the group has an option already", culprit[1:]
    elif "Multiple values for" in words or re.search(r"@experiment\.|'experiment/[^']*'\. No match", words):
        hint = EXPERIMENT_FORM
    elif "Unsupported item value in defaults" in words:
        hint = "quotes around names that YAML reads as true, false or null"
    elif place and refused:
        near = nearest(refused[1], keys_of(schema.Config))
        hint = f"override /{near[0]}: ..." if near else ""
    elif "No match in the defaults list" in words and loader.is_group(key):
        hint = f"+{culprit} (a replay merges options over what was recorded), or single keys: {key}.<key>=<value>"
    elif refused and find_key(key) is not None and "Did you mean" not in words:
        words, hint = "is not there yet; + adds it", f"+{culprit}"
    return Problem(key, words, hint=hint, where=where), culprit


def _culprit(error: Exception, typed: Typed) -> str | None:
    """The kept override that an exception speaks of; where it names none, the experiment."""
    texts = [str(error), str(error.__cause__ or "")]
    mark = getattr(error, "problem_mark", None)
    place = mark.name if mark is not None else " ".join(re.findall(r"In '([^']+)'", texts[0]))
    for text in reversed(typed.kept):
        key, _, value = text.lstrip("+").partition("=")
        if value and re.search(rf"(^|/){re.escape(f'{key}/{value}')}(\.yaml)?($| )", place):
            return text
    if again := re.match(r"Multiple values for ([\w-]+)|([\w-]+) appears more than once", texts[0]):
        group = again[1] or again[2]
        added = [text for text in typed.kept if text.startswith(f"+{group}=")]
        return (added or [text for text in typed.kept if text.startswith("experiment=")] or [None])[0]
    if not place:
        for text in reversed(typed.kept):
            key = text.lstrip("+~").partition("=")[0]
            if any(text in one or f"'{key}'" in one or f"{key}." in one for one in texts):
                return text
    return next((text for text in typed.kept if text.startswith("experiment=")), None)


def _words(error: Exception) -> str:
    """The first sentence of an exception and of its cause, on one line."""
    first = " ".join(str(error).split("\nAvailable options")[0].split("\nTo append")[0].split())
    cause = error.__cause__
    if cause is not None and not isinstance(error, yaml.YAMLError):
        first = f"{first.rstrip('.')}: {str(cause).splitlines()[0]}" if first else str(cause).splitlines()[0]
    return first or type(error).__name__


def _hidden(key: str, typed: Typed) -> bool:
    """A problem that would only repeat another, or that a sweep's own value takes away."""
    return any(key == one or key.startswith(f"{one}.") for one in (*typed.doubtful, *typed.swept))


def _without(values: dict[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """A copy of a nested tree that lacks some dotted keys."""
    return {
        name: _without(value, keys, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if f"{prefix}{name}" not in keys
    }


def _with_ways_on(problem: Problem, cfg: DictConfig, left_out: set[str], known: list[Problem]) -> Problem:
    """The problem of a key that nothing reads, without the ways that lead into another one.

    The first, which sets the key back, stays.
    """
    first, *others = problem.hint.split(" or ")
    plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [name for name in cfg if name != "hydra"]))
    # what is said of other keys is said anyway; what a rule says of this one has to end too
    told = {(one.key, one.message) for one in known if one.key != problem.key}

    def leads_on(way: str) -> bool:
        changed = OmegaConf.create(plain)
        for assigned in shlex.split(way):
            key, _, value = assigned.partition("=")
            if "." not in key:
                return True  # an option: only a composition would tell
            OmegaConf.update(changed, key, yaml.safe_load(value))
        tree = check_tree(changed)
        found = [*tree.problems, *check_rules(_without(tree.values, left_out))]
        return all((one.key, one.message) in told for one in found)

    return dataclasses.replace(problem, hint=" or ".join([first, *filter(leads_on, others)]))


def _located(problems: list[Problem], loader: Any, typed: Typed, *, multirun: bool) -> list[Problem]:
    origins = Origins(typed.keys, lambda: loader.files(typed.kept, multirun=multirun))
    return [
        problem if problem.where or not problem.key else dataclasses.replace(problem, where=origins.of(problem.key))
        for problem in problems
    ]


def _unique(problems: list[Problem]) -> list[Problem]:
    return list(dict.fromkeys(problems))


def _typed(cfg: DictConfig, tree: Tree) -> DictConfig:
    """The tree with the schema's types and the values converted, as Hydra itself would have given it."""
    typed = OmegaConf.merge(OmegaConf.structured(schema.Config), tree.literal)
    with flag_override(typed, ["struct", "no_deepcopy_set_nodes"], [False, True]):
        typed["hydra"] = cfg.hydra
    OmegaConf.set_struct(typed, True)
    OmegaConf.set_readonly(typed.hydra, False)
    return typed
