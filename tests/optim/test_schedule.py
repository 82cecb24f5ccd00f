from __future__ import annotations

import math

import pytest

from titanyaml.config.schema import Schedule
from titanyaml.errors import ConfigError
from titanyaml.optim.schedule import lr_at


def rates(kind: str, steps: int, warmup: int, *, ratio: float = 0.1, decay: int = 0) -> list[float]:
    spec = Schedule(kind=kind, warmup_steps=warmup, min_lr_ratio=ratio, decay_steps=decay)
    return [lr_at(spec, step=step, steps=steps, lr=1.0) for step in range(1, steps + 1)]


def cosine(progress: float) -> float:
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


GOLDEN = {
    "cosine": (rates("cosine", 6, 2), [0.5, 1.0, cosine(0.25), 0.55, cosine(0.75), 0.1]),
    "cosine without warm-up": (rates("cosine", 5, 0), [1.0, cosine(0.25), 0.55, cosine(0.75), 0.1]),
    "linear": (rates("linear", 8, 4, ratio=0.2), [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2]),
    "linear to zero": (rates("linear", 5, 0, ratio=0.0), [1.0, 0.75, 0.5, 0.25, 0.0]),
    "wsd": (rates("wsd", 9, 2, decay=3), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1]),
    "wsd without stable part": (rates("wsd", 4, 2, ratio=0.0, decay=2), [0.5, 1.0, 0.5, 0.0]),
    "constant": (rates("constant", 4, 3), [1 / 3, 2 / 3, 1.0, 1.0]),
    "one step": (rates("cosine", 1, 0), [1.0]),
    "warm-up to the last step": (rates("linear", 2, 2), [0.5, 1.0]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_table(name: str) -> None:
    lrs, expected = GOLDEN[name]
    assert lrs == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("lr", [3e-4, 1 / 3, 7e-5])
def test_ends_are_exact(kind: str, ratio: float, lr: float) -> None:
    spec = Schedule(kind=kind, warmup_steps=7, min_lr_ratio=ratio, decay_steps=11)
    lrs = [lr_at(spec, step=step, steps=101, lr=lr) for step in range(1, 102)]
    assert lrs[6] == lr
    assert lrs[-1] == lr * ratio
    assert all(0 < a < b for a, b in zip(lrs[:6], lrs[1:7], strict=True))
    assert all(a >= b for a, b in zip(lrs[6:], lrs[7:], strict=False))


@pytest.mark.parametrize(("kind", "warmup", "decay"), [("cosine", 11, 0), ("constant", 11, 0), ("wsd", 6, 5)])
def test_spans_that_do_not_fit_are_refused(kind: str, warmup: int, decay: int) -> None:
    with pytest.raises(ConfigError, match="do not fit into train.steps=10"):
        rates(kind, 10, warmup, decay=decay)
