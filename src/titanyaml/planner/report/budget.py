"""What a whole training takes: days, device-hours, energy, money."""

from __future__ import annotations

from typing import Any

from titanyaml.planner.model.plan import Plan


def budget(made: Plan, *, tokens: float, power_w: float | None, price_per_hour: float | None) -> dict[str, Any]:
    """Of ``tokens`` at the planned speed; validation, checkpoints and restarts not counted.

    Returns:
        token_budget, tokens_per_day, days, gpu_hours; energy_mwh at the devices' power limit and cost, null where the
        device does not say.
    """
    ranks = made.job.mesh.world_size
    per_second = made.tps * ranks
    hours = tokens / per_second / 3600 * ranks
    return {
        "token_budget": tokens,
        "tokens_per_day": per_second * 86400,
        "days": tokens / per_second / 86400,
        "gpu_hours": hours,
        "energy_mwh": None if power_w is None else hours * power_w / 1e6,
        "cost": None if price_per_hour is None else hours * price_per_hour,
    }
