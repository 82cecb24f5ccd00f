"""``ac.keep_products``: how many of its matmul outputs each block keeps. The plugin and the planner both read it."""

#: Levels: a block keeps the outputs of none, of every second or of all of its matmuls.
NONE, HALF, ALL = range(3)


def block_levels(share: float, *, blocks: int) -> list[int]:
    """The level of each of a rank's blocks, in order, such that they keep ``share`` of all matmul outputs.

    The share is rounded to half a block. Two blocks differ by one level at most, and the higher levels are spread
    evenly. A larger share never keeps less in all.
    """
    halves = round(2 * share * blocks)
    # block i gets what an even line through the total gains over its length (Bresenham)
    return [(i + 1) * halves // blocks - i * halves // blocks for i in range(blocks)]
