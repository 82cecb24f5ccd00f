"""NVLink's rate under which plans come closest to what ``hosts.py`` has measured: conf/cluster/nvlink_host.yaml.

    python benchmarks/hosts_fit.py benchmarks/results/h200x2_20261130.json benchmarks/results/h200x2_20261130_again.json

Of files with the same row the last one counts. Least sum of absolute log ratios over whole GB/s, since a row that is
off for another reason (a host that cannot queue kernels fast enough) must not draw it away. Rows with async TP take no
part: what it hides is a fitted number of its own. Prints each row's errors in time and memory. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import planner_rows
from planner_rows import Row

from titanyaml.planner.model import step
from titanyaml.runner.bench_report import table

#: GB/s a device: from half to all of what NVLink 4 is sold as, but for what large collectives were seen to reach.
RATES = range(150, 401)


def main(arguments: list[str] | None = None) -> int:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--rows", default="*", help="names or patterns, joined by commas (default: all)")
    options = parser.parse_args(arguments)
    rows = measured(options.results, options.rows.split(","))
    if all(row.job.async_tp for row in rows.values()):
        parser.error(f"of {', '.join(map(str, options.results))} no row without async TP is called {options.rows}")
    rate = fit(list(rows.values()))
    shown = [
        [
            name,
            f"{row.published:,.0f}",
            f"{at(row, rate):,.0f}",
            f"{at(row, rate) / row.published - 1:+.1%}",
            f"{row.memory:.1f}",
            f"{row.memory * (1 + row.memory_error):.1f}",
            f"{row.memory_error:+.1%}",
        ]
        for name, row in rows.items()
    ]
    print(f"nvlink_gb_s: {rate}\n")
    print(table(["row", "tokens/s per GPU", "planned", "error", "GiB", "planned", "error"], shown))
    return 0


def measured(results: list[Path], patterns: list[str]) -> dict[str, Row]:
    """The speed rows of these files with their plans."""
    rows_by_name: dict[str, Any] = {}
    for path in results:
        rows_by_name |= json.loads(path.read_text())["rows"]
    return {
        name: _row(row["ours"])
        for name, row in rows_by_name.items()
        if "tps" in row.get("ours", {}) and any(fnmatch(name, pattern) for pattern in patterns)
    }


def _row(ours: dict[str, Any]) -> Row:
    typed = [text for text in ours["command"] if "=" in text and not text.startswith(("runner", "tokenizer"))]
    return planner_rows.own_row(
        {"options": " ".join(typed), "tokens_per_s_per_gpu": ours["tps"], "peak_mem_gib": ours["mem_reserved_gib"]}
    )


def fit(rows: list[Row]) -> int:
    """GB/s, from the rows without async TP: the best of every tenth rate, then the best around it."""
    rows = [row for row in rows if not row.job.async_tp]

    def off(rate: int) -> float:
        return sum(abs(math.log(at(row, rate) / row.published)) for row in rows)

    best = min(RATES[::10], key=off)
    return min(range(best - 9, best + 10), key=off)


def at(row: Row, rate: float) -> float:
    """Planned tokens/s per GPU at this rate."""
    job = replace(row.job, network=replace(row.job.network, nvlink_gb_s=float(rate)))
    return job.tokens_per_step / step.plan_step(job).seconds / job.mesh.world_size


if __name__ == "__main__":
    raise SystemExit(main())
