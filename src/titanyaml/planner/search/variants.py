"""Variants of a configuration: with other values of keys, whether the rules allow them, and what to type for them.

Thousands of variants share a few sections, and a rule reads few keys. So a section is made once for equal values, and a
rule is asked once for equal values of the keys that it reads: rules were two thirds of a search, now they are a tenth.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from titanyaml.config import degrees
from titanyaml.config.rules import table
from titanyaml.config.rules.hints import find_group_resets
from titanyaml.config.rules.view import Rule, Unknown, View
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema import Config
from titanyaml.config.schema_keys import find_key
from titanyaml.planner.search import space
from titanyaml.planner.search.space import Values

#: Sections in which variants differ; a rule that reads none of them says the same of all variants.
SECTIONS = ("parallel", "train", "ac", "quant", "compile", "optim", "launch")
#: Of these, sections with keys that are read only for some values of others.
_CONDITIONAL_SECTIONS = ("ac", "quant", "compile")
#: Keys that are part of every override.
_BATCH_KEYS = ("train.local_batch", "train.global_batch")
#: The problem of a typed key.
UNREAD = "is typed, and nothing would read it"


@dataclass
class _Answers:
    """A tree of what a rule answered: given the values read so far, the next key that it reads is always the same."""

    key: str = ""  # that it reads next; "" at a leaf
    branches: dict[Any, _Answers] = field(default_factory=dict)
    problem: str = ""  # at a leaf


class Variants:
    """Variants of ``base``. typed: dotted keys that the user gave."""

    def __init__(self, base: Config, typed: frozenset[str] = frozenset()) -> None:
        self.base, self.typed = base, typed
        self._values = dataclasses.asdict(base)
        self._sections: dict[tuple[Any, ...], tuple[Any, Values]] = {}
        self._answers: dict[str, _Answers] = {}
        # a rule that reads nothing in which variants differ was answered for ``base``
        self._rules = [rule for rule in table.RULES if self._ask(rule, base)[0]]

    def config(self, values: Values) -> Config:
        """``base`` with these values, and with the defaults of keys that nothing reads then."""
        variant: Config = copy.copy(self.base)
        for section, changed in _by_section(values).items():
            setattr(variant, section, self._section(section, changed)[0])
        return variant

    def problem(self, values: Values, variant: Config) -> str:
        """What is wrong with ``variant = config(values)``: the first typed key that is unread or rule that is broken,
        "" without."""
        for key in self._unread(values):
            if key in self.typed and key not in space.CHOSEN_KEYS:
                return f"{key} {UNREAD}"
        return next((problem for rule in self._rules if (problem := self._answer(rule, variant))), "")

    def overrides(self, values: Values) -> str:
        """What to type for ``config(values)`` beside overrides of other keys."""
        mesh = {axis: values[f"parallel.{axis}"] for axis in degrees.AXES}
        words = [f"parallel={space.mesh_name(mesh)}", *(f"{key}={values[key]}" for key in _BATCH_KEYS)]
        words.append(f"ac={values['ac.mode']}")
        for key, value in (values | self._unread(values)).items():
            default = default_of(key)
            is_unread = key == "parallel.pp_schedule" and mesh["pp"] == 1
            is_in_words = key in (*_BATCH_KEYS, "ac.mode", "launch.nproc") or key.partition(".")[2] in mesh
            if is_unread or is_in_words:
                continue
            # a default is left out where the command has it anyway
            if value != default or value != attrgetter(key)(self.base) or key in self.typed:
                words.append(f"{'quant' if key == 'quant.recipe' else key}={spell(value)}")
        return " ".join(words)

    def _unread(self, values: Values) -> Values:
        """Keys that these values leave unread, with their defaults."""
        return {
            f"{section}.{name}": value
            for section, changed in _by_section(values).items()
            for name, value in self._section(section, changed)[1].items()
        }

    def _section(self, section: str, changed: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(section with these values, those of its keys that nothing reads then and had another value)."""
        cache_key = (section, *changed.items())
        if cache_key not in self._sections:
            unread = find_group_resets(self.base, section, **changed) if section in _CONDITIONAL_SECTIONS else {}
            variant = dataclasses.replace(getattr(self.base, section), **(changed | unread))
            self._sections[cache_key] = variant, unread
        return self._sections[cache_key]

    def _answer(self, rule: Rule, variant: Config) -> str:
        """What a rule says of a variant: out of the tree of its answers, or asked."""
        answers = self._answers[rule.name]
        while answers.key:
            value = attrgetter(answers.key)(variant)
            branch = answers.branches.get(_hashable(value))
            if branch is None:
                return self._ask(rule, variant)[1]
            answers = branch
        return answers.problem

    def _ask(self, rule: Rule, variant: Config) -> tuple[dict[str, Any], str]:
        """(keys of ``SECTIONS`` that a rule reads, in this order, with their values; what it says). Grows its tree."""
        view = _RecordingView(self._values | {name: vars(getattr(variant, name)) for name in SECTIONS})
        try:
            problem = rule.check(view)
            message = f"{problem.key} {problem.message}" if problem else ""
        except Unknown:  # of a key with a problem of its own, which is reported by itself
            message = ""
        answers = self._answers.setdefault(rule.name, _Answers())
        for key, value in view.read.items():
            answers.key = key
            answers = answers.branches.setdefault(value, _Answers())
        answers.problem = message
        return view.read, message


def _by_section(values: Values) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def default_of(key: str) -> Any:
    """The schema's default of a dotted key."""
    schema_key = find_key(key)
    assert schema_key is not None, key
    return schema_key.default


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value


class _RecordingView(View):
    """Records which keys of ``SECTIONS`` are read, with their values, in this order."""

    def __init__(self, values: dict[str, Any], path: str = "", read: dict[str, Any] | None = None) -> None:
        super().__init__(values)
        self._path, self.read = path, {} if read is None else read

    def __getattr__(self, name: str) -> Any:
        inner = f"{self._path}.{name}" if self._path else name
        value = self._values.get(name)
        if isinstance(value, dict) and not self._path:
            return _RecordingView(value, inner, self.read)
        if self._path in SECTIONS and name in self._values:
            self.read.setdefault(inner, _hashable(value))
        return super().__getattr__(name)
