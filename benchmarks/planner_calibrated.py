"""The planner with what ``runner=bench hardware.calibrate=true`` measured, and nothing fitted.

    python benchmarks/planner_calibrated.py [results/h200_calibrated.yaml]

The device file is the one that a calibration on H200 wrote, the links are those that it measured between two of them.
Another device gets the same shares of its datasheet. What is fitted elsewhere has a value here that follows from a
count or from a measured kernel (``NEUTRAL``).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import planner_rows
import yaml
from planner_rows import Row, statistics_of

from titanyaml.config import schema
from titanyaml.planner.model import constants, devices, step
from titanyaml.planner.model.inputs import Device, Network

CALIBRATED = planner_rows.HERE / "results" / "h200_calibrated.yaml"
LINKS = planner_rows.HERE / "results" / "h200_links.yaml"

#: Constants without a fit. Casts are measured, and come with the device.
NEUTRAL = {
    "CONTENTION": 24 / 132,  # NCCL's kernels hold up to 24 of 132 multiprocessors
    "ASYNC_TP_HIDDEN": 0.31,  # two H200, one gate projection: 70 % of a gather hidden, a scatter 7 % slower
    "STRAGGLER": 0.0,
    "CONTEXT_SLOWDOWN": 0.0,
    "FSDP_COPY": 14.0,  # bytes: gathered weights out of a flat buffer twice (8), gradients into one (6)
}
#: Share of the H200's clock that a 500 W card reaches: the geometric mean of two extremes. If each FLOP takes the same
#: energy, 500/700 (0.71); if power grows with the cube of the clock, its cube root (0.89).
CAPPED = math.sqrt((500 / 700) * (500 / 700) ** (1 / 3))
#: Peak, bandwidth (TB/s) and NVLink (GB/s each way) of datasheets, over those of the H200.
_SHEETS = {
    "h200": (1.0, 1.0, 1.0),
    "h100_sxm": (1.0, 3.35 / 4.8, 1.0),
    "h100_500w": (CAPPED, 2.4 / 4.8, 1.0),
    "a100_80gb": (312 / 989, 2.039 / 4.8, 300 / 450),
}


def device(measured: dict[str, Any], name: str) -> Device:
    """The calibrated H200, or another device with the same shares of its datasheet."""
    compute, moving, _ = _SHEETS[name]
    spec = schema.Hardware(**{key: value for key, value in measured.items() if key not in ("defaults", "links")})
    scaled = {
        field.name: getattr(spec, field.name) * (moving if field.name == "memory_tb_s" else compute)
        for field in dataclasses.fields(spec)
        if field.name.endswith(("_tflops", "memory_tb_s")) and getattr(spec, field.name) is not None
    }
    shipped, _ = devices.shipped_device(name)
    unscaled = {"name": name, "peak_bf16_tflops": shipped.peak_bf16_tflops, "memory_gib": shipped.memory_gib}
    if shipped.gemm_fp8_tflops is None:  # an A100 has no float8
        unscaled["gemm_fp8_tflops"] = None
    return devices.device(replace(spec, **scaled | unscaled))


def network(measured: dict[str, Any], name: str, shipped: Network) -> Network:
    """NVLink as measured; network cards at 80 % of the wire, as shipped."""
    links = measured["links"]
    return replace(
        shipped, nvlink_gb_s=links["nvlink_gb_s"] * _SHEETS[name][2], nvlink_latency_us=links["nvlink_latency_us"]
    )


def errors(rows: list[Row], measured: dict[str, Any]) -> list[float]:
    """Planned over published, less 1, of each row."""
    before = {name: getattr(constants, name).value for name in NEUTRAL}
    try:
        for name, value in NEUTRAL.items():
            # the planner reads constants.NAME.value, and the dataclass is frozen: put back below
            object.__setattr__(getattr(constants, name), "value", value)
        return [_tps(row, measured) / row.published - 1 for row in rows]
    finally:
        for name, value in before.items():
            object.__setattr__(getattr(constants, name), "value", value)


def _tps(row: Row, measured: dict[str, Any]) -> float:
    name = row.job.device.name
    links = row.job.network if row.job.mesh.world_size == 1 else network(measured, name, row.job.network)
    job = replace(row.job, device=device(measured, name), network=links)
    return job.tokens_per_step / step.plan_step(job).seconds / job.mesh.world_size


def read(path: Path = CALIBRATED) -> dict[str, Any]:
    """What a calibration wrote: the keys of hardware, and those of the cluster under ``links``."""
    device, links = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in (path, LINKS))
    return device | {"links": links}


def main() -> None:
    """Print errors by device and by group."""
    parser = argparse.ArgumentParser(description="The planner with measured rates alone.")
    parser.add_argument("path", nargs="?", type=Path, default=CALIBRATED)
    measured = read(parser.parse_args().path)
    rows = [row for row in planner_rows.rows() if not row.reason]
    planned = list(zip(rows, errors(rows, measured), strict=True))
    sets = {"H200": [error for row, error in planned if row.job.device.name == "h200"]}
    sets["all"] = [error for _, error in planned]
    for row, error in planned:
        sets.setdefault(row.group, []).append(error)
    for name, set_errors in sets.items():
        text = ", ".join(f"{100 * value:.1f}" for value in statistics_of(set_errors))
        print(f"{name} ({len(set_errors)}): {text} % (median, p90, worst)")
    for row, error in planned:
        print(f"{100 * error:+6.1f} %  {row.group}: {row.label}")


if __name__ == "__main__":
    main()
