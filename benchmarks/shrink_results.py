"""Shrink result files to what the pages, the scripts and the tests read.

    python benchmarks/shrink_results.py benchmarks/results/h200x2_new.json ...

Rewrites each file in place, one row a line. A row keeps its command, speed, memory, losses, floor, start-up, kernel
classes, plugin reports and git commit. It loses what can be measured again and what no page states: ceilings of each
matrix shape, single kernels other than NCCL's, versions that the file's own ``environment`` has already. Names and
folders of the machine go too.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

#: Dropped wherever they stand: large, or of no use without the run's folder.
DROPPED_KEYS = {"ceilings", "config_hash", "host", "matrix", "platform", "steps_s", "told"}


def shrink(value: Any) -> Any:
    """``value`` without the dropped parts, floats rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str):
        return re.sub(r"/tmp/[^\s:]*/", ".../", value)
    if isinstance(value, list):
        return [shrink(item) for item in value]
    if not isinstance(value, dict):
        return value
    shrunk = {key: shrink(item) for key, item in value.items() if key not in DROPPED_KEYS}
    if isinstance(shrunk.get("variables"), dict):
        variables = shrunk["variables"]
        shrunk["variables"] = {name: text for name, text in variables.items() if "/" not in text}
    if "tps" in shrunk and isinstance(shrunk.get("environment"), dict):  # a row: the file says the versions once
        shrunk["environment"] = {"git": shrunk["environment"].get("git")}
    if isinstance(shrunk.get("top"), list):  # docs/planner.md states the rates of NCCL's kernels
        shrunk["top"] = [kernel for kernel in shrunk["top"] if kernel.get("class") == "communication"]
    if "plugins" in shrunk:
        shrunk["plugins"] = {name: report for name, report in shrunk["plugins"].items() if any(report)}
    return shrunk


def lines(content: dict[str, Any], depth: int = 2) -> str:
    """JSON with a line for each item of the first ``depth`` levels, so that a changed row is a changed line."""
    if not depth or not isinstance(content, dict):
        return json.dumps(content)
    items = ",\n".join(f"{json.dumps(key)}: {lines(value, depth - 1)}" for key, value in content.items())
    return f"{{\n{items}\n}}"


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        before = path.stat().st_size
        path.write_text(lines(shrink(json.loads(path.read_text()))) + "\n")
        print(f"{path}: {before:,} -> {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
