"""The collectives of a tensor-parallel block with the matmuls next to them, as keys for measured times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, order=True)
class CollectivePlace:
    """A collective of the tp ranks and the matmuls that it feeds or follows.

    Args:
        kind: "all_gather" before matmuls, "reduce_scatter" behind one.
        tokens: of all tp ranks together. inner: features that a rank sums over.
        widths: output features of each matmul on a rank, ascending. float8: the matmuls are in float8.
    """

    kind: str
    tokens: int
    inner: int
    widths: tuple[int, ...]
    float8: bool = False

    def __str__(self) -> str:
        text = f"{self.kind} {self.tokens}x{self.inner} to {'+'.join(map(str, self.widths))}"
        return f"{text} float8" if self.float8 else text


def block_places(
    tokens: int, dim: int, columns: Iterable[tuple[int, ...]], rows: Iterable[int], *, float8: bool = False
) -> list[CollectivePlace]:
    """The places of a block's forward and backward, sorted. ``tokens``: of all tp ranks. ``dim``: residual stream.

    Args:
        columns: output features on a rank of the matrices that read one gathered tensor: (q, k, v), (gate, up).
        rows: input features on a rank of the matrices whose outputs are summed: o, down.
    """
    rows = list(rows)
    scatters = {CollectivePlace("reduce_scatter", tokens, inner, (dim,), float8) for inner in rows}
    # backward: the gradients of one input, summed over the matrices that read it
    scatters |= {CollectivePlace("reduce_scatter", tokens, sum(widths), (dim,), float8) for widths in columns}
    if float8:  # casts stand between a gather and its matmuls
        return sorted(scatters)
    gathers = {CollectivePlace("all_gather", tokens, dim, (inner,)) for inner in rows}  # backward: output gradients
    for widths in columns:
        # Recomputation may keep some of the outputs: the repeated gather then feeds only the other matmuls.
        subsets = (subset for size in range(1, len(widths) + 1) for subset in combinations(widths, size))
        gathers |= {CollectivePlace("all_gather", tokens, dim, tuple(sorted(subset))) for subset in subsets}
    return sorted(scatters | gathers)
