"""Write the planner's errors into docs/: the tables of docs/planner.md and its scatter plot.

python benchmarks/planner_page.py            print the tables
python benchmarks/planner_page.py --write    and write them, with the plot, into docs/
"""

from __future__ import annotations

import argparse
import html
import math

from planner_rows import DOCS, Row, rows, statistics_of

#: Groups of rows, with the colours of their dots.
GROUPS = {
    "torchtitan": "#1f77b4",
    "torchao": "#ff7f0e",
    "llm-foundry": "#2ca02c",
    "measured": "#d62728",
    "titanyaml": "#9467bd",
}
BEGIN, END = "<!-- rows: written by benchmarks/planner_page.py -->\n", "<!-- end of rows -->\n"

# Geometry of the plot: pixels, and tokens/s at both ends of the axes
_SIZE, _EDGE, _LOW, _HIGH = 560, 60, 10.0, 100_000.0


def summary(planned: list[Row]) -> str:
    """Errors by group as a table."""
    lines = [
        "| rows | number | tokens/s: median, p90, worst (%) | memory without pp: number, median, worst (%) |",
        "|---|---|---|---|",
    ]
    for group in GROUPS:
        members = [row for row in planned if row.group == group and not row.reason]
        tps = ", ".join(f"{100 * value:.1f}" for value in statistics_of([row.error for row in members]))
        # plans of pipelines are lower bounds of memory: their errors mean something else
        errors = [row.memory_error for row in members if row.memory_error is not None and row.job.mesh.pp == 1]
        gib = "-"
        if errors:
            median, _, worst = statistics_of(errors)
            gib = f"{len(errors)}, {100 * median:.1f}, {100 * worst:.1f}"
        lines.append(f"| {group} | {len(members)} | {tps} | {gib} |")
    return "\n".join(lines)


def table(planned: list[Row]) -> str:
    """Every planned row."""
    lines = ["| row | published | planned | error | GiB published | planned | error |", "|---|---|---|---|---|---|---|"]
    for row in sorted((row for row in planned if not row.reason), key=lambda row: list(GROUPS).index(row.group)):
        gib = ["", "", ""]
        if row.memory is not None:
            gib = [f"{row.memory:.1f}", f"{row.gib:.1f}", f"{100 * row.memory_error:+.1f} %"]
        tps = [f"{row.published:,.0f}", f"{row.tps:,.0f}", f"{100 * row.error:+.1f} %"]
        lines.append(f"| {row.group}: {row.label} | {' | '.join(tps)} | {' | '.join(gib)} |")
    return "\n".join(lines)


def omitted(planned: list[Row]) -> str:
    """Rows that are left out, each with its reason."""
    lines = ["| row | reason |", "|---|---|"]
    return "\n".join(lines + [f"| {row.source}: {row.label} | {row.reason} |" for row in planned if row.reason])


def plot(planned: list[Row]) -> str:
    """Planned over published tokens/s, both logarithmic, as SVG. The line is equality, the band 20 % either way."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE}" height="{_SIZE}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="white"/>',
    ]
    for value in (10, 100, 1_000, 10_000, 100_000):
        spot, bottom = _pixel(value), _SIZE - _EDGE
        parts += [
            f'<line x1="{spot:.1f}" y1="{_EDGE}" x2="{spot:.1f}" y2="{bottom}" stroke="#ddd"/>',
            f'<line x1="{_EDGE}" y1="{_SIZE - spot:.1f}" x2="{bottom}" y2="{_SIZE - spot:.1f}" stroke="#ddd"/>',
            f'<text x="{spot:.1f}" y="{bottom + 18}" text-anchor="middle">{value:,}</text>',
            f'<text x="{_EDGE - 6}" y="{_SIZE - spot + 4:.1f}" text-anchor="end">{value:,}</text>',
        ]
    parts.append(_line(1.0, 'stroke="black"'))
    parts += [_line(factor, 'stroke="#999" stroke-dasharray="4 4"') for factor in (1.2, 1 / 1.2)]
    for number, (group, colour) in enumerate(GROUPS.items()):
        dots = [row for row in planned if row.group == group and not row.reason]
        parts += [
            f'<circle cx="{_pixel(row.published):.1f}" cy="{_SIZE - _pixel(row.tps):.1f}" r="3.5" fill="{colour}" '
            f'fill-opacity="0.7"><title>{html.escape(row.label)}: {100 * row.error:+.1f} %</title></circle>'
            for row in dots
        ]
        parts += [  # the legend
            f'<circle cx="{_EDGE + 14}" cy="{_EDGE + 14 + 18 * number}" r="4" fill="{colour}"/>',
            f'<text x="{_EDGE + 24}" y="{_EDGE + 18 + 18 * number}">{group} ({len(dots)})</text>',
        ]
    parts += [
        f'<text x="{_SIZE / 2}" y="{_SIZE - 12}" text-anchor="middle">published tokens/s per device</text>',
        f'<text x="16" y="{_SIZE / 2}" text-anchor="middle" transform="rotate(-90 16 {_SIZE / 2})">planned</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _pixel(tps: float) -> float:
    return _EDGE + (_SIZE - 2 * _EDGE) * math.log(tps / _LOW) / math.log(_HIGH / _LOW)


def _line(factor: float, style: str) -> str:
    """The line on which plans are ``factor`` times what was published, within the axes."""
    start, end = max(_LOW, _LOW / factor), min(_HIGH, _HIGH / factor)
    return (
        f'<line x1="{_pixel(start):.1f}" y1="{_SIZE - _pixel(start * factor):.1f}" x2="{_pixel(end):.1f}" '
        f'y2="{_SIZE - _pixel(end * factor):.1f}" {style}/>'
    )


def page(text: str, planned: list[Row]) -> str:
    """docs/planner.md with fresh tables."""
    head, _, tail = text.partition(BEGIN)
    tables = f"{summary(planned)}\n\n### Row by row\n\n{table(planned)}\n\n### Left out\n\n{omitted(planned)}\n"
    return f"{head}{BEGIN}\n{tables}\n{END}{tail.partition(END)[2]}"


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description="Published rows against the planner.")
    parser.add_argument("--write", action="store_true", help="write the tables and the plot into docs/")
    write, planned = parser.parse_args().write, rows()
    print(f"{summary(planned)}\n\n{table(planned)}")
    if write:
        text = (DOCS / "planner.md").read_text(encoding="utf-8")
        (DOCS / "planner.md").write_text(page(text, planned), encoding="utf-8")
        (DOCS / "planner.svg").write_text(plot(planned), encoding="utf-8")


if __name__ == "__main__":
    main()
