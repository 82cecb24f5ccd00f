"""When each action runs, given how long it takes: the length of a step, and the share of it that ranks wait.

Sending takes no time here. Unit costs are the usual ones: a backward is twice a forward, and its two parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titanyaml.pipeline_schedule.actions import Action, most_held

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class Span:
    """An action and the time in which it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, and when the last one ends."""

    ranks: list[list[Span]]
    length: float

    @property
    def bubble(self) -> float:
        """Share of all ranks' time, from the first action to the last, in which nothing runs."""
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1.0 - busy / (self.length * len(self.ranks)) if self.length else 0.0

    @property
    def held(self) -> int:
        """Most forwards whose backward is not done, on the rank that has most: what it keeps activations of."""
        return max((most_held(span.action for span in spans) for spans in self.ranks), default=0)


class Stuck(Exception):
    """No rank can go on. waiting: rank to (position in its order, the action there, actions of which it needs one)."""

    def __init__(self, waiting: dict[int, tuple[int, Action, tuple[Action, ...]]]) -> None:
        super().__init__(waiting)
        self.waiting = waiting


def unit_cost(action: Action) -> float:
    """Unit costs, the same for every stage."""
    return UNIT[action.kind]


def needs(action: Action, *, stages: int) -> list[tuple[Action, ...]]:
    """What must have run before: of each tuple, one."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(Action(stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    above = (Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch))
    return [(Action(stage, "F", microbatch),), *([above] if stage + 1 < stages else [])]


def simulate(
    orders: Sequence[Sequence[Action]], *, stages: int, cost: Callable[[Action], float] = unit_cost
) -> Timeline:
    """Run every rank's actions in their order, each as soon as the rank is free and what it needs is there.

    Raises:
        Stuck: ranks wait for each other.
    """
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                ready = [
                    min((ends[one] for one in any_of if one in ends), default=None)
                    for any_of in needs(action, stages=stages)
                ]
                if None in ready:
                    break
                start = max([*ready, spans[rank][-1].end if spans[rank] else 0.0], default=0.0)
                ends[action] = start + cost(action)
                spans[rank].append(Span(action, start, ends[action]))
                moved = True
    waiting = {}
    for rank, order in enumerate(orders):
        if len(spans[rank]) < len(order):
            action = order[len(spans[rank])]
            missing = next(any_of for any_of in needs(action, stages=stages) if not any(one in ends for one in any_of))
            waiting[rank] = len(spans[rank]), action, missing
    if waiting:
        raise Stuck(waiting)
    return Timeline(spans, max(ends.values(), default=0.0))
