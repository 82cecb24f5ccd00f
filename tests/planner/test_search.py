"""A search finds what planning every candidate would find, keeps what is given, and its choice is what is planned."""

from __future__ import annotations

import pytest

from titanyaml.planner import configured, memory, search
from titanyaml.planner import plan as planning
from titanyaml.planner.search import Space

SIXTEEN = ["hardware=h100_500w", "model=llama3_8b", "launch.nproc=16", "train.global_batch=32",
           "train.local_batch=1"]


def test_the_bound_leaves_none_of_the_fastest_out(configure) -> None:
    config = configure(*SIXTEEN)
    space = Space(axes={"cp": (1,), "pp": (1, 2)}, ac=("none", "full"), quant=("none",))
    found = search.search(config, space)
    legal = [candidate for _, candidate in search._candidates(config, space)
             if not search.rules.check_rules(search.dataclasses.asdict(candidate))]
    assert (found.legal, found.tried) == (len(legal), len(list(search._candidates(config, space))))
    assert found.tried > found.legal > found.fitted > 30
    plans = [planning.plan(configured.job(candidate)) for candidate in legal]
    speeds = sorted((made.tps for made in plans if made.total_gib * (1.28 if made.memory.lower_bound else 1)
                     <= made.limit_gib), reverse=True)
    assert len(speeds) == found.fitted
    assert [one.plan.tps for one in found.best] == pytest.approx(speeds[:10])


def test_a_choice_is_planned_as_it_was_found(configure) -> None:
    config = configure(*SIXTEEN)
    space = Space(axes={"tp": (2,), "pp": (2,), "cp": (1,)}, quant=("float8_tensorwise",), ac=("selective_op",))
    found = search.search(config, space).best
    assert {one.plan.job.tokens_per_step for one in found} == {32 * 8192}
    assert {one.plan.job.schedule for one in found} == {"1F1B", "Interleaved1F1B"}
    for one in (found[0], found[-1]):
        again = configured.job(configure("hardware=h100_500w", "model=llama3_8b", *one.change.split()))
        assert memory.plan_memory(again).total / memory.GIB == pytest.approx(one.plan.total_gib)
        assert planning.plan(again).tps == pytest.approx(one.plan.tps)


def test_70b_is_at_least_as_fast_as_published(configure) -> None:
    """The published configuration is among hundreds of legal ones on 256 devices, and one at least as fast is found."""
    published = configure("hardware=h100_500w", "model=llama3_70b", "parallel=fsdp32_tp8", "ac=full",
                          "train.local_batch=16", "train.global_batch=512", "compile.async_tp=true")
    space = Space(axes={"tp": (4, 8), "cp": (1,), "pp": (1, 2)}, quant=("none",), ac=("selective_op", "full"))
    found = search.search(configure("hardware=h100_500w", "model=llama3_70b", "launch.nproc=256",
                                    "train.global_batch=512", "train.local_batch=1"), space)
    assert found.legal >= 300
    assert found.best[0].plan.tps >= planning.plan(configured.job(published)).tps


def test_a_device_without_float8_is_searched_without(configure) -> None:
    space = Space(axes={"pp": (1,), "cp": (1,)}, ac=("full",))
    found = search.search(configure(*SIXTEEN[1:], "hardware=a100_80gb"), space)
    assert {one.plan.job.quant for one in found.best} == {"none"}


def test_a_batch_that_is_not_given_grows_with_the_mesh(configure) -> None:
    meshes = tuple({"dp_replicate": 1, "dp_shard": size, "cp": 1, "tp": 1, "pp": 1, "ep": 1} for size in (8, 16))
    found = search.search(configure("train.local_batch=2"), Space(meshes=meshes, ac=("full",), quant=("none",)))
    assert {one.plan.job.tokens_per_step for one in found.best} == {2 * 8 * 512, 2 * 16 * 512}


def test_experts_are_spread_as_is_fastest(configure) -> None:
    config = configure("model=qwen3_30b_a3b", "launch.nproc=16", "train.global_batch=16", "train.local_batch=1")
    found = search.search(config, Space(axes={"pp": (1,), "cp": (1,), "tp": (1,)}, ac=("full",), quant=("none",)))
    assert len({one.plan.job.mesh.ep for one in found.best}) > 3
