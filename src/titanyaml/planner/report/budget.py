"""What a whole training takes: days, device-hours, energy, money."""

from __future__ import annotations

from typing import Any

from titanyaml.planner.model.plan import Plan


def budget(plan: Plan, *, tokens: float, power_w: float | None, price_per_hour: float | None) -> dict[str, Any]:
    """The budget of ``tokens`` at the planned speed, without validation, checkpoints and restarts.

    Args:
        power_w: limit of a device; energy is null without it. price_per_hour: of a device; cost is null without it.
    """
    ranks = plan.job.mesh.world_size
    tokens_per_s = plan.tps * ranks
    device_hours = tokens / tokens_per_s / 3600 * ranks
    return {
        "token_budget": tokens,
        "tokens_per_day": tokens_per_s * 86400,
        "days": tokens / tokens_per_s / 86400,
        "gpu_hours": device_hours,
        "energy_mwh": None if power_w is None else device_hours * power_w / 1e6,
        "cost": None if price_per_hour is None else device_hours * price_per_hour,
    }
