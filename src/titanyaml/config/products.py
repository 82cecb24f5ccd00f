"""``ac.keep_products``: how many of its matrix products each block keeps, for the transform and for the planner."""

from __future__ import annotations

#: Of the products of one block.
NONE, HALF, ALL = range(3)


def kept(share: float, *, blocks: int) -> list[int]:
    """NONE, HALF or ALL for each of a rank's blocks, in order: ``share`` of all products, to the nearest half block.

    No two of them are more than one step apart, and the larger ones are spread evenly. A larger share keeps at least
    as much in all.
    """
    halves = round(2 * share * blocks)
    return [(i + 1) * halves // blocks - i * halves // blocks for i in range(blocks)]
