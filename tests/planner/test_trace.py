"""The closed form names the products and collectives that the real pipeline does, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from titanyaml.planner.model import from_config
from titanyaml.runner import tracing

SMALL = [
    "model=llama3_debug",
    "model.dim=64",
    "model.ffn_dim=96",
    "model.vocab_size=512",
    "train.seq_len=64",
    "train.local_batch=2",
]
MIXED = [
    "model=moe_debug",
    "model.dim=64",
    "model.ffn_dim=96",
    "model.moe.ffn_dim=32",
    "model.moe.shared_ffn_dim=48",
    "model.vocab_size=512",
    "train.seq_len=64",
    "train.local_batch=2",
]


def check(configure: Callable, *typed: str, ranks: tuple[int, ...] = (0,)) -> None:
    """Plan and trace agree on these pipeline ranks."""
    small = tracing.reduce_config(configure(*typed))
    job = from_config.job(small)
    for rank in ranks:
        planned, traced = tracing.plan_work(job, pipeline_rank=rank), tracing.trace_work(small, pipeline_rank=rank)
        assert traced.flops > 0
        assert planned.flops == traced.flops
        assert {key: tuple(value) for key, value in planned.comm.items()} == {
            key: tuple(value) for key, value in traced.comm.items()
        }


@pytest.mark.parametrize(
    "typed",
    [
        "parallel=single ac=selective_op",
        "parallel=fsdp4 ac=full",
        "parallel=tp2 ac=selective_op ac.keep_products=0.25",
        "parallel=fsdp2_cp2 ac=selective_op ac.keep_products=0.75",
        "parallel=hsdp2x2 parallel.fsdp_reshard_after_forward=never",
        "parallel=tp2 ac=selective_op model.qk_norm=true",
        "parallel=tp2 parallel.tp_sequence_parallel=false model.tie_embeddings=true",
        "parallel=fsdp2_tp2 ac=full",
        "parallel=cp2 ac=full",
        "parallel=fsdp2_cp2 parallel.cp_method=ring",
        "parallel=cp2_tp2 parallel.cp_method=ulysses ac=selective_layer",
    ],
)
def test_plan_is_what_the_pipeline_does(configure, typed: str) -> None:
    check(configure, *SMALL, *typed.split())


@pytest.mark.parametrize(
    "typed",
    [
        "parallel=pp2 parallel.pp_schedule=1F1B",
        "parallel=fsdp2_pp4 ac=full",
        "parallel=pp2_tp2 parallel.pp_schedule=Interleaved1F1B ac=selective_op",
        "parallel=hsdp2x2_pp2 parallel.pp_schedule=Interleaved1F1B",
        "parallel=fsdp2_pp2 parallel.pp_schedule=InterleavedZeroBubble",
        "parallel=pp2_cp2 parallel.pp_schedule=ZBVZeroBubble",
    ],
)
def test_plan_is_what_a_pipeline_rank_does(configure, typed: str) -> None:
    ranks = 4 if "pp4" in typed else 2
    check(configure, *SMALL, *typed.split(), ranks=tuple(range(ranks)))


@pytest.mark.parametrize(
    "typed",
    [
        "parallel=single ac=selective_op",
        "parallel=fsdp2 ac=full model.moe.shared_ffn_dim=0",
        "parallel=ep2 ac=selective_op ac.keep_products=1",
        "parallel=fsdp4_ep2 ac=full",
        "parallel=hsdp2x2_ep2 ac=selective_op model.moe.shared_ffn_dim=0",
        "parallel=ep2_tp2 ac=full model.moe.weight_at=input",
        "parallel=fsdp2_tp2_ep2 ac=selective_op",
        "parallel=tp2 model.moe.balance_loss=0.01 ac=full",
        "parallel=tp2 parallel.tp_sequence_parallel=false ac=full",
        "parallel=fsdp2_cp2_ep4",
        "parallel=fsdp2_pp2_ep2 model.moe.first_dense=0",
    ],
)
def test_plan_is_what_a_mixture_does(configure, typed: str) -> None:
    check(configure, *MIXED, *typed.split(), ranks=(0, 1) if "pp2" in typed else (0,))
