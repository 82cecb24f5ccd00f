"""The plugin pipeline for people (tables) and for programs (records of ``pipeline.json``)."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from titanyaml.pipeline.protocol import Change
from titanyaml.pipeline.resolve import ResolvedPipeline


def table(resolved: ResolvedPipeline, changes: Sequence[tuple[str, Change]] | None = None) -> Table:
    """A row per step in order, with its change where it has run; then a row per node that is off."""
    view = Table(title="pipeline", title_justify="left")
    view.add_column("#", justify="right")
    for column in ("stage", "node", "class"):
        view.add_column(column, no_wrap=True)
    view.add_column("what it did" if changes is not None else "", overflow="fold")
    view.add_column("modules", justify="right")
    change_of = dict(changes or [])
    for order, (name, transform) in enumerate(resolved.steps, 1):
        change = change_of.get(name)
        report = "\n".join([change.summary, *change.left_alone()]) if change else ""
        count = "" if change is None else "all" if "*" in change.modules else str(len(change.modules))
        view.add_row(str(order), resolved.stages[name], name, type(transform).__name__, report, count)
    for name, reason in resolved.off.items():
        view.add_row("-", "", name, "", f"off: {reason}", "", style="dim")
    return view


def module_table(resolved: ResolvedPipeline, changes: Sequence[tuple[str, Change]]) -> Table:
    """The modules that each step touched and left alone; blocks that were treated alike share a line."""
    view = Table(title="by module", title_justify="left")
    view.add_column("node", no_wrap=True)
    view.add_column("modules", overflow="fold")
    view.add_column("left alone because", overflow="fold")
    change_of = dict(changes)
    for name, _ in resolved.steps:
        change = change_of[name]
        for module in ["the whole model"] if "*" in change.modules else merge_numbered_names(change.modules):
            view.add_row(name, module, "")
        for reason in dict.fromkeys(change.skipped.values()):
            skipped = [module for module, why in change.skipped.items() if why == reason]
            for module in merge_numbered_names(skipped):
                view.add_row(name, module, reason, style="dim")
    return view


def merge_numbered_names(names: Iterable[str]) -> list[str]:
    """Names that differ only in their first number, as one: ``layers.{0-79}.attention.wq``."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        # the first number: of layers.3.experts.1 that of the layer
        index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if index is None:
            numbers[name] = []
        else:
            pattern = ".".join([*parts[:index], "{}", *parts[index + 1 :]])
            numbers.setdefault(pattern, []).append(int(parts[index]))
    return [name.replace("{}", _ranges(indices), 1) if indices else name for name, indices in numbers.items()]


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


def records(resolved: ResolvedPipeline, changes: Sequence[tuple[str, Change]] | None = None) -> list[dict[str, Any]]:
    """JSON-ready records: the steps in order, then the nodes that are off (``order`` null, ``off`` the reason)."""
    change_of = dict(changes or [])
    # every record has every key, in this order; modules: ["*"] for the whole model, null before the step has run
    empty: dict[str, Any] = {"order": None, "stage": None, "node": None, "class": None}
    empty |= {"summary": "", "modules": None, "skipped": {}, "off": None}
    rows = []
    for order, (name, transform) in enumerate(resolved.steps, 1):
        class_path = f"{type(transform).__module__}.{type(transform).__qualname__}"
        row = empty | {"order": order, "stage": resolved.stages[name], "node": name, "class": class_path}
        if change := change_of.get(name):
            row |= {"summary": change.summary, "modules": list(change.modules), "skipped": dict(change.skipped)}
        rows.append(row)
    return rows + [empty | {"node": name, "off": reason} for name, reason in resolved.off.items()]
