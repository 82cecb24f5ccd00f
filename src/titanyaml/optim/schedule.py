"""The learning rate as a pure function of the step and the configuration: there is no state to go stale on resume."""

from __future__ import annotations

import math

from titanyaml.config import schema
from titanyaml.errors import ConfigError


def lr_at(spec: schema.Schedule, *, step: int, steps: int, lr: float) -> float:
    """Learning rate of one step.

    Warm-up is linear: step 1 already trains, the peak is reached exactly at ``warmup_steps`` (at step 1 without
    warm-up). Then ``cosine`` (half a period) and ``linear`` fall from there to exactly ``min_lr_ratio * lr`` at the
    last step, ``wsd`` stays and falls linearly over the last ``decay_steps``, ``constant`` stays. Where the peak is the
    last step, nothing is left to fall.

    Args:
        step: from 1 to ``steps``. lr: the peak.

    Raises:
        ConfigError: warm-up and decay do not fit into ``steps``.
    """
    assert 1 <= step <= steps, f"step {step} of {steps}"
    decay_steps = spec.decay_steps if spec.kind == "wsd" else 0
    if spec.warmup_steps + decay_steps > steps:
        raise ConfigError(
            f"{spec.warmup_steps} steps of warm-up and {decay_steps} of decay do not fit into train.steps={steps}",
            key="schedule.warmup_steps",
            hint=f"schedule.warmup_steps={max(steps - decay_steps, 0) // 2}",
        )
    peak_step = max(spec.warmup_steps, 1)
    if step <= peak_step:
        return lr * (step / peak_step)
    match spec.kind:
        case "constant":
            return lr
        case "wsd":
            return _between(lr, spec.min_lr_ratio, 1 - (steps - step) / decay_steps if decay_steps else 0.0)
        case "linear":
            return _between(lr, spec.min_lr_ratio, (step - peak_step) / (steps - peak_step))
        case "cosine":
            progress = (step - peak_step) / (steps - peak_step)
            return _between(lr, spec.min_lr_ratio, 0.5 * (1 - math.cos(math.pi * progress)))
    raise AssertionError(f"unknown schedule {spec.kind!r}")


def _between(lr: float, ratio: float, fallen: float) -> float:
    """From ``lr`` (fallen 0 or less) to ``ratio * lr`` (fallen 1), both ends exact."""
    if fallen <= 0:
        return lr
    return lr * ratio if fallen >= 1 else lr * (1 - (1 - ratio) * fallen)
