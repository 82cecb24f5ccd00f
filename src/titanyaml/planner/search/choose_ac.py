"""``ac=auto``: of all ways to recompute, the fastest that fits into a given memory.

Both are planned; where the planner has no rates for a device, those of an H200 stand in, since only the order counts.
"""

from __future__ import annotations

import bisect
import copy
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from titanyaml.config.schema import ActivationCheckpointing, Config
from titanyaml.errors import ConfigError
from titanyaml.planner.model import memory, memory_of_kept, operators, step
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.search.remedies import Change

#: Of what the allocator can have: left free, since memory is planned within about that.
RESERVE = 0.05
#: The compiler keeps this share for nothing; below it, it repeats attention and is no better than selective_op (H200).
BUDGET = 0.8
#: A step with it over one without recomputation, as measured (docs/performance.md); planned are up to 1.02, since the
#: planner counts every cheap pass of a block once more.
_COST = 1.004


@dataclass(frozen=True)
class Option:
    """One way to recompute: what to type, planned peak memory, planned seconds a step, whether it fits."""

    typed: str
    memory_gib: float
    step_s: float
    fits: bool


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Args:
        ac: the concrete section. plan: with it. options: the fastest first. limit_gib, limit: what is to be kept, and
            where it comes from.
    """

    ac: ActivationCheckpointing
    plan: Plan
    options: list[Option]
    limit_gib: float
    limit: str

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(option.fits for option in self.options)

    def sentence(self) -> str:
        """For a log: what was chosen, what it is planned to need, and what would have been less recomputation."""
        chosen = next(option for option in self.options if option.typed == override(self.ac))
        faster = self.options[: self.options.index(chosen)]
        told = [*faster[:1], *faster[1:][-1:]]  # no recomputation, and what was missed narrowly
        others = "".join(f"; {option.typed} would need {option.memory_gib:.1f}" for option in told)
        verdict = "" if self.fits else ", which does not fit"
        return (
            f"ac=auto: {chosen.typed}, planned {chosen.memory_gib:.1f} GiB of {self.limit_gib:.1f} ({self.limit})"
            f"{verdict}{others}"
        )

    def record(self) -> dict[str, Any]:
        """For status.json, plan.json and bench.json."""
        return {
            "asked": "auto",
            "chosen": override(self.ac),
            "fits": self.fits,
            "limit_gib": self.limit_gib,
            "limit": self.limit,
            "memory_gib": self.plan.memory.with_margin / memory.GIB,
            "options": [asdict(option) for option in self.options],
        }


def limit(config: Config, *, device_gib: float | None, reserve_gib: float) -> tuple[float, str]:
    """(GiB that may be reserved, where that comes from): ``ac.memory_gib``, or what a device has free, if less.

    Args:
        device_gib: the device's memory. reserve_gib: of it, outside the allocator.

    Raises:
        ConfigError: neither is known.
    """
    limits: list[tuple[float, str]] = []
    if config.ac.memory_gib is not None:
        limits.append((config.ac.memory_gib, "ac.memory_gib"))
    if device_gib is not None:
        limits.append(
            (
                (device_gib - reserve_gib) * (1 - RESERVE),
                f"{device_gib:.1f} of the device less {reserve_gib:g} and {RESERVE:.0%}",
            )
        )
    if not limits:
        raise ConfigError("is null, and the device's memory is not known", key="ac.memory_gib", hint="ac.memory_gib=16")
    return min(limits)


def choose(config: Config, job: Job, *, limit_gib: float, why: str) -> Choice:
    """Plan every way; where none fits, the one that needs the least memory.

    Args:
        job: of ``config``, on the device where it will run. why: of the limit.
    """
    found: list[tuple[Option, ActivationCheckpointing, Plan]] = []
    for ac in _ways(config, job, limit_gib):
        one = replace(job, ac=ac.mode, ac_every=ac.every, ac_budget=ac.budget, ac_keep=ac.keep_products)
        made = Plan(one, step.plan_step(one), memory_of_kept.plan_memory(one))
        size, seconds = made.memory.with_margin / memory.GIB, made.step.seconds
        if ac.mode == "memory_budget" and not any(map(partial(operators.redone, one), set(job.shape.blocks))):
            seconds = min(seconds, _COST * found[0][0].step_s)
        found.append((Option(override(ac), size, seconds, size <= limit_gib), ac, made))
    found.sort(key=lambda entry: entry[0].step_s)  # stable: less recomputation first where times are equal
    fitting = [entry for entry in found if entry[0].fits]
    _, ac, made = fitting[0] if fitting else min(found, key=lambda entry: entry[0].memory_gib)
    return Choice(ac, made, [option for option, _, _ in found], limit_gib, why)


def concrete(config: Config, choice: Choice) -> Config:
    """``config`` with the mode that was chosen, in its section and in the plugin's node."""
    nodes = copy.deepcopy(config.pipeline.plugins)
    names = ("mode", "every", "budget", "keep_products", "memory_gib")
    nodes["ac"] |= {name: getattr(choice.ac, name) for name in names}
    return replace(config, ac=choice.ac, pipeline=replace(config.pipeline, plugins=nodes))


def refusal(choice: Choice, ways: list[Change]) -> ConfigError:
    """That nothing fits: the largest part, and the changes with which something would, if any without more devices.

    Args:
        ways: of the choice that needs the least memory.
    """
    room = choice.plan.memory
    part, size = max(room.parts.items(), key=lambda one: one[1])
    here = [way.typed for way in ways if way.devices <= choice.plan.job.mesh.world_size]
    need = room.with_margin / memory.GIB
    larger = f"ac.memory_gib={math.ceil(need)}" if choice.limit == "ac.memory_gib" else "more ranks"
    return ConfigError(
        f"is auto, and nothing fits: even {override(choice.ac)} is planned to need "
        f"{need:.1f} GiB of {choice.limit_gib:.4g} ({choice.limit}), the largest part "
        f"is {part} with {size / memory.GIB:.1f} GiB",
        key="ac.mode",
        hint=" or ".join(here or [way.typed for way in ways]) or larger,
    )


def override(ac: ActivationCheckpointing) -> str:
    """What to type for it."""
    detail = {"selective_layer": f" ac.every={ac.every}", "memory_budget": f" ac.budget={ac.budget:g}"}
    if ac.keep_products != ActivationCheckpointing().keep_products:
        detail["selective_op"] = f" ac.keep_products={ac.keep_products:g}"
    return f"ac={ac.mode}{detail.get(ac.mode, '')}"


def _ways(config: Config, job: Job, limit_gib: float) -> list[ActivationCheckpointing]:
    """Concrete sections, the least recomputation first. Only Inductor keeps a budget."""
    base = replace(config.ac, memory_gib=None)
    found = [replace(base, mode="none")]
    if job.compiled and config.compile.backend == "inductor":
        found.append(replace(base, mode="memory_budget", budget=BUDGET))
    found += [replace(base, mode="selective_layer", every=every) for every in _periods(job)]
    found += [replace(base, mode="selective_op", keep_products=share) for share in _shares(job, limit_gib)]
    return [*found, replace(base, mode="full")]


def _periods(job: Job) -> list[int]:
    """Of ``ac.every``, the longest first: each recomputes another number of blocks, as evenly spread as can be."""
    layers = job.shape.num_layers
    counts: dict[int, int] = {}  # blocks that are recomputed -> smallest period
    for every in range(2, layers + 1):
        counts.setdefault(-(-layers // every), every)
    return sorted(counts.values(), reverse=True)


def longest_period(job: Job, limit_gib: float) -> int | None:
    """The longest ``ac.every`` that fits; None where none does."""
    periods = _periods(job)
    first = bisect.bisect_left(
        periods, True, key=lambda every: not _exceeds(replace(job, ac="selective_layer", ac_every=every), limit_gib)
    )
    return periods[first] if first < len(periods) else None


def largest_share(job: Job, limit_gib: float) -> float | None:
    """The largest ``ac.keep_products`` that fits, in half blocks; None where none does."""
    over = _first_over(job, limit_gib)
    return _share(job, over - 1) if over else None


def _shares(job: Job, limit_gib: float) -> list[float]:
    """Of kept products, the largest first: the largest that fits, the next larger one, and every second product."""
    half, over = job.shape.num_layers, _first_over(job, limit_gib)
    steps = {over - 1, over, half} & set(range(2 * half + 1))
    return [_share(job, step) for step in sorted(steps, reverse=True)]


def _share(job: Job, step: int) -> float:
    """Of kept products, in steps of half blocks."""
    return round(step / (2 * job.shape.num_layers), 4)


def _first_over(job: Job, limit_gib: float) -> int:
    """The first step that does not fit, or one more than there are."""
    return bisect.bisect_left(
        range(2 * job.shape.num_layers + 1),
        True,
        key=lambda step: _exceeds(replace(job, ac="selective_op", ac_keep=_share(job, step)), limit_gib),
    )


def _exceeds(job: Job, limit_gib: float) -> bool:
    return memory_of_kept.plan_memory(job).with_margin / memory.GIB > limit_gib
