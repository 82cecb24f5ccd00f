"""The closed form names the products and collectives that the real pipeline does, byte for byte."""

from __future__ import annotations

import pytest

from titanyaml.planner import configured
from titanyaml.runner import tracing

SMALL = ["model=llama3_debug", "model.dim=64", "model.ffn_dim=96", "model.vocab_size=512", "train.seq_len=64",
         "train.local_batch=2"]


@pytest.mark.parametrize("typed", [
    "parallel=single ac=selective_op",
    "parallel=fsdp4 ac=full",
    "parallel=hsdp2x2 parallel.fsdp_reshard_after_forward=never",
    "parallel=tp2 ac=selective_op model.qk_norm=true",
    "parallel=tp2 parallel.tp_sequence_parallel=false model.tie_embeddings=true",
    "parallel=fsdp2_tp2 ac=full",
    "parallel=cp2 ac=full",
    "parallel=fsdp2_cp2 parallel.cp_method=ring",
    "parallel=cp2_tp2 parallel.cp_method=ulysses ac=selective_layer",
])
def test_plan_is_what_the_pipeline_does(configure, typed: str) -> None:
    small = tracing.reduced(configure(*SMALL, *typed.split()))
    planned, traced = tracing.planned(configured.job(small)), tracing.traced(small)
    assert traced.flops > 0
    assert planned.flops == traced.flops
    assert {key: tuple(value) for key, value in planned.comm.items()} == \
        {key: tuple(value) for key, value in traced.comm.items()}
