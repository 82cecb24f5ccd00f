"""Every mesh against one process: losses, norms and each gradient, in float64, from bit-equal weights.

The options are covered pairwise, each value at least once with each kind of mesh that it could meet: accumulation,
tied embeddings, masks, recomputation, compilation. Key/value heads are 2 (4 where four ranks share them), and the
number of valid labels differs between ranks.
"""

from __future__ import annotations

import pytest

from tests.plugins.parity import EVERYTHING, FULL, SELECTIVE, TP, WHOLE, Case, assert_equal, cp, on_mesh, one_process
from tests.plugins.small import COMPILE, FSDP
from tests.ranks import run_ranks
from titanyaml.distributed.mesh import ParallelDims

TIED, MASKED = {"tie_embeddings": True}, {"document_mask": True}
FSDP2, FSDP4, DDP2 = ParallelDims(dp_shard=2), ParallelDims(dp_shard=4), ParallelDims(dp_replicate=2)
HSDP2X2 = ParallelDims(dp_replicate=2, dp_shard=2)
TP2, TP4, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(tp=4), ParallelDims(dp_shard=2, tp=2)
CP2, CP4 = ParallelDims(cp=2), ParallelDims(cp=4)
FSDP2_CP2, TP2_CP2 = ParallelDims(dp_shard=2, cp=2), ParallelDims(tp=2, cp=2)
GATHER, RING, ULYSSES = ({"cp": cp(method), "fsdp": FSDP} for method in ("allgather", "ring", "ulysses"))
FOUR = {"num_kv_heads": 4}

CASES = {
    "ddp2": Case(DDP2, {"fsdp": FSDP}, 2, TIED),
    "ddp2, ac, compile": Case(DDP2, {"ac": SELECTIVE, "compile": COMPILE, "fsdp": FSDP}),
    "fsdp2": Case(FSDP2, {"fsdp": FSDP}, 1, EVERYTHING),
    "fsdp2, ac, compile": Case(FSDP2, {"ac": FULL, "compile": COMPILE, "fsdp": FSDP}, 2),
    "fsdp4": Case(FSDP4, {"fsdp": FSDP, "ac": SELECTIVE}, 2),
    "fsdp4, tied": Case(FSDP4, {"fsdp": FSDP}, 1, TIED),
    "hsdp2x2": Case(HSDP2X2, {"fsdp": FSDP}, 2, TIED),
    "hsdp2x2, ac": Case(HSDP2X2, {"fsdp": FSDP, "ac": FULL}),
    "tp2": Case(TP2, {"tp": TP}),
    "tp2, everything": Case(TP2, {"tp": TP}, 2, EVERYTHING),
    "tp2, whole sequence": Case(TP2, {"tp": WHOLE}, 2),
    "tp2, whole sequence, everything": Case(TP2, {"tp": WHOLE, "ac": SELECTIVE}, 1, EVERYTHING),
    "tp2, ac": Case(TP2, {"tp": TP, "ac": FULL}, 2, TIED),
    "tp2, compile": Case(TP2, {"tp": TP, "compile": COMPILE}),
    "tp2, ac, compile": Case(TP2, {"tp": TP, "ac": FULL, "compile": COMPILE}, 1, EVERYTHING),
    "tp2, whole sequence, ac, compile": Case(TP2, {"tp": WHOLE, "ac": SELECTIVE, "compile": COMPILE}),
    "tp4": Case(ParallelDims(tp=4), {"tp": TP}, 1, FOUR),
    "tp4, tied, ac": Case(ParallelDims(tp=4), {"tp": TP, "ac": SELECTIVE}, 2, FOUR | TIED),
    "fsdp2_tp2": Case(FSDP2_TP2, {"tp": TP, "fsdp": FSDP}, 2, TIED),
    "fsdp2_tp2, whole sequence": Case(FSDP2_TP2, {"tp": WHOLE, "fsdp": FSDP}, 1, EVERYTHING),
    "fsdp2_tp2, ac, compile": Case(FSDP2_TP2, {"tp": TP, "ac": FULL, "compile": COMPILE, "fsdp": FSDP}),
    "fsdp2_tp2, uneven": Case(FSDP2_TP2, {"tp": TP, "fsdp": FSDP}, 1, {"ffn_dim": 54, "vocab_size": 98}),
    "ddp2_tp2": Case(ParallelDims(dp_replicate=2, tp=2), {"tp": TP, "fsdp": FSDP}, 2),
    "cp2, allgather": Case(CP2, GATHER, 2),
    "cp2, allgather, mask": Case(CP2, GATHER | {"ac": FULL}, 1, EVERYTHING),
    "cp2, allgather, ac, compile": Case(CP2, GATHER | {"ac": SELECTIVE, "compile": COMPILE}, 1, TIED),
    "cp2, ring": Case(CP2, RING, 1, TIED),
    "cp2, ring, ac": Case(CP2, RING | {"ac": SELECTIVE}, 2),
    "cp2, ring, compile": Case(CP2, RING | {"compile": COMPILE}),
    "cp2, ulysses": Case(CP2, ULYSSES, 2, TIED),
    "cp2, ulysses, mask": Case(CP2, ULYSSES | {"ac": SELECTIVE}, 1, EVERYTHING),
    "cp2, ulysses, ac, compile": Case(CP2, ULYSSES | {"ac": FULL, "compile": COMPILE}),
    "cp4, allgather": Case(CP4, GATHER, 1, MASKED),
    "cp4, allgather, ac": Case(CP4, GATHER | {"ac": FULL}, 2, TIED),
    "cp4, ring": Case(CP4, RING, 1, TIED),
    "cp4, ring, ac": Case(CP4, RING | {"ac": FULL}, 2),
    "cp4, ulysses": Case(CP4, ULYSSES, 2, FOUR),
    "cp4, ulysses, mask": Case(CP4, ULYSSES | {"ac": FULL}, 1, FOUR | TIED | MASKED),
    "fsdp2_cp2, allgather": Case(FSDP2_CP2, GATHER, 2, MASKED | TIED),
    "fsdp2_cp2, ring": Case(FSDP2_CP2, RING | {"ac": FULL}, 1),
    "fsdp2_cp2, ulysses": Case(FSDP2_CP2, ULYSSES | {"ac": SELECTIVE}, 2),
    "ddp2_cp2": Case(ParallelDims(dp_replicate=2, cp=2), GATHER, 2),
    "tp2_cp2, allgather": Case(TP2_CP2, GATHER | {"tp": TP}, 1, EVERYTHING),
    "tp2_cp2, ring": Case(TP2_CP2, RING | {"tp": TP, "ac": FULL}, 2, TIED),
    "tp2_cp2, ulysses": Case(TP2_CP2, ULYSSES | {"tp": TP, "ac": SELECTIVE, "compile": COMPILE}, 1, FOUR),
    "tp2_cp2, whole sequence": Case(TP2_CP2, RING | {"tp": WHOLE}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_one_process(name: str) -> None:
    case = CASES[name]
    expected = one_process(case)
    for rank in run_ranks(on_mesh, case.dims.world_size, case, {}):
        assert_equal(rank, expected)
    total = sum(value.numel() for value in expected["initial"].values())
    # norms and row biases are whole on every tp rank
    assert rank["local"] < 1.1 * total / (case.dims.tp * case.dims.shard_degree)
