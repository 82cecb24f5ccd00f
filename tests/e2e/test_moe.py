"""A mixture from two expert-parallel ranks to one: what the routers' biases have learned goes along."""

from __future__ import annotations

import pytest

from tests.e2e.helpers import SIZES, Cli, last_bits, records

MIXTURE = (
    *SIZES,
    "model.moe.num_experts=4",
    "model.moe.top_k=2",
    "model.moe.ffn_dim=32",
    "model.moe.score=sigmoid",
    "model.moe.bias_rate=0.05",
    "train.local_batch=2",
    "train.global_batch=4",
    "validation=none",
    "schedule=constant",
)


def test_a_run_goes_on_with_its_biases_on_other_ranks(cli: Cli) -> None:
    straight, first = cli.together(
        [
            (*MIXTURE, "parallel=single", "train.steps=5", "run.id=straight"),
            (*MIXTURE, "parallel=ep2", "train.steps=3", "run.id=a"),
        ]
    )
    assert straight.returncode == 0, straight.stderr
    assert first.returncode == 0, first.stderr
    resumed = cli(*MIXTURE, "parallel=single", "train.steps=5", "run.id=a", "checkpoint.accept_changes=[parallel]")
    assert resumed.returncode == 0, resumed.stderr
    actual, expected = records(cli.run("a")), records(cli.run("straight"))
    assert [record["step"] for record in actual] == [1, 2, 3, 4, 5]
    for record, expected_record in zip(actual, expected, strict=True):
        assert record["loss"] == pytest.approx(expected_record["loss"], rel=1e-5)
        assert record["expert_load"] == expected_record["expert_load"] > 1
    bits = last_bits(cli.run("straight"))
    biases = [name for name in bits if name.endswith("router.bias_E")]
    assert len(biases) == 2
    assert [last_bits(cli.run("a"))[name] for name in biases] == [bits[name] for name in biases]
