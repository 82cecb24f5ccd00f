"""A search finds what planning every candidate would find, keeps what is given, and its choice is what is planned."""

from __future__ import annotations

import dataclasses
import io
import itertools

import pytest
from rich.console import Console

from titanyaml.config import schema
from titanyaml.config.rules import table
from titanyaml.planner.model import from_config, memory
from titanyaml.planner.model.plan import plan_job
from titanyaml.planner.search import choose_ac, fastest, space, variants
from titanyaml.planner.search.space import Space
from titanyaml.runner import planned_sweep

SIXTEEN = ["hardware=h100_500w", "model=llama3_8b", "launch.nproc=16", "train.global_batch=32", "train.local_batch=1"]


def _planned(config, tried: Space, values: list[space.Values]) -> dict[str, float]:
    """Tokens/s of those that are legal, by all rules, and fit; by what is typed."""
    variants_of_config, tps_by_overrides = variants.Variants(config), {}
    for candidate in values:
        variant = variants_of_config.config(candidate)
        if table.check_rules(dataclasses.asdict(variant)):
            continue
        plan = plan_job(from_config.job(variant))
        if plan.total_gib * (1.28 if plan.memory.lower_bound else 1) <= plan.limit_gib:
            tps_by_overrides[variants_of_config.overrides(candidate)] = plan.tps
    return tps_by_overrides


def _fastest(tps_by_overrides: dict[str, float]) -> list[float]:
    return sorted(tps_by_overrides.values(), reverse=True)[:10]


def test_the_bound_leaves_none_of_the_fastest_out(configure) -> None:
    config = configure(*SIXTEEN)
    tried = Space(axes={"cp": (1,), "pp": (1, 2)}, ac=("none", "full"), quant=("none",))
    result = fastest.find_fastest(config, tried)
    candidates = [cell | {"ac.mode": mode} for cell in space.cells(config, tried) for mode in tried.ac]
    fitting = _planned(config, tried, candidates)
    assert result.tried == len(candidates) > result.legal > result.fitted == len(fitting) > 30
    assert [ranked.plan.tps for ranked in result.best] == pytest.approx(_fastest(fitting))


SMALL = [
    "hardware=h100_sxm",
    "hardware.memory_gib=24",
    "model=llama3_8b",
    "model.num_layers=4",
    "launch.nproc=8",
    "train.global_batch=32",
    "train.local_batch=1",
]


def test_own_products_and_steps_are_those_of_every_cell(configure) -> None:
    """Without bounds and bisection: every cell with every kernel, every usual way to recompute, and every step."""
    config = configure(*SMALL)
    usual = ("none", "memory_budget", "selective_op", "full")
    tried = Space(
        axes={"tp": (1, 2), "cp": (1,), "pp": (1, 2), "dp_replicate": (1,)},
        async_tp=(False,),
        ac=usual,
        quant=("float8_tensorwise",),
        schedule=("1F1B",),
        local_batch=(1, 2, 4, 8),
    )
    result = fastest.find_fastest(config, tried)
    candidates = [
        cell | kernels
        for cell in space.cells(config, tried)
        for kernels in ({}, {"quant.product": "own"}, {"quant.product": "own", "optim.master": "split"})
    ]
    modes = _planned(config, tried, [candidate | {"ac.mode": mode} for candidate in candidates for mode in usual])
    steps = {}
    for candidate in candidates:
        shares = [candidate | {"ac.mode": "selective_op", "ac.keep_products": share / 8} for share in range(9)]
        fit = _planned(config, tried, [share for share in shares if _leaves_room(config, share)])
        none = candidate | {"ac.mode": "none"}
        if fit and not (variants.Variants(config).overrides(none) in modes and _leaves_room(config, none)):
            steps |= dict([max(fit.items(), key=lambda entry: entry[1])])
    assert [candidate.plan.tps for candidate in result.best] == pytest.approx(_fastest(modes | steps))
    first = result.best[0].overrides
    assert "quant.product=own" in first and first in steps and first not in modes


def _leaves_room(config, values: space.Values) -> bool:
    job = from_config.job(variants.Variants(config).config(values))
    limit = (job.device.memory_gib - job.device.reserve_gib) * (1 - choose_ac.RESERVE)
    return memory.plan_memory(job).with_margin / memory.GIB <= limit


def test_70b_is_faster_with_what_nobody_typed(configure) -> None:
    """The choice among the usual ways, with torchao's products, is beaten by a seventh at least."""
    config = configure(
        "hardware=h100_500w", "model=llama3_70b", "launch.nproc=256", "train.global_batch=512", "train.local_batch=1"
    )
    tried = Space(axes={"tp": (2,), "cp": (1,), "pp": (1,), "dp_replicate": (1,)}, quant=("float8_tensorwise",))
    usual = dataclasses.replace(
        tried, product=("torchao",), keep_products=(0.5,), ac=("none", "memory_budget", "selective_op", "full")
    )
    fastest_of_all, fastest_usual = (
        fastest.find_fastest(config, tried).best[0],
        fastest.find_fastest(config, usual).best[0],
    )
    assert "quant.product" not in fastest_usual.overrides
    assert fastest_of_all.plan.tps > 8 / 7 * fastest_usual.plan.tps


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [([], {"quant.product": "torchao"}), ([], {"optim.master": "float32"}), (["kernels=torch"], {})],
)
def test_what_is_typed_is_kept(configure, overrides: list[str], changes: dict[str, str]) -> None:
    config = configure(*SIXTEEN, *overrides)
    dimensions = {key.partition(".")[2]: (value,) for key, value in changes.items()}
    tried = Space(
        axes={"pp": (1,), "cp": (1,), "tp": (1,)},
        ac=("full",),
        quant=("float8_rowwise",),
        typed=frozenset(changes),
        **dimensions,
    )
    best = fastest.find_fastest(config, tried).best
    own = any("quant.product=own" in ranked.overrides for ranked in best)
    assert own == ("optim.master" in changes)
    assert not any("optim.master=split" in ranked.overrides for ranked in best)
    assert all(f"{key}={value}" in ranked.overrides for ranked in best for key, value in changes.items())


def test_a_typed_key_is_never_left_unread(configure) -> None:
    config = dataclasses.replace(configure(*SIXTEEN), ac=schema.ActivationCheckpointingConfig(every=4))
    tried = Space(axes={"pp": (1,), "cp": (1,)}, quant=("none",), typed=frozenset({"ac.every"}))
    result = fastest.find_fastest(config, tried)
    assert {(ranked.plan.job.ac, ranked.plan.job.ac_every) for ranked in result.best} == {("selective_layer", 4)}
    assert result.refused == {"ac.every is typed, and nothing would read it": result.tried - result.legal}


def test_rules_asked_once_say_what_all_rules_say(configure) -> None:
    """Also where what a rule reads next depends on what it has read."""
    config = configure(*SIXTEEN)
    variants_of_config, keys = variants.Variants(config), set()
    tried = Space(axes={"cp": (1, 2)}, schedule=("1F1B", "ZBVZeroBubble"))
    for cell in list(space.cells(config, tried))[::7]:
        for mode in ("none", "full"):
            values = cell | {"ac.mode": mode, "quant.product": "own", "optim.master": "split"}
            variant = variants_of_config.config(values)
            problems = table.check_rules(dataclasses.asdict(variant))
            problem = variants_of_config.problem(values, variant)
            assert problem == (f"{problems[0].key} {problems[0].message}" if problems else "")
            keys.add(problem.partition(" ")[0])
    assert {"", "optim.master"} < keys


def test_progress_is_told_in_lines_now_and_then(configure, monkeypatch) -> None:
    out, clock = io.StringIO(), itertools.count(step=0.25)
    monkeypatch.setattr(planned_sweep.time, "monotonic", lambda: next(clock))
    with planned_sweep.ProgressLine(Console(file=out, width=80)) as progress:
        result = fastest.find_fastest(configure(*SIXTEEN), Space(axes={"pp": (1,), "cp": (1,)}), progress.show)
    lines, num_readings = out.getvalue().splitlines(), next(clock) / 0.25
    assert result.tried < num_readings and len(lines) == pytest.approx(num_readings * 0.25 / 5, rel=0.05)
    for doing in ("every mesh and batch", "own products"):
        lines_of_phase = [line for line in lines if doing in line]
        assert (
            " tried, " in lines_of_phase[-1]
            and " fit, best so far " in lines_of_phase[-1]
            and "tokens/s: parallel=" in lines_of_phase[-1]
        )


def test_a_choice_is_planned_as_it_was_found(configure) -> None:
    config = configure(*SIXTEEN)
    tried = Space(axes={"tp": (2,), "pp": (2,), "cp": (1,)}, quant=("float8_tensorwise",), ac=("selective_op",))
    best = fastest.find_fastest(config, tried).best
    assert {ranked.plan.job.tokens_per_step for ranked in best} == {32 * 8192}
    assert {ranked.plan.job.schedule for ranked in best} == {"1F1B", "Interleaved1F1B"}
    for ranked in (best[0], best[-1]):
        job = from_config.job(configure("hardware=h100_500w", "model=llama3_8b", *ranked.overrides.split()))
        assert memory.plan_memory(job).total / memory.GIB == pytest.approx(ranked.plan.total_gib)
        assert plan_job(job).tps == pytest.approx(ranked.plan.tps)


def test_70b_is_at_least_as_fast_as_published(configure) -> None:
    """The published configuration is among hundreds of legal ones on 256 devices, and one at least as fast is found."""
    published = configure(
        "hardware=h100_500w",
        "model=llama3_70b",
        "parallel=fsdp32_tp8",
        "ac=full",
        "train.local_batch=16",
        "train.global_batch=512",
        "compile.async_tp=true",
    )
    tried = Space(axes={"tp": (4, 8), "cp": (1,), "pp": (1, 2)}, quant=("none",), ac=("selective_op", "full"))
    result = fastest.find_fastest(
        configure(
            "hardware=h100_500w",
            "model=llama3_70b",
            "launch.nproc=256",
            "train.global_batch=512",
            "train.local_batch=1",
        ),
        tried,
    )
    assert result.legal >= 300
    assert result.best[0].plan.tps >= plan_job(from_config.job(published)).tps


def test_a_device_without_float8_is_searched_without(configure) -> None:
    tried = Space(axes={"pp": (1,), "cp": (1,)}, ac=("full",))
    result = fastest.find_fastest(configure(*SIXTEEN[1:], "hardware=a100_80gb"), tried)
    assert {ranked.plan.job.quant for ranked in result.best} == {"none"}


def test_a_batch_that_is_not_given_grows_with_the_mesh(configure) -> None:
    meshes = tuple({"dp_replicate": 1, "dp_shard": size, "cp": 1, "tp": 1, "pp": 1, "ep": 1} for size in (8, 16))
    result = fastest.find_fastest(configure("train.local_batch=2"), Space(meshes=meshes, ac=("full",), quant=("none",)))
    assert {ranked.plan.job.tokens_per_step for ranked in result.best} == {2 * 8 * 512, 2 * 16 * 512}


def test_experts_are_spread_as_is_fastest(configure) -> None:
    config = configure("model=qwen3_30b_a3b", "launch.nproc=16", "train.global_batch=16", "train.local_batch=1")
    result = fastest.find_fastest(
        config, Space(axes={"pp": (1,), "cp": (1,), "tp": (1,)}, ac=("full",), quant=("none",))
    )
    assert len({ranked.plan.job.mesh.ep for ranked in result.best}) > 3
