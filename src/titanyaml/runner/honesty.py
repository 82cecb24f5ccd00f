"""What the planner would have said of a run, beside what it did: ``planned`` in status.json, from step 20 on."""

from __future__ import annotations

from typing import Any

from titanyaml import hardware
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError
from titanyaml.planner.model import devices, from_config
from titanyaml.planner.model import plan as planning

#: Compilation, caches and clocks have settled by then.
STEP = 20


def compare(config: Config, env: Env, record: dict[str, Any]) -> dict[str, Any] | None:
    """Planned and measured speed and memory; None on a CPU, and where device or model are unknown to the planner.

    Args:
        record: of ``metrics.jsonl``: ``step, tps, step_s, mem_reserved_gib``.
    """
    if env.device.type == "cpu":
        return None  # whatever the configuration says of it
    spec, links = config.hardware, config.cluster
    if spec.name == "auto" and spec.gemm_bf16_tflops is None:
        spec, links = devices.shipped_device(hardware.detect(env.device) or "auto")
    try:
        made = planning.plan(from_config.job(config, hardware=spec, cluster=links))
    except ConfigError:
        return None
    measured = {"tps": record["tps"], "step_s": record["step_s"], "memory_gib": record["mem_reserved_gib"]}
    planned = {"tps": made.tps, "step_s": made.step.seconds, "memory_gib": made.total_gib}
    return {
        "step": record["step"],
        "planned": planned,
        "measured": measured,
        "error": {name: planned[name] / measured[name] - 1 for name in planned},
    }
