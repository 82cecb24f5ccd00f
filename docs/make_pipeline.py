"""Draw the schedules for docs/pipeline.md by the product's own simulation: ``python docs/make_pipeline.py``."""

from __future__ import annotations

from pathlib import Path

from titanyaml.pipeline_parallel.partition import schedule_orders
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, ScheduleKind, stage_owners
from titanyaml.pipeline_schedule.simulate import Timeline, simulate

PAGE = Path(__file__).with_name("pipeline.md")
IMAGES = Path(__file__).with_name("img")
BEGIN, END = "<!-- schedules: written by docs/make_pipeline.py -->\n", "<!-- end of schedules -->\n"

RANKS, MICROBATCHES = 4, 8
UNIT, LANE, LEFT, TOP = 14, 22, 44, 6  # pixels: a unit of time, a rank, margins
#: Fill of an action by a rank's first stage and by its later ones.
COLOURS = {
    "F": ("#9ecae1", "#4292c6"),
    "B": ("#a1d99b", "#41ab5d"),
    "I": ("#c7e9c0", "#74c476"),
    "W": ("#fdd0a2", "#fd8d3c"),
}


def timeline(kind: ScheduleKind) -> Timeline:
    """The schedule on RANKS ranks with MICROBATCHES microbatches and the fewest stages."""
    stages = kind.min_stages * RANKS
    owners = stage_owners(kind.placement, ranks=RANKS, stages=stages)
    return simulate(schedule_orders(kind.name, owners=owners, microbatches=MICROBATCHES), stages=stages)


def picture(kind: ScheduleKind) -> str:
    """An SVG: a lane per rank, time to the right, the microbatch in each box."""
    times = timeline(kind)
    width, height = LEFT + round(times.length * UNIT) + 6, TOP + RANKS * LANE + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="9">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for rank, spans in enumerate(times.ranks):
        y = TOP + rank * LANE
        lines.append(f'<text x="4" y="{y + 14}">rank {rank}</text>')
        first = min(span.action.stage for span in spans)
        for span in spans:  # the rank's first stage is the lighter one
            x, length = LEFT + round(span.start * UNIT), round((span.end - span.start) * UNIT)
            colour = COLOURS[span.action.kind][span.action.stage != first]
            lines.append(
                f'<rect x="{x}" y="{y}" width="{length}" height="{LANE - 3}" fill="{colour}" stroke="#ffffff"/>'
                f'<text x="{x + length // 2}" y="{y + 13}" text-anchor="middle">{span.action.microbatch}</text>'
            )
    return "\n".join([*lines, "</svg>", ""])


def section() -> str:
    """The table, and the picture of each schedule."""
    rows = [
        "| `parallel.pp_schedule` | stages on a rank | backward | fewest microbatches | bubble | held |",
        "|---|---|---|---|---|---|",
    ]
    pictures = []
    for name, kind in SCHEDULE_KINDS.items():
        times = timeline(kind)
        stages = f"{kind.min_stages}" + ("" if kind.max_stages else " or more")
        microbatches = {RANKS: "ranks", 2 * RANKS - 1: "2 ranks - 1", 2 * RANKS: "2 ranks"}[
            kind.min_microbatches(RANKS)
        ]
        parts = "in two parts" if kind.splits_backward else "whole"
        rows.append(
            f"| `{name}` | {stages}{', V' if kind.placement == 'v' else ''} | {parts} | {microbatches}"
            f"{', whole rounds' if kind.needs_whole_rounds else ''} | {times.bubble:.1%} | "
            f"{times.max_in_flight / kind.min_stages:g} |"
        )
        pictures.append(f"`{name}`, {times.length:g} units of time\n\n![{name}](img/pipeline_{name}.svg)\n")
    return "\n".join([*rows, "", *pictures])


def page(text: str) -> str:
    """The page with a fresh section."""
    head, _, tail = text.partition(BEGIN)
    assert tail, f"{PAGE.name} has lost the line {BEGIN!r}"
    return f"{head}{BEGIN}\n{section()}\n{END}{tail.partition(END)[2]}"


def images() -> dict[str, str]:
    """File name to content."""
    return {f"pipeline_{name}.svg": picture(kind) for name, kind in SCHEDULE_KINDS.items()}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for file, content in images().items():
        (IMAGES / file).write_text(content, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
