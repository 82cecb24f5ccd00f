from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import run_ranks
from titanyaml.distributed import replica_checks
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.distributed.replica_checks import checksum
from titanyaml.errors import TitanError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_a_checksum_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 101).to(dtype).view(10, 10)
    sums = {checksum(tensor), checksum(tensor.t()), checksum(tensor.flip(0)), checksum(tensor * 2)}
    for at in ((0, 0), (9, 9), (3, 4)):
        changed = tensor.clone()
        changed[at] = changed[at] + 1
        sums.add(checksum(changed))
    assert len(sums) == 7
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor[:0]) == 0


def test_a_checksum_in_chunks_is_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    expected = checksum(tensor)
    monkeypatch.setattr(replica_checks, "_CHUNK", 7)
    assert checksum(tensor) == expected


def compare(rank: int, broken: str) -> str:
    env, mesh = Env.from_environ("cpu"), ParallelDims(dp_replicate=2, tp=2).build("cpu")
    copy, part = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("tp")
    weight = torch.arange(6.0) + 10 * part
    norm, buffer = torch.ones(3), torch.zeros(2)
    if rank == 3:
        {"weight": weight, "norm": norm, "buffer": buffer, "": torch.ones(1)}[broken][0] = -0.0
    assert copy == rank // 2
    named = {
        "weight": DTensor.from_local(weight, mesh["tp"], [Shard(0)]),
        "norm": DTensor.from_local(norm, mesh["dp_replicate", "tp"], [Replicate(), Replicate()]),
        "buffer": buffer,
    }
    try:
        replica_checks.check_replicas_match(named.items(), env)
    except TitanError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("", ""),
        ("weight", "rank 3 holds another weight than rank 1, although they are copies of one"),
        ("norm", "rank 3 holds another norm than rank 0, although they are copies of one"),
        ("buffer", "rank 3 holds another buffer than rank 0, although they are copies of one"),
    ],
)
def test_copies_are_equal_and_shards_need_not_be(broken: str, message: str) -> None:
    assert run_ranks(compare, 4, broken) == [message] * 4


def streams(rank: int, data_ranks: list[int]) -> bool:
    try:
        replica_checks.check_random_streams(0, data_ranks[rank], Env.from_environ("cpu"))
    except TitanError:
        return False
    return True


def test_random_streams_follow_the_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(streams, 2, [0, 1]) == run_ranks(streams, 2, [0, 0]) == [True, True]
    assert run_ranks(equal_streams, 2) == [False, False]


def equal_streams(rank: int) -> bool:
    """Every data rank draws the same: what a seed without the rank would do."""
    patched = pytest.MonkeyPatch()
    patched.setattr(replica_checks.rng, "generator", lambda *names: torch.Generator().manual_seed(0))
    try:
        return streams(rank, [0, 1])
    finally:
        patched.undo()
