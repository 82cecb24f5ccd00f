"""A plan for readers: tables on the console, plan.md with bars, timeline.json for ui.perfetto.dev."""

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from titanyaml.planner.model.step import Step

_BAR_CHARS = 40


class PlanTable(NamedTuple):
    """A table of a plan."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def show(record: dict[str, Any], console: Console) -> None:
    """Print a plan: the verdict, memory by part, time by class, communication, remarks."""
    for line in headline(record):
        console.print(line, highlight=False, markup=False)
    for table in tables(record):
        rich_table = Table(title=table.title, title_justify="left")
        for number, name in enumerate(table.columns):
            rich_table.add_column(name, justify="right" if number else "left")
        for row in table.rows:
            rich_table.add_row(*row)
        console.print(rich_table)
    for text in record["warnings"]:
        console.print(f"- {text}", highlight=False, markup=False)


def headline(record: dict[str, Any]) -> list[str]:
    """The verdict in a few lines."""
    memory, (low, high) = record["memory_gib"], record["tps_range"]
    bound = " or more" if memory["lower_bound"] else ""
    margin = memory["margin"]
    fits = f"fits, {margin:.1f} GiB to spare" if record["fits"] else f"does not fit by {-margin:.1f} GiB"
    budget = record["budget"]
    lines = [
        f"{record['model']} on {record['world_size']} x {record['device']['name']}, {record['mesh_name']}: "
        f"{memory['total']:.1f} GiB{bound} of {memory['limit']:.1f}: {fits}",
        f"{record['tps']:,.0f} tokens/s per device ({low:,.0f} to {high:,.0f}), MFU {100 * record['mfu']:.1f} %, "
        f"{record['step_s']:.3f} s a step; the range: {record['range_reason']}",
        f"{budget['tokens_per_day']:.3g} tokens a day; {budget['token_budget']:.3g} tokens take {budget['days']:.2f} "
        f"days, {budget['gpu_hours']:,.0f} device-hours",
    ]
    if budget["energy_mwh"] is not None:
        lines[-1] += f", {budget['energy_mwh']:.3g} MWh at the power limit"
    if budget["cost"] is not None:
        lines[-1] += f", cost {budget['cost']:,.0f}"
    return lines


def tables(record: dict[str, Any]) -> list[PlanTable]:
    """Everything of a plan that is a table."""
    memory, step_s = record["memory_gib"], record["step_s"]
    parts = [[name, f"{gib:.2f}", _percent(gib / memory["total"])] for name, gib in memory["parts"].items()]
    seconds = {name: value for name, value in record["time_s"].items() if value}
    times = [[name, _ms(value), _percent(value / step_s)] for name, value in seconds.items()]
    result = [
        PlanTable("memory of the fullest rank", ["part", "GiB", "share"], parts),
        PlanTable("time of a step", ["class", "ms", "share"], times),
    ]
    if record["comm"]:
        columns = ["axis", "op", "count", "GiB", "ms", "exposed ms"]
        rows = [
            [row["axis"], row["op"], f"{row['count']:,}", f"{row['bytes'] / 2**30:.2f}"]
            + [_ms(row["seconds"]), _ms(row["exposed_s"])]
            for row in record["comm"]
        ]
        result.append(PlanTable("collectives of a rank and step", columns, rows))
    if len(memory["stages"]) > 1:
        ranks = [[str(rank), f"{gib:.1f}"] for rank, gib in enumerate(memory["stages"])]
        result.append(PlanTable("memory of the pipeline's ranks", ["rank", "GiB"], ranks))
    if record.get("trace"):
        columns = ["what", "planned", "traced"]
        rows = [[row[name] for name in columns] for row in record["trace"]]
        result.append(PlanTable("plan against the traced pipeline", columns, rows))
    return result


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def markdown(record: dict[str, Any]) -> str:
    """The text of plan.md."""
    lines = [f"# Plan: {record['model']}, {record['mesh_name']}, {record['device']['name']}", ""]
    lines += [f"{line}  " for line in headline(record)]  # two spaces: a line break of Markdown
    if record["warnings"]:
        lines += ["", "## Remarks", "", *(f"- {text}" for text in record["warnings"])]
    lines += ["", "## Memory and time", "", "```", *_bars(record["memory_gib"]["parts"], "GiB"), ""]
    lines += [*_bars({name: 1000 * value for name, value in record["time_s"].items()}, "ms"), "```"]
    for title, columns, rows in tables(record):
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _bars(values: dict[str, float], unit: str) -> list[str]:
    """A line for each positive value, with a bar in proportion to the largest."""
    positive = {name: value for name, value in values.items() if value > 0}
    largest, width = max(positive.values(), default=1.0), max(map(len, positive), default=0)
    bars = {name: "#" * max(1, round(_BAR_CHARS * value / largest)) for name, value in positive.items()}
    return [f"{name:<{width}}  {bars[name]:<{_BAR_CHARS}}  {value:,.1f} {unit}" for name, value in positive.items()]


def timeline(step: Step) -> dict[str, Any]:
    """timeline.json: one microbatch of the slowest rank as a Chrome trace. Waits of a stream are its gaps."""
    threads = {"compute": 1, "network": 2}
    process = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one microbatch, slowest rank"}}
    names = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for name, tid in threads.items()
    ]
    events = [
        # "X": a complete event; times in microseconds
        {"ph": "X", "pid": 0, "tid": threads[event.stream], "name": event.name}
        | {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
        for event in step.events
        if event.seconds > 0
    ]
    return {"traceEvents": [process, *names, *events], "displayTimeUnit": "ms"}
