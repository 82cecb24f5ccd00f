"""The fastest configurations that fit, on equally many ranks and with equally many sequences a step.

First every cell of a space is tried with the usual ways to recompute: pruned by the rules, then by memory. What is left
is timed in the order of a lower bound of its time, until none can be among the best. Then cells are tried, in the order
of such a bound again, with our own float8 GEMM kernels, and with fine steps of recomputation.

The bounds leave nothing out: the result is that of timing everything on every cell, which a test does. They save time,
since a plan's step takes five times as long as its rules and memory.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from titanyaml.config.schema import Config
from titanyaml.planner.model import constants, from_config, memory, step
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import Memory
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.search import choose_ac, space
from titanyaml.planner.search.space import Space, Values
from titanyaml.planner.search.variants import Variants

#: How many configurations a search lists.
NUM_BEST = 10


@dataclass(frozen=True)
class RankedConfig:
    """A configuration that fits: what to type beside the rest of the command, and its plan."""

    overrides: str
    plan: Plan

    def record(self) -> dict[str, Any]:
        """For search.json."""
        plan, classes = self.plan, self.plan.step.classes
        longest = sorted(classes, key=lambda name: -classes[name])[:3]
        why = ", ".join(f"{name} {100 * classes[name] / plan.step.seconds:.0f} %" for name in longest)
        figures = {"tps": plan.tps, "mfu": plan.mfu, "memory_gib": plan.total_gib}
        return {"change": self.overrides, **figures, "why": why}


@dataclass
class SearchResult:
    """What a search found so far."""

    best: list[RankedConfig] = dataclasses.field(default_factory=list)  # the fastest first
    tried: int = 0
    legal: int = 0  # of those tried: the rules allow them
    fitted: int = 0  # of those legal: the memory is enough
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by problem
    phase: str = ""


Progress = Callable[[SearchResult], None]


def find_fastest(config: Config, tried: Space, show_progress: Progress = lambda result: None) -> SearchResult:
    """Plan candidates around ``config``, on its number of ranks, or that of the meshes that are given.

    A step has ``train.global_batch`` sequences, else ``train.local_batch`` for each rank. ``show_progress`` is called
    with the result so far, thousands of times. Raises ConfigError where device, links or model are not known.
    """
    search = _Search(config, tried, show_progress)
    search.fine_passes(search.coarse_pass())
    return search.result


@dataclass(frozen=True)
class _Cell:
    """A cell of a space with one choice of kernels."""

    values: Values
    is_typed: bool  # kernels as typed, else as configured; False: our own, unasked
    least_seconds: float  # lower bound for a token and device, however the cell recomputes


@dataclass(frozen=True)
class _LegalConfig:
    """A configuration that the rules allow, planned but for its time."""

    values: Values
    job: Job
    memory: Memory

    @property
    def fits(self) -> bool:
        return _fits(self.job, self.memory)

    @cached_property
    def least_seconds(self) -> float:
        return _least_seconds(self.job)


class _Search:
    def __init__(self, config: Config, tried: Space, show_progress: Progress) -> None:
        self.config, self.space, self.show_progress = config, tried, show_progress
        self.variants, self.result = Variants(config, tried.typed), SearchResult()
        self.modes, self._lowest_bound = space.usual_modes(tried), math.inf

    def coarse_pass(self) -> list[_Cell]:
        """Try every cell with kernels as typed and the usual ways to recompute; return cells for the fine passes."""
        self.result.phase = "every mesh and batch"
        cells: list[_Cell] = []
        fitting: list[_LegalConfig] = []
        for cell in space.cells(self.config, self.space):
            legal_values: list[Values] = []
            fitting_in_cell: list[_LegalConfig] = []
            for kernels in space.typed_kernels(self.space, cell["quant.recipe"]):
                legal = [config for mode in self.modes if (config := self._check(cell | kernels | mode))]
                if legal:
                    legal_values.append(cell | kernels)
                fitting_in_cell += [config for config in legal if config.fits]
            if legal_values:
                cells += self._fine_cells(cell, legal_values, fits=bool(fitting_in_cell))
            fitting += fitting_in_cell
            # time what has the lowest bound so far: a best one to show before all are sorted
            for config in fitting_in_cell:
                if config.least_seconds < self._lowest_bound:
                    self._lowest_bound = config.least_seconds
                    self._time(config)
        self.result.best = []  # they are timed again, in the order of their bounds
        for config in sorted(fitting, key=lambda config: config.least_seconds):
            if self._is_slower(config.least_seconds):
                break
            self._time(config)
        return cells

    def _fine_cells(self, cell: Values, legal: list[Values], *, fits: bool) -> list[_Cell]:
        """What the fine passes try of a cell: it is ``legal`` with typed kernels, and ``fits`` or not with these."""
        # Full recomputation was among the usual ways: if it did not fit, no step between them does.
        hopeless = not fits and "full" in self.space.ac
        cells = [] if hopeless else [_Cell(values, True, self._bound(values)) for values in legal]
        own = [cell | kernels for kernels in space.own_kernels(self.config, self.space, cell["quant.recipe"])]
        own = [values for values in own if not hopeless or self._own_kernels_fit(values)]
        if own:  # the bound does not depend on masters, in which own kernels differ
            bound = self._bound(own[0])
            cells += [_Cell(values, False, bound) for values in own]
        return cells

    def _own_kernels_fit(self, values: Values) -> bool:
        """Whether own kernels fit where typed ones do not."""
        # only split masters spare memory; the kernels keep more, not less
        if values["optim.master"] == self.config.optim.master:
            return False
        job = self._job(values | {"ac.mode": "full"})
        return _fits(job, memory.plan_memory(job))

    def _job(self, values: Values) -> Job:
        return from_config.job(self.variants.config(values))

    def _bound(self, values: Values) -> float:
        return _least_seconds(self._job(values | {"ac.mode": "none"}))

    def fine_passes(self, cells: list[_Cell]) -> None:
        """Try cells that can be among the best, with own kernels, then with fine steps of recomputation."""
        # in this order: what own kernels reach is what every fine step then has to be faster than
        cells = sorted(cells, key=lambda cell: cell.least_seconds)
        self._fine_pass("own products", ((cell, self.modes) for cell in cells if not cell.is_typed))
        self._fine_pass("steps of recomputation", ((cell, self._fine_steps(cell.values)) for cell in cells))

    def _fine_pass(self, phase: str, cells: Iterable[tuple[_Cell, Iterable[Values]]]) -> None:
        """Try each cell with its ways to recompute, the cell of the lowest bound first."""
        self.result.phase = phase
        for cell, modes in cells:
            if self._is_slower(cell.least_seconds):
                break
            self.show_progress(self.result)
            for values in (cell.values | mode for mode in modes):
                if self._is_slower(_least_seconds(self._job(values))):  # recomputation raises the bound of its cell
                    continue
                config = self._check(values)
                if config and config.fits:
                    self._time(config)

    def _fine_steps(self, values: Values) -> Iterator[Values]:
        """Recomputation between the usual ways, where any is needed: of each mode with steps, as little as fits."""
        # RESERVE stays free, as with ac=auto: the usual ways leave memory by chance, a share that fills it leaves none
        job = self._job(values | {"ac.mode": "none"})
        limit = _limit_gib(job) * (1 - choose_ac.RESERVE)
        # ac=auto is refused for mixtures: none was measured
        if job.shape.mixture or ("none" in self.space.ac and choose_ac.planned_gib(memory.plan_memory(job)) <= limit):
            return
        if "selective_op" in self.space.ac and self.space.keep_products is None:
            keeps_all = dataclasses.replace(job, ac="selective_op", ac_keep=1.0)
            is_slower = self._is_slower(_least_seconds(keeps_all))
            share = None if is_slower else choose_ac.largest_share(job, limit)
            if share is not None:
                yield {"ac.mode": "selective_op", "ac.keep_products": share}
        # memory.py does not count what unrepeated blocks keep for own kernels in this mode
        has_layers = "selective_layer" in self.space.ac and "ac.every" not in self.space.typed and not job.own_float8
        if has_layers and (period := choose_ac.longest_period(job, limit)):
            yield {"ac.mode": "selective_layer", "ac.every": period}

    def _check(self, values: Values) -> _LegalConfig | None:
        """Ask the rules, plan the memory; None where it is not legal."""
        self.result.tried += 1
        self.show_progress(self.result)
        # the time comes last: it takes five times as long as rules and memory, and few candidates need it
        variant = self.variants.config(values)
        if problem := self.variants.problem(values, variant):
            self.result.refused[problem] += 1
            return None
        self.result.legal += 1
        job = from_config.job(variant)
        config = _LegalConfig(values, job, memory.plan_memory(job))
        self.result.fitted += config.fits
        return config

    def _is_slower(self, least_seconds: float) -> bool:
        """Whether what takes at least so long (seconds a token and device) cannot be among the best."""
        best = self.result.best
        return len(best) == NUM_BEST and 1 / least_seconds <= best[-1].plan.tps

    def _time(self, config: _LegalConfig) -> None:
        """Time what fits; keep it if it is among the best."""
        plan = Plan(config.job, step.plan_step(config.job), config.memory)
        best = [*self.result.best, RankedConfig(self.variants.overrides(config.values), plan)]
        self.result.best = sorted(best, key=lambda ranked: -ranked.plan.tps)[:NUM_BEST]


def _least_seconds(job: Job) -> float:
    """Lower bound of the seconds of a token and device."""
    # A rank's share of the blocks' own work, a pipeline's idle time, and the wait for the slowest host, which a plan
    # adds in proportion to that work. FSDP's transfers, the ends of the model and the optimizer only come on top.
    idle = job.bubble or 0.0
    if job.mesh.pp > 1 and job.bubble is None:
        idle = step.BUBBLES[job.schedule](job.mesh.pp, job.stages_per_rank)
    hosts = max(1.0, job.mesh.world_size / job.network.gpus_per_host)
    waiting = (1 + idle / job.microbatches) * (1 + constants.STRAGGLER.value * math.log2(hosts))
    return step.least_seconds(job) * waiting / job.tokens_per_step * job.mesh.world_size


def _limit_gib(job: Job) -> float:
    return job.device.memory_gib - job.device.reserve_gib


def _fits(job: Job, planned: Memory) -> bool:
    return choose_ac.planned_gib(planned) <= _limit_gib(job)
