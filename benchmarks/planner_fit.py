"""Repeat the fit behind ``planner/constants.py`` and ``conf/``: half of torchtitan's rows fit, the other half tests.

    python benchmarks/planner_fit.py              one split: every other row
    python benchmarks/planner_fit.py --halves 20  random halves: how far errors and numbers move

Coordinate descent on a soft-L1 of log ratios, with a weak prior at the value from which each number started. The
one-GPU rows of the H200 always take part. Nothing is written.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, replace

import planner_rows
from planner_rows import Row, statistics_of

from titanyaml.planner import constants, step


@dataclass(frozen=True)
class Free:
    """A number that is fitted: where it starts, its plausible interval, and how far the prior lets it go (log)."""

    start: float
    low: float
    high: float
    spread: float


#: Names in capitals are those of planner/constants.py. gemm: of the 500 W H100. Starts are guesses from single kernels.
FREE = {
    "gemm_tflops": Free(553, 548, 600, 0.03), "fp8_over_bf16": Free(1.9, 1.8, 2.0, 0.03),
    "nvlink_gb_s": Free(252, 189, 330, 0.1), "rdma_gb_s": Free(39, 36, 42, 0.03),
    "CAST_TENSORWISE": Free(9.6, 8.3, 12.2, 0.1), "CAST_ROWWISE": Free(26, 18, 30, 0.1),
    "CONTENTION": Free(0.18, 0.1, 0.27, 0.15), "ASYNC_TP_HIDDEN": Free(0.39, 0.23, 0.5, 0.1),
    "STRAGGLER": Free(0.0053, 0.004, 0.014, 0.2), "CONTEXT_SLOWDOWN": Free(0.45, 0.3, 0.6, 0.1),
    "GEMM_SHAPE_FP8": Free(228, 169, 285, 0.1), "FSDP_COPY": Free(20, 14, 24, 0.1),
}
_SOFT = 0.03  # log ratio from which an error counts linearly


def errors(rows: list[Row], values: dict[str, float]) -> list[float]:
    """log(planned / published) of each row under ``values``."""
    for name, value in values.items():
        if name.isupper():
            object.__setattr__(getattr(constants, name), "value", value)
    return [math.log(_tps(row, values) / row.published) for row in rows]


def _tps(row: Row, values: dict[str, float]) -> float:
    job, device, network = row.job, row.job.device, row.job.network
    if device.name == "h100_500w":
        rate = values["gemm_tflops"]
        flash = tuple(one * rate / device.bf16_tflops for one in device.flash_tflops)  # the same clock
        device = replace(device, bf16_tflops=rate, fp8_tflops=rate * values["fp8_over_bf16"], flash_tflops=flash)
    if job.mesh.world_size > 1:
        network = replace(network, nvlink_gb_s=values["nvlink_gb_s"], rdma_gb_s=values["rdma_gb_s"])
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
    for factor in (1.06, 1.06, 1.02, 1.02):
        for name, free in FREE.items():
            for way in (factor, 1 / factor):
                moved = True
                while moved:
                    tried = {**values, name: min(free.high, max(free.low, values[name] * way))}
                    moved = tried[name] != values[name] and (lower := cost(rows, tried)) < best - 1e-6
                    if moved:
                        best, values = lower, tried
    return values


def _tell(name: str, rows: list[Row], values: dict[str, float]) -> list[float]:
    found = [math.exp(error) - 1 for error in errors(rows, values)]
    print(f"{name}: " + ", ".join(f"{100 * value:.1f}" for value in statistics_of(found)) + " % (median, p90, worst)")
    return found


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Repeat the fit.")
    parser.add_argument("--halves", type=int, default=0)
    halves = parser.parse_args().halves
    planned = [row for row in planner_rows.rows() if not row.reason]
    titan = [row for row in planned if row.group == "torchtitan"]
    alone = [row for row in planned if row.group == "measured" and row.job.mesh.world_size == 1]
    if not halves:
        values = fit(titan[::2] + alone)
        print({name: round(value, 4) for name, value in values.items()})
        _tell("fitted half", titan[::2], values)
        _tell("other half", titan[1::2], values)
        return
    spans: dict[str, list[float]] = {name: [] for name in FREE}
    for seed in range(halves):
        chosen = set(random.Random(seed).sample(range(len(titan)), len(titan) // 2))
        values = fit([titan[i] for i in sorted(chosen)] + alone)
        _tell(f"half {seed}, the rest", [row for i, row in enumerate(titan) if i not in chosen], values)
        for name, value in values.items():
            spans[name].append(value)
    print({name: (round(min(span), 4), round(max(span), 4)) for name, span in spans.items()})


if __name__ == "__main__":
    main()
