"""Types of single values: conversion, and how they and their legal values are spelled."""

from __future__ import annotations

import math
from typing import Any

from titanyaml.config import schema
from titanyaml.config.schema_keys import Key

BAD: Any = object()  # stands for a value that has a problem


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
    """The value in a scalar type, BAD where it has another."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind is bool and isinstance(value, bool):
        return value
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


def kind_hint(key: Key, value: Any, path: str) -> str:
    """What to type instead of a value of the wrong type, where it can be guessed."""
    if key.kind is int and isinstance(value, float) and math.isfinite(value):
        return f"{path}={math.floor(value)} or {path}={math.ceil(value)}"
    if key.kind is bool and str(value).lower() in ("on", "yes", "1", "off", "no", "0"):
        return f"{path}={'true' if str(value).lower() in ('on', 'yes', '1') else 'false'}"
    if key.kind is str and not isinstance(value, dict | list):
        return f"'{path}=\"{spell(value)}\"'"
    return ""
