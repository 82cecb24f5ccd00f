"""The pipeline for people (a table) and for programs (records of ``pipeline.json``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from titanyaml.pipeline.protocol import Change
from titanyaml.pipeline.resolve import Resolved


def table(resolved: Resolved, changes: Sequence[tuple[str, Change]] | None = None) -> Table:
    """A row per step in order, with what it did where it has run, then a row per node that is off with the reason."""
    view = Table(title="pipeline", title_justify="left")
    view.add_column("#", justify="right")
    for column in ("stage", "node", "class"):
        view.add_column(column, no_wrap=True)
    view.add_column("what it did" if changes is not None else "", overflow="fold")
    view.add_column("modules", justify="right")
    done = dict(changes or [])
    for record in records(resolved, changes):
        if record["off"]:
            view.add_row("-", "", record["node"], "", f"off: {record['off']}", "", style="dim")
            continue
        change = done.get(record["node"])
        what = "\n".join([change.summary, *change.left_alone()]) if change else ""
        count = "" if change is None else "all" if "*" in change.modules else str(len(change.modules))
        view.add_row(
            str(record["order"]), record["stage"], record["node"], record["class"].rpartition(".")[2], what, count
        )
    return view


def by_module(resolved: Resolved, changes: Sequence[tuple[str, Change]]) -> Table:
    """What each step touched and left alone, by module; blocks that were treated alike share a line."""
    view = Table(title="by module", title_justify="left")
    view.add_column("node", no_wrap=True)
    view.add_column("modules", overflow="fold")
    view.add_column("left alone because", overflow="fold")
    done = dict(changes)
    for name, _ in resolved.steps:
        change = done[name]
        whole = ["the whole model"] if "*" in change.modules else []
        for module in whole or together(change.modules):
            view.add_row(name, module, "")
        reasons = dict.fromkeys(change.skipped.values())
        for reason in reasons:
            for module in together([m for m, why in change.skipped.items() if why == reason]):
                view.add_row(name, module, reason, style="dim")
    return view


def together(names: Iterable[str]) -> list[str]:
    """Names that differ in one number only, as one: ``layers.{0-79}.attention.wq``."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is None:
            numbers[name] = []
        else:
            numbers.setdefault(".".join([*parts[:place], "{}", *parts[place + 1 :]]), []).append(int(parts[place]))
    return [name.replace("{}", _ranges(found), 1) if found else name for name, found in numbers.items()]


def _ranges(numbers: list[int]) -> str:
    """``7`` or ``{0-3,5}``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return text if text.isdigit() else f"{{{text}}}"


def records(resolved: Resolved, changes: Sequence[tuple[str, Change]] | None = None) -> list[dict[str, Any]]:
    """JSON-ready records: the steps in order, then the nodes that are off.

    Keys: order (from 1; null when off), stage, node, class (dotted path), summary, modules (names of those touched,
    ``["*"]`` for the whole model, null before the step has run), skipped (module to reason), off (reason, or null).
    """
    done = dict(changes or [])
    rows = []
    for order, (name, transform) in enumerate(resolved.steps, 1):
        change = done.get(name)
        rows.append(
            {
                "order": order,
                "stage": resolved.stages[name],
                "node": name,
                "class": f"{type(transform).__module__}.{type(transform).__qualname__}",
                "summary": change.summary if change else "",
                "modules": None if change is None else list(change.modules),
                "skipped": dict(change.skipped) if change else {},
                "off": None,
            }
        )
    for name, reason in resolved.off.items():
        rows.append(
            {
                "order": None,
                "stage": None,
                "node": name,
                "class": None,
                "summary": "",
                "modules": None,
                "skipped": {},
                "off": reason,
            }
        )
    return rows
