"""``ac=auto``: of all ways to recompute, the fastest whose planned memory fits.

Every way is planned in full, time and memory; there are about a dozen. Where the planner has no rates for a device,
those of an H200 stand in: only the order of the ways counts.
"""

import bisect
import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from titanyaml.config.schema import ActivationCheckpointingConfig, Config
from titanyaml.errors import ConfigError
from titanyaml.planner.model import memory, operators
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.plan import Plan, plan_job
from titanyaml.planner.search.remedies import Remedy

#: Share of the allocator's memory that is left free: planned memory was off by about that.
RESERVE = 0.05
#: The one budget that is offered: the compiler meets it by repeating cheap passes. Smaller ones repeat attention in the
#: end, and selective_op was as fast in less memory (H200, docs/planner.md).
BUDGET = 0.8
#: Step time under BUDGET over that without recomputation, as measured (docs/performance.md). The plan itself says up to
#: 1.02, since it counts every cheap pass of a block once more.
_BUDGET_TIME = 1.004


class MemoryLimit(NamedTuple):
    """GiB that the allocator may reserve, and where the figure comes from."""

    gib: float
    source: str


@dataclass(frozen=True)
class AcOption:
    """One way to recompute, as planned."""

    typed: str  # overrides
    memory_gib: float  # peak
    step_s: float
    fits: bool


@dataclass(frozen=True)
class AcChoice:
    """What was chosen, and among what."""

    ac: ActivationCheckpointingConfig  # concrete
    plan: Plan  # with it
    options: list[AcOption]  # the fastest first
    limit: MemoryLimit

    @property
    def fits(self) -> bool:
        return any(option.fits for option in self.options)

    def sentence(self) -> str:
        """For the log: the choice, its planned memory, and what less recomputation would have needed."""
        chosen = next(option for option in self.options if option.typed == override(self.ac))
        faster = self.options[: self.options.index(chosen)]
        missed = [*faster[:1], *faster[1:][-1:]]  # no recomputation, and the option that was missed narrowly
        alternatives = "".join(f"; {option.typed} would need {option.memory_gib:.1f}" for option in missed)
        verdict = "" if self.fits else ", which does not fit"
        planned = f"planned {chosen.memory_gib:.1f} GiB of {self.limit.gib:.1f} ({self.limit.source})"
        return f"ac=auto: {chosen.typed}, {planned}{verdict}{alternatives}"

    def record(self) -> dict[str, Any]:
        """For status.json, plan.json and bench.json."""
        return {
            "asked": "auto",
            "chosen": override(self.ac),
            "fits": self.fits,
            "limit_gib": self.limit.gib,
            "limit": self.limit.source,
            "memory_gib": planned_gib(self.plan.memory),
            "options": [asdict(option) for option in self.options],
        }


def memory_limit(config: Config, *, device_gib: float | None) -> MemoryLimit:
    """The less of ``ac.memory_gib`` and what the device leaves to the allocator less RESERVE; an error without both."""
    # A typed figure is kept to the letter, so that one read off a table of plans can be typed as it stands; only the
    # device's own edge, where a plan must not be wrong, keeps the reserve.
    limits: list[MemoryLimit] = []
    if config.ac.memory_gib is not None:
        limits.append(MemoryLimit(config.ac.memory_gib, "ac.memory_gib"))
    if device_gib is not None:
        reserved = config.hardware.reserve_gib  # CUDA context and NCCL, outside the allocator
        source = f"{device_gib:.1f} of the device less {reserved:g} and {RESERVE:.0%}"
        limits.append(MemoryLimit((device_gib - reserved) * (1 - RESERVE), source))
    if not limits:
        raise ConfigError("is null, and the device's memory is not known", key="ac.memory_gib", hint="ac.memory_gib=16")
    return min(limits)


def choose(config: Config, job: Job, limit: MemoryLimit) -> AcChoice:
    """The fastest way to recompute that fits, else the one of the least memory, for ``job`` of ``config``."""
    planned: list[tuple[AcOption, ActivationCheckpointingConfig, Plan]] = []
    blocks = set(job.shape.blocks)
    for ac in _sections(config, job, limit.gib):
        plan = plan_job(replace(job, ac=ac.mode, ac_every=ac.every, ac_budget=ac.budget, ac_keep=ac.keep_products))
        gib, seconds = planned_gib(plan.memory), plan.step.seconds
        if ac.mode == "memory_budget" and not any(operators.recomputed(plan.job, block) for block in blocks):
            seconds = min(seconds, _BUDGET_TIME * planned[0][0].step_s)  # the first one planned is "none"
        planned.append((AcOption(override(ac), gib, seconds, gib <= limit.gib), ac, plan))
    planned.sort(key=lambda entry: entry[0].step_s)  # stable: less recomputation first where times are equal
    fitting = [entry for entry in planned if entry[0].fits]
    _, ac, plan = fitting[0] if fitting else min(planned, key=lambda entry: entry[0].memory_gib)
    return AcChoice(ac, plan, [option for option, _, _ in planned], limit)


def concrete(config: Config, choice: AcChoice) -> Config:
    """``config`` with the chosen mode, in its section and in the plugin's node."""
    nodes = copy.deepcopy(config.pipeline.plugins)  # ``config`` is what was typed, and stays so
    names = ("mode", "every", "budget", "keep_products", "memory_gib")
    nodes["ac"] |= {name: getattr(choice.ac, name) for name in names}
    return replace(config, ac=choice.ac, pipeline=replace(config.pipeline, plugins=nodes))


def refusal(choice: AcChoice, remedies: Sequence[Remedy]) -> ConfigError:
    """The error that nothing fits: the largest part, and changes of the choice after which it would."""
    planned = choice.plan.memory
    largest_part, size = max(planned.parts.items(), key=lambda part: part[1])
    need = planned_gib(planned)
    # more devices are named only where nothing else helps
    on_these_devices = [remedy.typed for remedy in remedies if remedy.devices <= choice.plan.job.mesh.world_size]
    more_memory = f"ac.memory_gib={math.ceil(need)}" if choice.limit.source == "ac.memory_gib" else "more ranks"
    return ConfigError(
        f"is auto, and nothing fits: even {override(choice.ac)} is planned to need {need:.1f} GiB of "
        f"{choice.limit.gib:.4g} ({choice.limit.source}), the largest part is {largest_part} with "
        f"{size / memory.GIB:.1f} GiB",
        key="ac.mode",
        hint=" or ".join(on_these_devices or [remedy.typed for remedy in remedies]) or more_memory,
    )


def override(ac: ActivationCheckpointingConfig) -> str:
    """What to type for a section."""
    detail = {"selective_layer": f" ac.every={ac.every}", "memory_budget": f" ac.budget={ac.budget:g}"}
    if ac.keep_products != ActivationCheckpointingConfig().keep_products:
        detail["selective_op"] = f" ac.keep_products={ac.keep_products:g}"
    return f"ac={ac.mode}{detail.get(ac.mode, '')}"


def _sections(config: Config, job: Job, limit_gib: float) -> list[ActivationCheckpointingConfig]:
    """Concrete sections to plan, the least recomputation first."""
    base = replace(config.ac, memory_gib=None)
    sections = [replace(base, mode="none")]
    if job.compiled and config.compile.backend == "inductor":  # other backends ignore the budget
        sections.append(replace(base, mode="memory_budget", budget=BUDGET))
    sections += [replace(base, mode="selective_layer", every=period) for period in _periods(job)]
    sections += [replace(base, mode="selective_op", keep_products=share) for share in _shares(job, limit_gib)]
    return [*sections, replace(base, mode="full")]


def _periods(job: Job) -> list[int]:
    """Values of ``ac.every``, the longest first; of several that recompute equally many blocks, the shortest."""
    layers = job.shape.num_layers
    shortest: dict[int, int] = {}  # by number of recomputed blocks
    for period in range(2, layers + 1):
        shortest.setdefault(-(-layers // period), period)
    return sorted(shortest.values(), reverse=True)


def longest_period(job: Job, limit_gib: float) -> int | None:
    """The longest ``ac.every`` that fits; None where none does."""
    periods = _periods(job)  # memory falls along them: bisection finds the first that fits

    def fits(period: int) -> bool:
        return planned_gib(memory.plan_memory(replace(job, ac="selective_layer", ac_every=period))) <= limit_gib

    index = bisect.bisect_left(periods, True, key=fits)
    return periods[index] if index < len(periods) else None


def largest_share(job: Job, limit_gib: float) -> float | None:
    """The largest ``ac.keep_products`` that fits, in half blocks; None where none does."""
    first_over = _first_over(job, limit_gib)
    return _share(job, first_over - 1) if first_over else None


def _shares(job: Job, limit_gib: float) -> list[float]:
    """Of ``ac.keep_products``: the next above the largest that fits, that one, and 0.5, the larger ones first."""
    # the next above shows in the table of options how narrowly it was missed
    first_over, default = _first_over(job, limit_gib), job.shape.num_layers
    half_blocks = {first_over - 1, first_over, default} & set(range(2 * job.shape.num_layers + 1))
    return [_share(job, number) for number in sorted(half_blocks, reverse=True)]


def _share(job: Job, half_blocks: int) -> float:
    """``ac.keep_products`` that keeps so many half blocks of GEMM outputs."""
    return round(half_blocks / (2 * job.shape.num_layers), 4)  # as it is typed; the plugin rounds to half blocks


def _first_over(job: Job, limit_gib: float) -> int:
    """The fewest kept half blocks that do not fit, by bisection; one more than there are where all of them fit."""

    def exceeds(half_blocks: int) -> bool:
        recomputing = replace(job, ac="selective_op", ac_keep=_share(job, half_blocks))
        return planned_gib(memory.plan_memory(recomputing)) > limit_gib

    return bisect.bisect_left(range(2 * job.shape.num_layers + 1), True, key=exceeds)


def planned_gib(planned: memory.Memory) -> float:
    return planned.with_margin / memory.GIB
