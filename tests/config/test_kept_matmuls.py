"""How many of its matmul outputs each block keeps."""

from __future__ import annotations

import pytest

from titanyaml.config.kept_matmuls import ALL, HALF, NONE, block_levels


@pytest.mark.parametrize(
    ("share", "levels"),
    [
        (0.0, [NONE] * 4),
        (0.25, [NONE, HALF, NONE, HALF]),
        (0.5, [HALF] * 4),
        (0.6, [HALF, HALF, HALF, ALL]),
        (0.75, [HALF, ALL, HALF, ALL]),
        (1.0, [ALL] * 4),
    ],
)
def test_a_share_is_spread_evenly_over_the_blocks(share: float, levels: list[int]) -> None:
    assert block_levels(share, blocks=4) == levels


def test_a_larger_share_keeps_more() -> None:
    sums = [sum(block_levels(round(step / 56, 4), blocks=28)) for step in range(57)]
    assert sums == list(range(57)), "half a block a step"
