"""Write the table of keys in docs/configuration.md from the schema: ``python docs/make_configuration.py``."""

from __future__ import annotations

from pathlib import Path

from titanyaml.config import schema, schema_keys
from titanyaml.config.keys import MISSING
from titanyaml.config.scalar_types import spell

PAGE = Path(__file__).with_name("configuration.md")
BEGIN, END = "<!-- keys: written by docs/make_configuration.py -->\n", "<!-- end of keys -->\n"

_KINDS = {
    int: "integer",
    float: "number",
    bool: "true, false",
    str: "text",
    list[str]: "list of texts",
    list[int]: "list of integers",
    list[schema.ParamGroup]: "list of sections",
    dict: "mapping",
}
_BOUNDS = (("low", ">="), ("above", ">"), ("high", "<="), ("below", "<"))


def tables() -> str:
    """One table a section, in the order of the tree."""
    parts = []
    for name, key in schema_keys.keys_of(schema.Config).items():
        if key.is_section:
            parts.append(_section(f"`{name}`: {key.rules['doc']}", key.kind, f"{name}."))
    parts.append(_section("`optim.groups`: one of the list", schema.ParamGroup, ""))
    user = schema_keys.keys_of(schema.Config)["user"]
    return "\n".join([*parts, f"### `user`: {user.rules['doc']}\n", "`+user.<name>=<value>` adds a key.\n"])


def page(text: str) -> str:
    """The page with a fresh table."""
    head, _, rest = text.partition(BEGIN)
    assert rest, f"{PAGE.name} has lost the line {BEGIN!r}"
    return f"{head}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


def _section(title: str, kind: type, prefix: str) -> str:
    return "\n".join(
        [f"### {title}\n", "| key | type | default | meaning |", "|---|---|---|---|", *_rows(kind, prefix), ""]
    )


def _rows(kind: type, prefix: str) -> list[str]:
    rows = []
    for name, key in schema_keys.keys_of(kind).items():
        cells = [f"`{prefix}{name}`", _type(key), _default(key), _meaning(key, prefix)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if key.is_section:
            rows += _rows(key.kind, f"{prefix}{name}.")
    return rows


def _type(key: schema_keys.Key) -> str:
    choices = key.rules.get("choices")
    if choices:
        names = ", ".join(f"`{spell(choice)}`" for choice in choices)
        text = f"list of {names}" if key.kind == list[str] else names
    else:
        text = "section" if key.is_section else _KINDS.get(key.kind, "mapping")
    bounds = [f"{sign} {key.rules[name]:g}" for name, sign in _BOUNDS if key.rules.get(name) is not None]
    return f"{text} {', '.join(bounds)}".rstrip() + (" or null" if key.optional else "")


def _default(key: schema_keys.Key) -> str:
    if key.default == MISSING:
        return "required"
    if key.is_section and key.default is not None:
        return "the rows below"
    return "`{}`" if key.default == {} else f"`{spell(key.default)}`"


def _meaning(key: schema_keys.Key, prefix: str) -> str:
    sibling, values = key.rules.get("when") or ("", [])
    condition = f" (read where `{prefix}{sibling}` is {' or '.join(map(spell, values))})" if sibling else ""
    return key.rules["doc"] + condition


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
