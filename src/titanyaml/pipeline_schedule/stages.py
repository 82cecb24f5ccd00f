"""Which layers a stage gets: as told, or so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def even(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as they can be, the longer ones first."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def given(
    layers: int, stages: int, *, names: Sequence[str] = (), first_less: int | None = None, last_less: int | None = None
) -> list[int]:
    """Layers of each stage as the configuration says.

    Args:
        names: numbers of layers, or the first layer of each stage ("layers.0", "layers.4", ...).
        first_less, last_less: layers by which the ends fall short of an even share; None: 0.

    Raises:
        ValueError: in words what does not fit.
    """
    if names:
        counts = _listed(layers, names)
        if len(counts) != stages:
            raise ValueError(f"{len(counts)} stages are listed, the schedule has {stages}")
    else:
        first, last = first_less or 0, last_less or 0
        counts = even(layers + first + last, stages)
        counts[0] -= first
        counts[-1] -= last
    empty = [stage for stage, count in enumerate(counts) if count < 1]
    if empty:
        raise ValueError(f"stage {empty[0]} would have no layer")
    if sum(counts) != layers:
        raise ValueError(f"the stages have {sum(counts)} layers, the model {layers}")
    return counts


def _listed(layers: int, names: Sequence[str]) -> list[int]:
    if all(name.isdecimal() for name in names):
        return [int(name) for name in names]
    starts = [name.removeprefix("layers.") for name in names]
    if not all(start.isdecimal() for start in starts):
        raise ValueError("not a list of numbers of layers, nor of first layers (layers.0, ...)")
    numbers = [int(start) for start in starts]
    if numbers[0] != 0 or numbers != sorted(set(numbers)) or numbers[-1] >= layers:
        raise ValueError(f"first layers rise from layers.0 and stay below layers.{layers}")
    return [after - before for before, after in zip(numbers, [*numbers[1:], layers], strict=True)]


def balanced(flops: Sequence[float], sizes: Sequence[float], stages: int) -> list[int]:
    """Layers of each stage so that the stage with the most FLOPs has as few as possible; among the ways to do that,
    the one whose largest stage has the fewest parameters; among those, the most even one.

    Args:
        flops: of each layer; the head's are added to the last one, the embedding's (none) to the first.
        sizes: parameters of each layer, with those of embedding and head added alike.
    """
    assert len(flops) == len(sizes) >= stages
    work, size = [0.0, *accumulate(flops)], [0.0, *accumulate(sizes)]
    most = _cut(stages, len(flops), lambda i, j: work[j] - work[i], max)[0]

    def bounded(i: int, j: int) -> float:
        return size[j] - size[i] if work[j] - work[i] <= most * (1 + 1e-12) else float("inf")

    largest = _cut(stages, len(flops), bounded, max)[0]
    return _cut(
        stages,
        len(flops),
        lambda i, j: (work[j] - work[i]) ** 2 if bounded(i, j) <= largest * (1 + 1e-12) else float("inf"),
        lambda a, b: a + b,
    )[1]


def _cut(
    stages: int, layers: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cheapest cut of layers into stages of one or more: its cost, and the layers of each stage.

    Args:
        cost: of a stage with the layers i .. j-1. join: costs of the stages so far and of the next one.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        after: dict[int, tuple[float, list[int]]] = {}
        for j in range(stage, layers - (stages - stage) + 1):
            options = [(join(best[i][0], cost(i, j)), i) for i in best if i < j]
            value, i = min(options, key=lambda option: option[0])
            after[j] = value, [*best[i][1], j - i]
        best = after
    return best[layers]
