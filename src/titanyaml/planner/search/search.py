"""The fastest configurations that fit, on equally many ranks and with equally many sequences a step.

First every cell of a space is tried with the usual ways to recompute: pruned by the rule table, then by memory. What is
left is timed in the order of a bound, the time that a rank only computes, until no other can be among the best. Then
cells are tried, in the order of such a bound again, with our own float8 products and with steps of recomputation. The
result is that of trying both on every cell.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from titanyaml.config.schema import Config
from titanyaml.planner.model import constants, from_config, memory, memory_of_kept, step
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import Memory
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.search import choose_ac, space
from titanyaml.planner.search.neighbours import Around
from titanyaml.planner.search.space import Space, Values

BEST = 10


@dataclass(frozen=True)
class Found:
    """A configuration that fits. change: what to type beside the rest of the command."""

    change: str
    plan: Plan

    def row(self) -> dict[str, Any]:
        """For search.json."""
        classes = self.plan.step.classes
        longest = sorted(classes, key=lambda name: -classes[name])[:3]
        why = ", ".join(f"{name} {100 * classes[name] / self.plan.step.seconds:.0f} %" for name in longest)
        return {
            "change": self.change,
            "tps": self.plan.tps,
            "mfu": self.plan.mfu,
            "memory_gib": self.plan.total_gib,
            "why": why,
        }


@dataclass
class Result:
    """best: the fastest first. tried: candidates. legal: of them, by the rules. fitted: of these, by memory. refused:
    how many each rule's words refused. doing: what a search is at."""

    best: list[Found] = dataclasses.field(default_factory=list)
    tried: int = 0
    legal: int = 0
    fitted: int = 0
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    doing: str = ""


def search(config: Config, tried: Space, tell: Callable[[Result], None] = lambda result: None) -> Result:
    """Plan candidates around ``config``: on as many ranks as it starts, or as a mesh given has; of a global batch as it
    says, else ``train.local_batch`` sequences for each rank.

    Args:
        tell: is shown the result so far, thousands of times.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    made = _Search(config, tried, tell)
    made.finely(made.coarsely())
    return made.result


@dataclass(frozen=True)
class _Cell:
    """Of a space, with one choice of kernels. asked: whether that was typed, or is as configured. least: bound (seconds
    a token and device) of whatever way it recomputes."""

    values: Values
    asked: bool
    least: float


class _Search:
    def __init__(self, config: Config, tried: Space, tell: Callable[[Result], None]) -> None:
        self.config, self.space, self.tell = config, tried, tell
        self.around, self.result = Around(config, tried.typed), Result()
        self.modes, self._lowest = space.modes(config, tried), math.inf

    def coarsely(self) -> list[_Cell]:
        """Every cell, with kernels as typed and the usual ways to recompute. Returns those that can be had, and the
        same with kernels that were not asked for."""
        self.result.doing = "every mesh and batch"
        found: list[_Cell] = []
        fitting: list[tuple[float, Values, Job, Memory]] = []
        for cell in space.cells(self.config, self.space):
            legal, fits = [], []
            for kernels in space.kernels(self.config, self.space, cell["quant.recipe"]):
                looked = [one for mode in self.modes if (one := self._look(cell | kernels | mode))]
                legal += [cell | kernels] * bool(looked)
                fits += [(_least(one[1]), *one) for one in looked if _fits(*one[1:])]
            found += self._cells(cell, legal, fits=bool(fits)) if legal else []
            fitting += fits
            self._tell_of(fits)
        self.result.best = []
        for least, *one in sorted(fitting, key=lambda one: one[0]):
            if self._is_slower(least):
                break
            self._offer(*one)
        return found

    def _tell_of(self, fits: list[tuple[float, Values, Job, Memory]]) -> None:
        """Have a best one to tell of, before all are timed in their order: that of the least bound so far."""
        for least, *one in fits:
            if least < self._lowest:
                self._lowest = least
                self._offer(*one)

    def _cells(self, cell: Values, legal: list[Values], *, fits: bool) -> list[_Cell]:
        """What is tried finely of a cell. legal: with kernels as typed. fits: whether anything of it does."""
        most = "full" in self.space.ac  # nothing that is tried would spare more
        found = [_Cell(one, True, self._bound(one)) for one in legal if fits or not most]
        others = [cell | one for one in space.own_kernels(self.config, self.space, cell["quant.recipe"])]
        others = [one for one in others if fits or not most or self._spares(one)]
        if others:  # masters change nothing that the bound counts
            least = self._bound(others[0])
            found += [_Cell(one, False, least) for one in others]
        return found

    def _spares(self, values: Values) -> bool:
        """Whether own kernels fit where those asked for do not: by their masters alone, the products spare nothing."""
        if values["optim.master"] == self.config.optim.master:
            return False
        job = from_config.job(self.around.config(values | {"ac.mode": "full"}))
        return _fits(job, memory_of_kept.plan_memory(job))

    def _bound(self, values: Values) -> float:
        return _least(from_config.job(self.around.config(values | {"ac.mode": "none"})))

    def finely(self, cells: list[_Cell]) -> None:
        """Cells that can be among the best, with the usual ways where these were not tried, and then, when there is
        more that a cell has to be faster than, with steps."""
        cells = sorted(cells, key=lambda one: one.least)
        self._try("own products", ((one, self.modes) for one in cells if not one.asked))
        self._try("steps of recomputation", ((one, self._steps(one.values)) for one in cells))

    def _try(self, doing: str, cells: Iterable[tuple[_Cell, Iterable[Values]]]) -> None:
        """Cells, the one of the least bound first, each with some ways to recompute."""
        self.result.doing = doing
        for cell, ways in cells:
            if self._is_slower(cell.least):
                break
            self.tell(self.result)
            for values in (cell.values | way for way in ways):
                if self._is_slower(_least(from_config.job(self.around.config(values)))):
                    continue
                looked = self._look(values)
                if looked and _fits(*looked[1:]):
                    self._offer(*looked)

    def _steps(self, values: Values) -> Iterator[Values]:
        """Recomputation between the usual ways: of each kind that has steps, as little as fits, with what ``ac=auto``
        leaves free. None where no recomputation is needed."""
        job = from_config.job(self.around.config(values | {"ac.mode": "none"}))
        limit = _limit(job) * (1 - choose_ac.RESERVE)
        if job.shape.mixture or ("none" in self.space.ac and _gib(memory_of_kept.plan_memory(job)) <= limit):
            return
        if "selective_op" in self.space.ac and self.space.keep_products is None:
            fastest = dataclasses.replace(job, ac="selective_op", ac_keep=1.0)
            share = None if self._is_slower(_least(fastest)) else choose_ac.largest_share(job, limit)
            if share is not None:
                yield {"ac.mode": "selective_op", "ac.keep_products": share}
        # what unrepeated blocks keep of own products is not counted in this mode
        layers = "selective_layer" in self.space.ac and "ac.every" not in self.space.typed and not job.own_float8
        if layers and (every := choose_ac.longest_period(job, limit)):
            yield {"ac.mode": "selective_layer", "ac.every": every}

    def _look(self, values: Values) -> tuple[Values, Job, Memory] | None:
        """A candidate's plan but for its time; None where it is not legal."""
        self.result.tried += 1
        self.tell(self.result)
        made = self.around.config(values)
        if problem := self.around.problem(values, made):
            self.result.refused[problem] += 1
            return None
        self.result.legal += 1
        job = from_config.job(made)
        room = memory_of_kept.plan_memory(job)
        self.result.fitted += _fits(job, room)
        return values, job, room

    def _is_slower(self, least: float) -> bool:
        """Whether what takes at least so long (seconds a token and device) cannot be among the best."""
        best = self.result.best
        return len(best) == BEST and 1 / least <= best[-1].plan.tps

    def _offer(self, values: Values, job: Job, room: Memory) -> None:
        """Time what fits; keep it if it is among the best."""
        best = [*self.result.best, Found(self.around.change(values), Plan(job, step.plan_step(job), room))]
        self.result.best = sorted(best, key=lambda one: -one.plan.tps)[:BEST]


def _least(job: Job) -> float:
    """Bound below the seconds of a token and device: what blocks compute, with what a plan adds in proportion to it, a
    pipeline's idle time and the wait for the slowest host."""
    idle = job.bubble or 0.0
    if job.mesh.pp > 1 and job.bubble is None:
        idle = step.BUBBLES[job.schedule](job.mesh.pp, job.stages_per_rank)
    hosts = max(1.0, job.mesh.world_size / job.network.gpus_per_host)
    waiting = (1 + idle / job.microbatches) * (1 + constants.STRAGGLER.value * math.log2(hosts))
    return step.least_seconds(job) * waiting / job.tokens_per_step * job.mesh.world_size


def _limit(job: Job) -> float:
    return job.device.memory_gib - job.device.reserve_gib


def _gib(room: Memory) -> float:
    return room.with_margin / memory.GIB


def _fits(job: Job, room: Memory) -> bool:
    return _gib(room) <= _limit(job)
