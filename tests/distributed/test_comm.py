from __future__ import annotations

import torch

from tests.ranks import run_ranks
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env

ALONE = Env(0, 1, 0, torch.device("cpu"), "gloo")


def talk(rank: int) -> dict:
    env = Env.from_environ("cpu")
    return {
        "broadcast": comm.broadcast_object({"from": rank, "nested": [1, None]}, env),
        "gather": comm.gather_objects(("rank", rank), env),
        "sums": comm.sum_scalars([2.0**53 if rank else 1.0, 0.1, rank], env),
    }


def test_two_ranks_agree() -> None:
    on_rank_0, on_rank_1 = run_ranks(talk, 2)
    assert on_rank_0 == on_rank_1
    assert on_rank_0["broadcast"] == {"from": 0, "nested": [1, None]}
    assert on_rank_0["gather"] == [("rank", 0), ("rank", 1)]
    assert on_rank_0["sums"] == [2.0**53 + 1.0, 0.1 + 0.1, 1.0]


def test_one_rank_alone_talks_to_itself() -> None:
    assert comm.broadcast_object("x", ALONE) == "x"
    assert comm.gather_objects("x", ALONE) == ["x"]
    assert comm.sum_scalars([1, True, 0.5], ALONE) == [1.0, 1.0, 0.5]
