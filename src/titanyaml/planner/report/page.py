"""A plan for a person: tables on the console, plan.md with bars."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_BAR = 40


def show(record: dict[str, Any], console: Console) -> None:
    """Print a plan: the verdict, memory by part, time by class, communication, remarks."""
    for line in headline(record):
        console.print(line, highlight=False, markup=False)
    for title, head, rows in tables(record):
        table = Table(title=title, title_justify="left")
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for text in record["warnings"]:
        console.print(f"- {text}", highlight=False, markup=False)


def headline(record: dict[str, Any]) -> list[str]:
    """The verdict in a few lines."""
    memory, low_high = record["memory_gib"], record["tps_range"]
    bound = " or more" if memory["lower_bound"] else ""
    margin = memory["margin"]
    fits = f"fits, {margin:.1f} GiB to spare" if record["fits"] else f"does not fit by {-margin:.1f} GiB"
    spent = record["budget"]
    lines = [
        f"{record['model']} on {record['world_size']} x {record['device']['name']}, {record['mesh_name']}: "
        f"{memory['total']:.1f} GiB{bound} of {memory['limit']:.1f}: {fits}",
        f"{record['tps']:,.0f} tokens/s per device ({low_high[0]:,.0f} to {low_high[1]:,.0f}), MFU "
        f"{100 * record['mfu']:.1f} %, {record['step_s']:.3f} s a step; the range: {record['range_reason']}",
        f"{spent['tokens_per_day']:.3g} tokens a day; {spent['token_budget']:.3g} tokens take {spent['days']:.2f} "
        f"days, {spent['gpu_hours']:,.0f} device-hours",
    ]
    if spent["energy_mwh"] is not None:
        lines[-1] += f", {spent['energy_mwh']:.3g} MWh at the power limit"
    if spent["cost"] is not None:
        lines[-1] += f", cost {spent['cost']:,.0f}"
    return lines


def tables(record: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, column names, rows) of everything that is a table."""
    memory, step_s = record["memory_gib"], record["step_s"]
    parts = [[name, f"{size:.2f}", f"{100 * size / memory['total']:.1f} %"] for name, size in memory["parts"].items()]
    times = [
        [name, f"{1000 * seconds:.1f}", f"{100 * seconds / step_s:.1f} %"]
        for name, seconds in record["time_s"].items()
        if seconds
    ]
    found = [
        ("memory of the fullest rank", ["part", "GiB", "share"], parts),
        ("time of a step", ["class", "ms", "share"], times),
    ]
    if record["comm"]:
        comm = [
            [
                row["axis"],
                row["op"],
                f"{row['count']:,}",
                f"{row['bytes'] / 2**30:.2f}",
                f"{1000 * row['seconds']:.1f}",
                f"{1000 * row['exposed_s']:.1f}",
            ]
            for row in record["comm"]
        ]
        found.append(("collectives of a rank and step", ["axis", "op", "count", "GiB", "ms", "exposed ms"], comm))
    if len(memory["stages"]) > 1:
        stages = [[str(rank), f"{size:.1f}"] for rank, size in enumerate(memory["stages"])]
        found.append(("memory of the pipeline's ranks", ["rank", "GiB"], stages))
    if record.get("trace"):
        rows = [[row["what"], row["planned"], row["traced"]] for row in record["trace"]]
        found.append(("plan against the traced pipeline", ["what", "planned", "traced"], rows))
    return found


def markdown(record: dict[str, Any]) -> str:
    """plan.md."""
    lines = [f"# Plan: {record['model']}, {record['mesh_name']}, {record['device']['name']}", ""]
    lines += [f"{line}  " for line in headline(record)]
    if record["warnings"]:
        lines += ["", "## Remarks", "", *(f"- {text}" for text in record["warnings"])]
    lines += ["", "## Memory and time", "", "```"]
    lines += _bars(record["memory_gib"]["parts"], "GiB")
    lines += [""] + _bars({name: 1000 * value for name, value in record["time_s"].items()}, "ms")
    lines += ["```"]
    for title, head, rows in tables(record):
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _bars(values: dict[str, float], unit: str) -> list[str]:
    shown = {name: value for name, value in values.items() if value > 0}
    longest, width = max(shown.values(), default=1.0), max(map(len, shown), default=0)
    return [
        f"{name:<{width}}  {'#' * max(1, round(_BAR * value / longest)):<{_BAR}}  {value:,.1f} {unit}"
        for name, value in shown.items()
    ]
