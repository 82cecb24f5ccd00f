"""Types of single values: conversion, how a value is typed, and its legal values in words."""

import math
from typing import Any

from titanyaml.config import schema
from titanyaml.config.schema_keys import Key

_BOOL_WORDS = {"on": "true", "yes": "true", "1": "true", "off": "false", "no": "false", "0": "false"}
BAD: Any = object()  # stands for a value that has a problem: None is a legal value


def spell(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(spell, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def assign(key: str, value: Any) -> str:
    """``key=value`` as it is typed: in quotes, the shell's and Hydra's, where a text has blanks."""
    text = spell(value)
    return f"'{key}=\"{text}\"'" if " " in text else f"{key}={text}"


def to_kind(kind: Any, value: Any) -> Any:
    """The value in a scalar type, BAD if it has another."""
    number = isinstance(value, int | float) and not isinstance(value, bool)  # bool is a subclass of int
    if kind is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind is bool and isinstance(value, bool):
        return value
    # YAML reads run.id=2024 as a number; a float would not be spelled as it was typed (1e3)
    if kind is str and (isinstance(value, str) or (number and isinstance(value, int))):
        return str(value)
    return BAD


def describe(key: Key) -> str:
    """The legal values of a key in words."""
    if choices := key.rules.get("choices"):
        text = ", ".join(spell(choice) for choice in choices)
        return f"a list of {text}" if key.kind == list[str] else text
    words = {
        int: "an integer",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        list[str]: "a list of texts",
        list[int]: "a list of integers",
        list[schema.ParamGroup]: "a list of sections",
    }.get(key.kind, "a section")
    signs = (("low", ">="), ("above", ">"), ("high", "<="), ("below", "<"))
    bounds = [f"{sign} {_bound(key.rules[name])}" for name, sign in signs if key.rules.get(name) is not None]
    text = f"{words} {' and '.join(bounds)}" if bounds else words
    return f"{text}, or null" if key.optional else text


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def type_hint(key: Key, value: Any, path: str) -> str:
    """What to type instead of a value of the wrong type, "" if that cannot be guessed."""
    if key.kind is int and isinstance(value, float) and math.isfinite(value):
        return f"{path}={math.floor(value)} or {path}={math.ceil(value)}"
    if key.kind is bool and str(value).lower() in _BOOL_WORDS:
        return f"{path}={_BOOL_WORDS[str(value).lower()]}"
    if key.kind is str and not isinstance(value, dict | list):
        return f"'{path}=\"{spell(value)}\"'"
    return ""
