from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from titanyaml.config import schema
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import ConfigError


def test_degrees_are_resolved_and_counted() -> None:
    dims = ParallelDims.resolve(schema.Parallel(dp_replicate=2, dp_shard=-1), 8)
    assert dims == ParallelDims(dp_replicate=2, dp_shard=4)
    assert (dims.world_size, dims.data_degree) == (8, 8)
    dims = ParallelDims(dp_shard=2, cp=3, tp=5, pp=7, ep=2)
    assert (dims.world_size, dims.data_degree) == (210, 2)
    with pytest.raises(ConfigError):
        ParallelDims.resolve(schema.Parallel(dp_shard=3), 8)


def mesh_facts(rank: int, dims: ParallelDims) -> tuple:
    mesh = dims.build("cpu")
    return mesh.mesh_dim_names, tuple(mesh.shape), dims.data_rank(mesh), dims.adds_loss(mesh)


def test_axes_are_named_and_data_ranks_ignore_tensor_parallel_peers() -> None:
    facts_of_ranks = run_ranks(mesh_facts, 4, ParallelDims(dp_replicate=2, dp_shard=2))
    names, shapes, data_ranks, adds_loss = zip(*facts_of_ranks, strict=True)
    assert set(names) == {("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    assert set(shapes) == {(1, 2, 2, 1, 1)}
    assert data_ranks == (0, 1, 2, 3)
    assert adds_loss == (True,) * 4
    facts_of_ranks = run_ranks(mesh_facts, 4, ParallelDims(dp_shard=2, tp=2))
    assert [facts[2:] for facts in facts_of_ranks] == [(0, True), (0, False), (1, True), (1, False)]
    assert [facts[2] for facts in run_ranks(mesh_facts, 4, ParallelDims(dp_replicate=2, pp=2))] == [0, 1, 0, 1]


def test_one_rank_alone_reads_everything() -> None:
    assert ParallelDims().data_rank(None) == 0 and ParallelDims().adds_loss(None)


def expert_places(rank: int) -> tuple[int, int, list[int]]:
    mesh = ParallelDims(dp_shard=2, tp=2, ep=2).build_experts("cpu")
    return mesh.get_local_rank("expert_shard"), mesh.get_local_rank("ep"), mesh["ep"].mesh.tolist()


def test_tensor_ranks_share_out_experts_before_data_ranks_do() -> None:
    assert run_ranks(expert_places, 4) == [(0, 0, [0, 1]), (0, 1, [0, 1]), (1, 0, [2, 3]), (1, 1, [2, 3])]
    assert ParallelDims(dp_shard=2).build_experts("cpu") is None
