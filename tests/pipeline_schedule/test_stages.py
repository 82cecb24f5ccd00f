"""How layers are cut into stages."""

from __future__ import annotations

import itertools
import random

import pytest

from titanyaml.pipeline_schedule import stages


def test_split_as_configured() -> None:
    assert stages.split_as_configured(8, 3, names=["2", "5", "1"]) == [2, 5, 1]
    assert stages.split_as_configured(8, 3, names=["layers.0", "layers.2", "layers.7"]) == [2, 5, 1]
    assert stages.split_as_configured(126, 16, first_less=1, last_less=1) == [7, *[8] * 14, 7]
    assert stages.split_as_configured(7, 2, last_less=1) == [4, 3]


@pytest.mark.parametrize(
    ("names", "less", "text"),
    [
        (["4", "5"], {}, "the stages have 9 layers, the model 8"),
        (["8"], {}, "1 stages are listed, the schedule has 2"),
        (["0", "8"], {}, "stage 0 would have no layer"),
        ([], {"first_less": 20}, "stage 0 would have no layer"),
        (["layers.1", "layers.4"], {}, "first layers rise from layers.0"),
        (["a", "3"], {}, "not a list of numbers"),
        (["layers.0", "layers.8"], {}, "stay below layers.8"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(names: list[str], less: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        stages.split_as_configured(8, 2, names=names, **less)


def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    draw = random.Random(0)
    for _ in range(20):
        flops, sizes = ([draw.randint(1, 9) for _ in range(7)] for _ in range(2))
        split = stages.split_by_cost(flops, sizes, 3)

        def rating(counts: list[int], flops: list[int] = flops, sizes: list[int] = sizes) -> tuple[float, ...]:
            ends = list(itertools.accumulate(counts))
            parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
            work, size = ([sum(costs[part]) for part in parts] for costs in (flops, sizes))
            return max(work), max(size), sum(flops**2 for flops in work)

        cuts = ([a, b - a, 7 - b] for a, b in itertools.combinations(range(1, 7), 2))
        assert rating(split) == min(map(rating, cuts))
