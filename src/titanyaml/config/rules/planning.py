"""Rules of planning: a device and links whose rates are known and possible."""

import math
from typing import Any

from titanyaml.config.rules.view import RuleTable, problem, settings
from titanyaml.config.world import count_ranks
from titanyaml.errors import Problem

rule = RuleTable()

#: Sustained rates of bfloat16, none of which can be above the dense bf16 peak; float8 has twice that peak.
_BF16_RATES = ("gemm_bf16_tflops", "flash_forward_tflops", "flash_backward_tflops")
_OTHER_RATES = ("cudnn_forward_tflops", "cudnn_backward_tflops")
_TIMES_PEAK = dict.fromkeys((*_BF16_RATES, *_OTHER_RATES), 1) | {"gemm_fp8_tflops": 2}
#: Keys of hardware that a plan cannot do without, and options of the group that have them all.
_REQUIRED = (*_BF16_RATES, "memory_tb_s", "peak_bf16_tflops", "memory_gib")
_DEVICES = ("h200", "h100_sxm", "h100_500w", "h100_pcie", "gh200", "a100_80gb", "a100_40gb", "b200")


@rule("hardware")
def reserve_is_below_device_memory(c: Any) -> Problem | None:
    reserve, memory = c.hardware.reserve_gib, c.hardware.memory_gib
    if memory is None or reserve < memory:
        return None
    # 1.5 GiB is the default of the reserve
    fix = "hardware.reserve_gib=1.5" if memory > 1.5 else f"hardware.memory_gib={math.ceil(reserve) + 1}"
    message = f"is {reserve:g}, but the device has hardware.memory_gib={memory:g}: a run is left nothing"
    return problem("hardware.reserve_gib", message, f"below {memory:g}", fix)


@rule("hardware")
def rates_are_below_peak(c: Any) -> Problem | None:
    peak = c.hardware.peak_bf16_tflops
    for name, times in _TIMES_PEAK.items():
        rate = getattr(c.hardware, name)
        if peak is None or rate is None or rate <= times * peak:
            continue
        limit = f"twice hardware.peak_bf16_tflops={peak:g}" if times == 2 else f"hardware.peak_bf16_tflops={peak:g}"
        message = f"is {rate:g} TFLOP/s sustained, above {limit}"
        fixes = (f"hardware.{name}={times * peak:g}", f"hardware.peak_bf16_tflops={rate / times:g}")
        return problem(f"hardware.{name}", message, f"{times * peak:g} or less", *fixes)
    return None


@rule("runner.name", "hardware")
def plan_needs_device_rates(c: Any) -> Problem | None:
    missing = next((name for name in _REQUIRED if getattr(c.hardware, name) is None), None)
    if c.runner.name != "plan" or missing is None:
        return None
    rates = f"runner=plan reckons with the rates of a device, and hardware={c.hardware.name} has none"
    allowed = "a file of conf/hardware with rates, or these keys given"
    return problem(f"hardware.{missing}", f"is null: {rates}", allowed, settings("hardware", _DEVICES))


@rule("runner.name", "cluster", "parallel", "launch")
def plan_needs_link_rates(c: Any) -> Problem | None:
    ranks = count_ranks(c)
    if c.runner.name != "plan" or ranks is None or ranks == 1:
        return None
    if c.cluster.nvlink_gb_s is None:
        missing = "nvlink_gb_s"
    elif c.cluster.rdma_gb_s is None and ranks > c.cluster.gpus_per_host:
        missing = "rdma_gb_s"
    else:
        return None
    return problem(f"cluster.{missing}", f"is null, but {ranks} ranks are planned", "", "cluster=hgx_400g")
