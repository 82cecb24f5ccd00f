"""Configurations around one: with other values of keys, whether the rules allow them, and what to type for them.

Thousands of candidates share a few sections, and a rule reads few keys: both are made, or asked, once for equal
values.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from titanyaml.config import degrees
from titanyaml.config.kinds import spell
from titanyaml.config.nearest import keys_of
from titanyaml.config.rules import table
from titanyaml.config.rules.hints import set_back
from titanyaml.config.rules.view import Rule, Unknown, View
from titanyaml.config.schema import Config
from titanyaml.planner.search import space
from titanyaml.planner.search.space import Values

#: Sections in which candidates differ; a rule that reads none of them holds for all candidates or for none.
SECTIONS = ("parallel", "train", "ac", "quant", "compile", "optim", "launch")
#: Of these, groups with keys that only some values of others read.
_CONDITIONAL = ("ac", "quant", "compile")
#: Said of a key.
UNREAD = "is typed, and nothing would read it"


@dataclass
class _Known:
    """What a rule reads next, and what is known for each value of it; or, at the end, what it says."""

    key: str = ""
    then: dict[Any, _Known] = field(default_factory=dict)
    says: str = ""


class Around:
    """Around ``base``. typed: dotted keys that the user gave."""

    def __init__(self, base: Config, typed: frozenset[str] = frozenset()) -> None:
        self.base, self.typed = base, typed
        self._values = dataclasses.asdict(base)
        self._sections: dict[tuple[Any, ...], tuple[Any, Values]] = {}
        self._known: dict[str, _Known] = {}
        # those that have seen the same of all candidates, as ``base`` shows, are not asked again
        self._asked = [rule for rule in table.RULES if self._ask(rule, base)[0]]

    def config(self, values: Values) -> Config:
        """With these values of keys, and the defaults of those that nothing reads then."""
        made: Config = copy.copy(self.base)
        for section, changed in _by_section(values).items():
            setattr(made, section, self._section(section, changed)[0])
        return made

    def problem(self, values: Values, made: Config) -> str:
        """Of ``config(values)``: a typed key that nothing reads, or what the first broken rule says; "" without."""
        for key in self._unread(values):
            if key in self.typed and key not in space.CHOSEN:
                return f"{key} {UNREAD}"
        for rule in self._asked:
            if problem := self._says(rule, made):
                return problem
        return ""

    def change(self, values: Values) -> str:
        """What to type for ``config(values)`` beside what was typed of other keys."""
        of = {axis: values[f"parallel.{axis}"] for axis in degrees.AXES}
        words = [f"parallel={space.name(of)}", *(f"{key}={values[key]}" for key in _ALWAYS)]
        words.append(f"ac={values['ac.mode']}")
        for key, value in (values | self._unread(values)).items():
            default = keys_of(type(_section_of(self.base, key)))[key.partition(".")[2]].default
            unread = key == "parallel.pp_schedule" and of["pp"] == 1
            told = unread or key in (*_ALWAYS, "ac.mode", "launch.nproc") or key.partition(".")[2] in of
            if not told and (value != default or value != self._at(key) or key in self.typed):
                words.append(f"{'quant' if key == 'quant.recipe' else key}={spell(value)}")
        return " ".join(words)

    def _at(self, key: str) -> Any:
        return getattr(_section_of(self.base, key), key.partition(".")[2])

    def _unread(self, values: Values) -> Values:
        """Keys that have to be set back to their defaults."""
        return {
            f"{section}.{name}": value
            for section, changed in _by_section(values).items()
            for name, value in self._section(section, changed)[1].items()
        }

    def _section(self, section: str, changed: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(section of a configuration, those of its keys that nothing reads and had another value)."""
        wanted = (section, *changed.items())
        if wanted not in self._sections:
            back = set_back(self.base, section, **changed) if section in _CONDITIONAL else {}
            made = dataclasses.replace(getattr(self.base, section), **(changed | back))
            self._sections[wanted] = made, back
        return self._sections[wanted]

    def _says(self, rule: Rule, made: Config) -> str:
        known = self._known[rule.name]
        while known.key:
            found = known.then.get(_hashable(getattr(_section_of(made, known.key), known.key.partition(".")[2])))
            if found is None:
                return self._ask(rule, made)[1]
            known = found
        return known.says

    def _ask(self, rule: Rule, made: Config) -> tuple[list[tuple[str, Any]], str]:
        """(keys of ``SECTIONS`` that it reads, with their values; what it says). Kept in the order of reading: given
        the values so far, what it reads next is always the same."""
        view = _Watched(self._values | {name: vars(getattr(made, name)) for name in SECTIONS})
        try:
            problem = rule.check(view)
            says = f"{problem.key} {problem.message}" if problem else ""
        except Unknown:
            says = ""
        known = self._known.setdefault(rule.name, _Known())
        for key, value in view.read.items():
            known.key = key
            known = known.then.setdefault(value, _Known())
        known.says = says
        return list(view.read.items()), says


_ALWAYS = ("train.local_batch", "train.global_batch")


def _by_section(values: Values) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def _section_of(config: Config, key: str) -> Any:
    return getattr(config, key.partition(".")[0])


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value


class _Watched(View):
    """Notes which keys of ``SECTIONS`` are read, with their values, in this order."""

    def __init__(self, values: dict[str, Any], path: str = "", read: dict[str, Any] | None = None) -> None:
        super().__init__(values)
        self._path, self.read = path, {} if read is None else read

    def __getattr__(self, name: str) -> Any:
        inner = f"{self._path}.{name}" if self._path else name
        value = self._values.get(name)
        if isinstance(value, dict) and not self._path:
            return _Watched(value, inner, self.read)
        if self._path in SECTIONS and name in self._values:
            self.read.setdefault(inner, _hashable(value))
        return super().__getattr__(name)
