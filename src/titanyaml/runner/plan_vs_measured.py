"""The planner's figures beside those of a run: ``plan`` in status.json, from step 20 on."""

from __future__ import annotations

from typing import Any

from titanyaml import hardware
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError
from titanyaml.planner.model import devices, from_config
from titanyaml.planner.model.plan import plan_job

#: Compilation, caches and clocks have settled by then.
FIRST_STEP = 20


def compare(config: Config, env: Env, record: dict[str, Any]) -> dict[str, Any] | None:
    """Planned and measured speed and memory; None on a CPU, and where the planner knows no rates of the device.

    Args:
        record: of ``metrics.jsonl``: ``step, tps, step_s, mem_reserved_gib``.
    """
    if env.device.type == "cpu":
        return None  # also where hardware=... describes another device
    device_rates, links = config.hardware, config.cluster
    if device_rates.name == "auto" and device_rates.gemm_bf16_tflops is None:
        device_rates, links = devices.shipped_device(hardware.detect(env.device) or "auto")
    try:
        expected = plan_job(from_config.job(config, hardware=device_rates, cluster=links))
    except ConfigError:
        return None
    measured = {"tps": record["tps"], "step_s": record["step_s"], "memory_gib": record["mem_reserved_gib"]}
    planned = {"tps": expected.tps, "step_s": expected.step.seconds, "memory_gib": expected.total_gib}
    return {
        "step": record["step"],
        "planned": planned,
        "measured": measured,
        "error": {name: planned[name] / measured[name] - 1 for name in planned},
    }
