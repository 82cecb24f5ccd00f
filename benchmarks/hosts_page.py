"""The table of docs/performance.md for two devices: what ``hosts.py`` measured beside targets, peer and plans.

    python benchmarks/hosts_page.py            print it
    python benchmarks/hosts_page.py --write    and write it into docs/

Everything comes from ``RESULTS``: a new file, or a row more in one, needs this command and nothing else. Of a row in
several files the last one counts. Plans are of ``cluster=nvlink_host``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import hosts_fit
from planner_rows import DOCS, HERE, Row

from titanyaml.planner.model import devices
from titanyaml.runner.bench_report import table

RESULTS = ("h200x2_20261130", "h200x2_20261130_again")
#: Asked of a row: tokens/s per GPU, and GiB where those are asked too.
TARGETS: dict[str, tuple[int, float | None]] = {
    "fsdp2-reuse": (24_000, 53.3),
    "fsdp2-tensorwise-own-gather-reuse": (30_500, 53.3),
    "cp2-allgather-more": (17_000, 57.9),
}
#: In bfloat16, of what FSDP reaches on as many devices: (row, the share asked of it).
SHARE = ("fsdp2-reuse", 0.85)
SHARED = ("tp2", "tp2-async-auto", "tp2-kept", "tp2-kept-async-auto")
BEGIN, END = "<!-- hosts: written by benchmarks/hosts_page.py -->\n", "<!-- end of hosts -->\n"
_HEAD = [
    "row",
    "asked, at GiB",
    "tokens/s per GPU",
    "GiB",
    "torchtitan in the same call",
    "ratio",
    "planned",
    "error",
    "planned GiB",
    "error",
]


def files() -> list[Path]:
    """The measurements, the latest last."""
    return [HERE / "results" / f"{name}.json" for name in RESULTS]


def measured() -> dict[str, dict[str, Any]]:
    """Rows and checks of all files, the latest file first; ``early``: of another than the latest."""
    rows: dict[str, dict[str, Any]] = {}
    for path in reversed(files()):
        for name, row in json.loads(path.read_text())["rows"].items():
            rows.setdefault(name, row | {"early": path != files()[-1]})
    return rows


def asked(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """The target of a row, "" without."""
    if name in TARGETS:
        rate, gib = TARGETS[name]
        return f"{rate:,} at {gib}"
    of, share = SHARE
    return f"{share * rows[of]['ours']['tps']:,.0f} ({share:.0%} of `{of}`)" if name in SHARED else ""


def _line(name: str, rows: dict[str, dict[str, Any]], plan: Row, rate: float) -> list[str]:
    """Cells under ``_HEAD``."""
    row, speed = rows[name], hosts_fit.at(plan, rate)
    peer = row.get("torchtitan", {})
    peer_text = f"{peer['tps']:,.0f} at {peer['mem_reserved_gib']:.1f}" if "tps" in peer else ""
    return [
        f"`{name}`" + " (*)" * row["early"],
        asked(name, rows),
        f"{plan.published:,.0f}",
        f"{plan.memory:.1f}",
        peer_text,
        f"{row['ratio']:.3f}" if peer_text else "",
        f"{speed:,.0f}",
        f"{speed / plan.published - 1:+.1%}",
        f"{plan.gib:.1f}",
        f"{plan.memory_error:+.1%}",
    ]


def checks(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """[name, result] of what is no speed row."""
    lines = []
    for name, row in rows.items():
        if name == "kill":
            result = (
                f"the job ended {row['ended_after_s']:.1f} s after rank 1 was killed, and resumed to the same losses"
            )
            lines.append([f"`{name}`", result if row["ok"] else "does not hold"])
        elif name.startswith("parity-"):
            lines.append([f"`{name}`", _parity(row)])
    return lines


def _parity(row: dict[str, Any]) -> str:
    passed = {name: figures for name, figures in row["meshes"].items() if figures["ok"]}
    failed = ", ".join(f"`{name}`" for name in row["meshes"] if name not in passed)
    loss, norm = (max(figures[key] for figures in passed.values()) for key in ("loss", "norm"))
    return (
        f"{len(passed)} meshes: losses within {loss:.0e}, gradient norms within {norm:.0e} of one GPU's"
        + f"; does not hold: {failed}" * bool(failed)
    )


def tables(plans: dict[str, Row]) -> str:
    """Speed and checks; plans: of ``hosts_fit.measured``."""
    rows = measured()
    rate = devices.shipped("cluster", "nvlink_host")["nvlink_gb_s"]
    speed = table(_HEAD, [_line(name, rows, plans[name], rate) for name in rows if name in plans])
    return f"{speed}\n\n{table(['check', 'result'], checks(rows))}"


def page(text: str, plans: dict[str, Row]) -> str:
    """docs/performance.md with fresh tables."""
    head, _, tail = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables(plans)}\n\n{END}{tail.partition(END)[2]}"


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/performance.md")
    write, plans = parser.parse_args().write, hosts_fit.measured(files(), ["*"])
    print(tables(plans))
    if write:
        path = DOCS / "performance.md"
        path.write_text(page(path.read_text(encoding="utf-8"), plans), encoding="utf-8")


if __name__ == "__main__":
    main()
