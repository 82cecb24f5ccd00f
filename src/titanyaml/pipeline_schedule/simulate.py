"""When each action of a schedule runs: the length of a step, and its bubble. Transfers take no time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titanyaml.pipeline_schedule.actions import Action, max_in_flight

# the usual costs: a backward takes twice a forward, its parts are equal (arXiv 2104.04473, arXiv 2401.10241)
UNIT_COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Cost = Callable[[Action], float]


@dataclass(frozen=True)
class TimedAction:
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    ranks: list[list[TimedAction]]
    length: float

    @property
    def bubble(self) -> float:
        """Share of all ranks' time, from the first action to the last, in which nothing runs."""
        # docs/pipeline.md has the closed forms for the named schedules
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1.0 - busy / (self.length * len(self.ranks)) if self.length else 0.0

    @property
    def max_in_flight(self) -> int:
        """Most forwards of stages whose activations one rank keeps at a time."""
        return max((max_in_flight(span.action for span in spans) for spans in self.ranks), default=0)


class ScheduleDeadlock(Exception):
    """Ranks wait for each other. waiting: rank to (position in its order, action there, actions: one is needed)."""

    def __init__(self, waiting: dict[int, tuple[int, Action, tuple[Action, ...]]]) -> None:
        super().__init__(waiting)
        self.waiting = waiting


def prerequisites(action: Action, *, stages: int) -> list[tuple[Action, ...]]:
    """Groups of actions; of each group, one must have run before."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(Action(stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    groups: list[tuple[Action, ...]] = [(Action(stage, "F", microbatch),)]
    if stage + 1 < stages:
        # the next stage sends its input's gradient after I as well as after B
        groups.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
    return groups


def simulate(
    orders: Sequence[Sequence[Action]], *, stages: int, cost: Cost = lambda action: UNIT_COSTS[action.kind]
) -> Timeline:
    """Run every rank's actions in order, each as soon as its rank is free and its prerequisites have ended."""
    ends: dict[Action, float] = {}
    spans: list[list[TimedAction]] = [[] for _ in orders]
    progressed = True
    # passes over the ranks until none can go on; the order of the passes cannot change a time
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                groups = prerequisites(action, stages=stages)
                if any(ends.keys().isdisjoint(group) for group in groups):
                    break
                ready = [min(ends[earlier] for earlier in group if earlier in ends) for group in groups]
                start = max([*ready, spans[rank][-1].end if spans[rank] else 0.0])
                ends[action] = start + cost(action)
                spans[rank].append(TimedAction(action, start, ends[action]))
                progressed = True
    waiting = {}
    for rank, order in enumerate(orders):
        if (position := len(spans[rank])) < len(order):
            groups = prerequisites(order[position], stages=stages)
            waiting[rank] = position, order[position], next(group for group in groups if ends.keys().isdisjoint(group))
    if waiting:
        raise ScheduleDeadlock(waiting)
    return Timeline(spans, max(ends.values(), default=0.0))
