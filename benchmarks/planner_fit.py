"""Repeat the fit behind the planner's constants and ``conf/``: half of torchtitan's rows fit, the other half tests.

    python benchmarks/planner_fit.py              one split: every other row
    python benchmarks/planner_fit.py --halves 20  random halves: how far errors and numbers move

Coordinate descent on a soft-L1 of log ratios, with a weak prior at the value from which each number started. The
one-GPU rows of the H200, torchtitan's and our own, always take part. Nothing is written.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, replace

import planner_rows
from planner_rows import Row, statistics_of

from titanyaml.planner.model import constants, step


@dataclass(frozen=True)
class Free:
    """A fitted number."""

    start: float
    low: float  # of its plausible interval
    high: float
    spread: float  # of the prior around the start, as a log ratio


#: Names in capitals are constants of planner/model/constants.py. Per device: the GEMM rate in bf16 (TFLOP/s), and how
#: many times faster float8 is. Starts are guesses from single kernels. Two more constants are fitted apart, to reserved
#: memory: TP_LEFTOVER and ALLOCATOR_GIB.
FREE = {
    "h100_500w": Free(560, 540, 620, 0.03),
    "h100_500w float8": Free(1.98, 1.85, 2.1, 0.03),
    "h200": Free(722, 690, 770, 0.03),
    "h200 float8": Free(2.0, 1.85, 2.1, 0.03),
    "nvlink_gb_s": Free(252, 189, 330, 0.1),
    "CAST_TENSORWISE": Free(10.5, 8.3, 13, 0.1),
    "CAST_ROWWISE": Free(21, 17, 28, 0.1),
    "CONTENTION": Free(0.18, 0.1, 0.27, 0.15),
    "ASYNC_TP_HIDDEN": Free(0.39, 0.23, 0.5, 0.1),
    "STRAGGLER": Free(0.0053, 0.004, 0.014, 0.2),
    "CONTEXT_SLOWDOWN": Free(0.42, 0.3, 0.6, 0.1),
    "FSDP_COPY": Free(19.6, 14, 24, 0.1),
}
_SOFT = 0.03  # log ratio from which an error counts linearly, so that single odd rows do not draw the fit


def errors(rows: list[Row], values: dict[str, float]) -> list[float]:
    """log(planned / published) of each row under ``values``."""
    for name, value in values.items():
        if name.isupper():
            object.__setattr__(getattr(constants, name), "value", value)
    return [math.log(_cached_tps(row, values) / row.published) for row in rows]


_planned: dict[tuple, float] = {}


def _cached_tps(row: Row, values: dict[str, float]) -> float:
    """``_tps``, computed once for each set of those values on which this row depends."""
    key = (id(row), *(value for name, value in values.items() if _depends(row, name)))
    if key not in _planned:
        _planned[key] = _tps(row, values)
    return _planned[key]


def _depends(row: Row, name: str) -> bool:
    """Whether a row's plan reads this number."""
    job = row.job
    special = {
        "CAST_TENSORWISE": job.quant == "float8_tensorwise",
        "CAST_ROWWISE": "rowwise" in job.quant,
        "CONTEXT_SLOWDOWN": job.mesh.cp > 1,
        "ASYNC_TP_HIDDEN": bool(job.async_tp),
    }
    if name in special:
        return special[name]
    if name.isupper() or name == "nvlink_gb_s":
        return job.mesh.world_size > 1
    return name.startswith(job.device.name)


def _tps(row: Row, values: dict[str, float]) -> float:
    job, device, network = row.job, row.job.device, row.job.network
    if (rate := values.get(device.name)) is not None:
        changed = {"bf16_tflops": rate, "fp8_tflops": rate * values[f"{device.name} float8"]}
        if device.name == "h100_500w":  # nobody measured attention on it: the same clock
            changed["flash_tflops"] = tuple(flash * rate / device.bf16_tflops for flash in device.flash_tflops)
        device = replace(device, **changed)
    if job.mesh.world_size > 1:
        network = replace(network, nvlink_gb_s=values["nvlink_gb_s"])
    job = replace(job, device=device, network=network)
    return job.tokens_per_step / step.plan_step(job).seconds / job.mesh.world_size


def cost(rows: list[Row], values: dict[str, float]) -> float:
    """What is made small."""
    soft = sum(2 * _SOFT * (math.sqrt(1 + (error / _SOFT) ** 2) - 1) for error in errors(rows, values))
    prior = sum((math.log(values[name] / free.start) / free.spread) ** 2 for name, free in FREE.items())
    return soft + 0.02 * prior


def fit(rows: list[Row]) -> dict[str, float]:
    """The fitted numbers."""
    values = {name: free.start for name, free in FREE.items()}
    best = cost(rows, values)
    for factor in (1.04, 1.02, 1.01):
        for name, free in FREE.items():
            for change in (factor, 1 / factor):
                moved = True
                while moved:
                    tried = {**values, name: min(free.high, max(free.low, values[name] * change))}
                    moved = tried[name] != values[name] and (lower := cost(rows, tried)) < best - 1e-6
                    if moved:
                        best, values = lower, tried
    return values


def _print_errors(name: str, rows: list[Row], values: dict[str, float]) -> None:
    relative = [math.exp(error) - 1 for error in errors(rows, values)]
    print(
        f"{name}: " + ", ".join(f"{100 * value:.1f}" for value in statistics_of(relative)) + " % (median, p90, worst)"
    )


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Repeat the fit.")
    parser.add_argument("--halves", type=int, default=0)
    halves = parser.parse_args().halves
    planned = [row for row in planner_rows.rows() if not row.reason]
    titan = [row for row in planned if row.group == "torchtitan"]
    alone = [row for row in planned if row.group in ("measured", "titanyaml") and row.job.mesh.world_size == 1]
    if not halves:
        values = fit(titan[::2] + alone)
        print({name: round(value, 4) for name, value in values.items()})
        _print_errors("fitted half", titan[::2], values)
        _print_errors("other half", titan[1::2], values)
        return
    spans: dict[str, list[float]] = {name: [] for name in FREE}
    for seed in range(halves):
        chosen = set(random.Random(seed).sample(range(len(titan)), len(titan) // 2))
        values = fit([titan[i] for i in sorted(chosen)] + alone)
        _print_errors(f"half {seed}, the rest", [row for i, row in enumerate(titan) if i not in chosen], values)
        for name, value in values.items():
            spans[name].append(value)
    print({name: (round(min(span), 4), round(max(span), 4)) for name, span in spans.items()})


if __name__ == "__main__":
    main()
