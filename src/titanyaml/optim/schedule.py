"""The learning rate as a pure function of the step and the configuration: there is no state to go stale on resume."""

import math

from titanyaml.config import schema
from titanyaml.errors import ConfigError


def lr_at(spec: schema.Schedule, *, step: int, steps: int, lr: float) -> float:
    """Learning rate of ``step`` (from 1 to ``steps``): linear warm-up to the peak ``lr``, then ``spec.kind``.
    ``cosine`` (half a period) and ``linear`` fall to ``min_lr_ratio * lr`` at the last step; ``wsd`` stays at the peak
    and falls linearly over the last ``decay_steps``; ``constant`` stays. ConfigError: warm-up and decay do not fit.
    """
    assert 1 <= step <= steps, f"step {step} of {steps}"
    decay_steps = spec.decay_steps if spec.kind == "wsd" else 0
    if spec.warmup_steps + decay_steps > steps:
        raise ConfigError(
            f"{spec.warmup_steps} steps of warm-up and {decay_steps} of decay do not fit into train.steps={steps}",
            key="schedule.warmup_steps",
            hint=f"schedule.warmup_steps={max(steps - decay_steps, 0) // 2}",
        )
    # Step 1 already trains, and the peak is reached exactly at the last step of warm-up. Where that is the last step of
    # all, this returns: no decay below divides by 0.
    peak_step = max(spec.warmup_steps, 1)
    if step <= peak_step:
        return lr * (step / peak_step)
    match spec.kind:
        case "constant":
            return lr
        case "wsd":
            return _decayed(lr, spec.min_lr_ratio, 1 - (steps - step) / decay_steps if decay_steps else 0.0)
        case "linear":
            return _decayed(lr, spec.min_lr_ratio, (step - peak_step) / (steps - peak_step))
        case "cosine":
            progress = (step - peak_step) / (steps - peak_step)
            return _decayed(lr, spec.min_lr_ratio, 0.5 * (1 - math.cos(math.pi * progress)))
    raise AssertionError(f"unknown schedule {spec.kind!r}")


def _decayed(lr: float, min_ratio: float, progress: float) -> float:
    """Interpolate from ``lr`` (progress 0 or less) to ``min_ratio * lr`` (progress 1)."""
    # both ends are returned as they are: interpolated, they would be off by a rounding
    if progress <= 0:
        return lr
    return lr * min_ratio if progress >= 1 else lr * (1 - (1 - min_ratio) * progress)
