"""How many layers each pipeline stage gets: as configured, or so that the slowest stage is as fast as it can be."""

from collections.abc import Callable, Sequence
from itertools import accumulate

# sums of float FLOPs in another order may differ in the last bits; equal cuts must stay equal
_TOLERANCE = 1 + 1e-12


def split_evenly(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as they can be, the longer ones first."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def split_as_configured(
    layers: int, stages: int, *, names: Sequence[str] = (), first_less: int | None = None, last_less: int | None = None
) -> list[int]:
    """Layers of each stage as the configuration says; ValueError: in words what does not fit.

    names: numbers of layers, or the first layer of each stage ("layers.0", "layers.4", ...). first_less, last_less:
    layers by which the ends fall short of an even share; None: 0.
    """
    if names:
        counts = _listed_counts(layers, names)
        if len(counts) != stages:
            raise ValueError(f"{len(counts)} stages are listed, the schedule has {stages}")
    else:
        first, last = first_less or 0, last_less or 0
        # the missing layers are dealt out as if they existed, then taken from the ends
        counts = split_evenly(layers + first + last, stages)
        counts[0] -= first
        counts[-1] -= last
    empty = [stage for stage, count in enumerate(counts) if count < 1]
    if empty:
        raise ValueError(f"stage {empty[0]} would have no layer")
    if sum(counts) != layers:
        raise ValueError(f"the stages have {sum(counts)} layers, the model {layers}")
    return counts


def _listed_counts(layers: int, names: Sequence[str]) -> list[int]:
    if all(name.isdecimal() for name in names):
        return [int(name) for name in names]
    starts = [name.removeprefix("layers.") for name in names]
    if not all(start.isdecimal() for start in starts):
        raise ValueError("not a list of numbers of layers, nor of first layers (layers.0, ...)")
    first_layers = [int(start) for start in starts]
    if first_layers[0] != 0 or first_layers != sorted(set(first_layers)) or first_layers[-1] >= layers:
        raise ValueError(f"first layers rise from layers.0 and stay below layers.{layers}")
    return [end - start for start, end in zip(first_layers, [*first_layers[1:], layers], strict=True)]


def split_decoder(
    layers: int, stages: int, *, block_params: float, attention_flops: float, table_params: int
) -> list[int]:
    """Layers of each stage of a decoder by cost.

    Args:
        block_params: of one block. attention_flops: of a token in one block, beside those of its parameters.
        table_params: of the embedding, and of the head; tied, both have those of the one weight.
    """
    flops = [6 * block_params + attention_flops] * layers  # 2 forward, 4 backward for each parameter and token
    sizes = [block_params] * layers
    # the head has FLOPs and parameters, the embedding, a look-up, parameters only
    flops[-1] += 6 * table_params
    sizes[0] += table_params
    sizes[-1] += table_params
    return split_by_cost(flops, sizes, stages)


def split_by_cost(flops: Sequence[float], sizes: Sequence[float], stages: int) -> list[int]:
    """Layers of each stage so that the stage with the most FLOPs has as few as possible.

    Among such splits, the largest stage has the fewest parameters; among those, the FLOPs are most even.
    """
    assert len(flops) == len(sizes) >= stages
    work, size = [0.0, *accumulate(flops)], [0.0, *accumulate(sizes)]
    max_work = _cheapest_split(stages, len(flops), lambda i, j: work[j] - work[i], max)[0]

    def bounded_size(i: int, j: int) -> float:
        return size[j] - size[i] if work[j] - work[i] <= max_work * _TOLERANCE else float("inf")

    max_size = _cheapest_split(stages, len(flops), bounded_size, max)[0]

    def bounded_square(i: int, j: int) -> float:  # a sum of squares is least where the parts are equal
        return (work[j] - work[i]) ** 2 if bounded_size(i, j) <= max_size * _TOLERANCE else float("inf")

    return _cheapest_split(stages, len(flops), bounded_square, lambda total, cost: total + cost)[1]


def _cheapest_split(
    stages: int, layers: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cheapest split into stages of one layer or more: its cost, and the layers of each stage."""
    # cost: of a stage with the layers i .. j-1; join: costs of the stages so far and of the next one.
    # Dynamic programme: best[j] is the cheapest split of the first j layers into the stages so far
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for j in range(stage, layers - (stages - stage) + 1):
            options = [(join(best[i][0], cost(i, j)), i) for i in best if i < j]
            value, i = min(options, key=lambda option: option[0])
            longer[j] = value, [*best[i][1], j - i]
        best = longer
    return best[layers]
