"""Rules of planning: a device and links that the planner knows the rates of."""

from __future__ import annotations

import math
from typing import Any

from titanyaml.config.rules.view import Rule, into, ways
from titanyaml.config.world import count_ranks
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)

_RATES = (
    "gemm_bf16_tflops",
    "memory_tb_s",
    "flash_forward_tflops",
    "flash_backward_tflops",
    "peak_bf16_tflops",
    "memory_gib",
)


#: Sustained rates, and how many times the dense bf16 peak each can be at most.
_BELOW_PEAK = {
    "gemm_bf16_tflops": 1,
    "gemm_fp8_tflops": 2,
    "flash_forward_tflops": 1,
    "flash_backward_tflops": 1,
    "cudnn_forward_tflops": 1,
    "cudnn_backward_tflops": 1,
}


@rule("hardware")
def reserve_leaves_memory(c: Any) -> Problem | None:
    reserve, memory = c.hardware.reserve_gib, c.hardware.memory_gib
    if memory is None or reserve < memory:
        return None
    way = "hardware.reserve_gib=1.5" if memory > 1.5 else f"hardware.memory_gib={math.ceil(reserve) + 1}"
    return Problem(
        "hardware.reserve_gib",
        f"is {reserve:g}, but the device has hardware.memory_gib={memory:g}: a run is left nothing",
        allowed=f"below {memory:g}",
        hint=way,
    )


@rule("hardware")
def rates_are_below_their_peak(c: Any) -> Problem | None:
    peak = c.hardware.peak_bf16_tflops
    for name, times in _BELOW_PEAK.items():
        rate = getattr(c.hardware, name)
        if None in (peak, rate) or rate <= times * peak:
            continue
        of = f"hardware.peak_bf16_tflops={peak:g}" if times == 1 else f"twice hardware.peak_bf16_tflops={peak:g}"
        return Problem(
            f"hardware.{name}",
            f"is {rate:g} TFLOP/s sustained, above {of}",
            allowed=f"{times * peak:g} or less",
            hint=f"hardware.{name}={times * peak:g} or hardware.peak_bf16_tflops={rate / times:g}",
        )
    return None


@rule("runner.name", "hardware")
def planned_device_has_rates(c: Any) -> Problem | None:
    missing = [name for name in _RATES if getattr(c.hardware, name) is None]
    if c.runner.name != "plan" or not missing:
        return None
    return Problem(
        f"hardware.{missing[0]}",
        f"is null: runner=plan reckons with the rates of a device, and hardware={c.hardware.name} has none",
        allowed="a file of conf/hardware with rates, or these keys given",
        hint=ways(
            "hardware", ["h200", "h100_sxm", "h100_500w", "h100_pcie", "gh200", "a100_80gb", "a100_40gb", "b200"]
        ),
    )


@rule("runner.name", "cluster", "parallel", "launch")
def planned_ranks_have_links(c: Any) -> Problem | None:
    ranks = count_ranks(c)
    if c.runner.name != "plan" or ranks in (1, None):
        return None
    hosts = ranks > c.cluster.gpus_per_host
    if c.cluster.nvlink_gb_s is not None and (c.cluster.rdma_gb_s is not None or not hosts):
        return None
    name = "nvlink_gb_s" if c.cluster.nvlink_gb_s is None else "rdma_gb_s"
    return Problem(f"cluster.{name}", f"is null, but {ranks} ranks are planned", hint="cluster=hgx_400g")
