from __future__ import annotations

import math

import pytest

from titanyaml.config import schema
from titanyaml.config.degrees import MESH_AXES, parse_mesh_name, resolve_degrees
from titanyaml.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("ddp4", {"dp_replicate": 4}),
        ("fsdp8", {"dp_shard": 8}),
        ("hsdp2x4", {"dp_replicate": 2, "dp_shard": 4}),
        ("fsdp32_tp8", {"dp_shard": 32, "tp": 8}),
        ("tp8_fsdp32", {"dp_shard": 32, "tp": 8}),
        ("fsdp4_tp8_cp2_pp8", {"dp_shard": 4, "tp": 8, "cp": 2, "pp": 8}),
        ("ddp2_fsdp4", {"dp_replicate": 2, "dp_shard": 4}),
        ("ep2", {"ep": 2, "dp_shard": 2}),
        ("ep2_tp2", {"ep": 2, "tp": 2, "dp_shard": 2}),
        ("pp2_ep2", {"ep": 2, "pp": 2, "dp_shard": 2}),
        ("fsdp4_ep2", {"ep": 2, "dp_shard": 4}),
    ],
)
def test_mesh_names(name: str, degrees: dict[str, int]) -> None:
    assert parse_mesh_name(name) == degrees


@pytest.mark.parametrize(
    "name",
    [
        "",
        "fsdp",
        "fsdp0",
        "fsdp02",
        "fsdp-1",
        "fsdp2_fsdp4",
        "hsdp2x2_fsdp4",
        "ddp2_hsdp2x2",
        "hsdp2",
        "fsdp2x2",
        "tp2x2",
        "fsdp2__tp2",
        "fsdp2_",
        "_fsdp2",
        "FSDP2",
        "xp2",
        "fsdp2 tp2",
        "single",
        "auto",
        "2",
        "fsdp2_tp2_tp2",
    ],
)
def test_no_mesh_names(name: str) -> None:
    assert parse_mesh_name(name) is None


@pytest.mark.parametrize(("name", "ranks"), [("ep2", 2), ("ep2_tp2", 4), ("pp2_ep2", 4), ("fsdp4_tp8_cp2_pp8", 512)])
def test_ranks_of_a_mesh_and_ep_divides_its_axes(name: str, ranks: int) -> None:
    parallel = schema.Parallel(**parse_mesh_name(name))
    assert _mesh_product(parallel) == ranks
    assert parallel.dp_shard * parallel.cp * parallel.tp % parallel.ep == 0


def test_product_is_unknown_while_a_degree_is_derived() -> None:
    assert _mesh_product(schema.Parallel(dp_shard=-1, tp=2)) is None


@pytest.mark.parametrize("axis", MESH_AXES)
def test_any_axis_can_be_derived(axis: str) -> None:
    degrees = resolve_degrees(schema.Parallel(**{"dp_replicate": 2, axis: -1}), world_size=8)
    assert degrees[axis] == (8 if axis == "dp_replicate" else 4)
    assert math.prod(degrees[name] for name in MESH_AXES) == 8


def test_derived_ep_takes_all_that_it_may() -> None:
    assert resolve_degrees(schema.Parallel(dp_shard=4, tp=2, ep=-1), world_size=8)["ep"] == 8


def test_fixed_degrees_need_no_world_size() -> None:
    assert resolve_degrees(schema.Parallel(dp_shard=2), world_size=None)["dp_shard"] == 2


@pytest.mark.parametrize(
    ("parallel", "world_size", "text", "hint"),
    [
        (schema.Parallel(dp_shard=-1, tp=-1), 8, "only one can be derived", "parallel.tp=1 or parallel.dp_shard=1"),
        (schema.Parallel(dp_shard=-1), None, "the number of ranks is unknown", ""),
        (
            schema.Parallel(dp_shard=-1, tp=4),
            6,
            "6 ranks cannot be divided by tp(4) = 4",
            "launch.nproc=4 or launch.nproc=8",
        ),
        (schema.Parallel(dp_shard=-1, tp=4), 3, "3 ranks cannot be divided by tp(4) = 4", "launch.nproc=4"),
        (
            schema.Parallel(dp_shard=4),
            2,
            "dp_shard(4) needs 4 ranks, but 2 are started",
            "launch.nproc=4 or parallel=auto",
        ),
    ],
)
def test_degrees_that_do_not_fit(parallel: schema.Parallel, world_size: int | None, text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_degrees(parallel, world_size=world_size)
    problem = caught.value.problems[0]
    assert text in problem.message
    assert not hint or problem.hint == hint


def _mesh_product(parallel: schema.Parallel) -> int | None:
    """Ranks that the mesh needs; None while a degree is -1."""
    sizes = [getattr(parallel, axis) for axis in MESH_AXES]
    return None if -1 in sizes else math.prod(sizes)
