"""Mixtures under every plugin that knows nothing of them, against one process without plugins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.parity import FULL, SELECTIVE, TP, WHOLE, Case, assert_equal, cp, on_mesh, one_process, train
from tests.plugins.small import COMPILE, FSDP, build, loss
from tests.plugins.test_tp import FSDP2_TP2, TP2
from tests.ranks import run_ranks
from titanyaml.config.schema import MoE
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.models.moe import Router
from titanyaml.runner.routing import Routing

#: Blocks 1 and 3 of four are mixtures.
MIXTURE = {
    "num_layers": 4,
    "moe": MoE(
        num_experts=6,
        top_k=2,
        ffn_dim=24,
        shared_ffn_dim=16,
        every=2,
        score="sigmoid",
        normalize=True,
        bias_rate=0.01,
        balance_loss=0.05,
    ),
}
#: Weights before the experts, blocks without rotary embedding.
LLAMA4 = {
    "num_layers": 2,
    "nope_every": 2,
    "attention_chunk": 8,
    "qk_l2_norm": True,
    "moe": MoE(num_experts=4, top_k=1, ffn_dim=24, shared_ffn_dim=24, score="sigmoid", weight_at="input"),
}
CASES = {
    "ac": Case(ParallelDims(), {"ac": FULL}, 2, MIXTURE),
    "ac, operators": Case(ParallelDims(), {"ac": SELECTIVE}, 1, MIXTURE),
    "ac, compile": Case(ParallelDims(), {"ac": FULL, "compile": COMPILE}, 2, MIXTURE),
    "fsdp2": Case(ParallelDims(dp_shard=2), {"fsdp": FSDP}, 2, MIXTURE),
    "fsdp2, llama4": Case(ParallelDims(dp_shard=2), {"fsdp": FSDP}, 1, LLAMA4),
    "tp2": Case(TP2, {"tp": TP}, 2, MIXTURE),
    "tp2, whole sequence": Case(TP2, {"tp": WHOLE}, 1, MIXTURE),
    "tp2, llama4, ac, compile": Case(TP2, {"tp": TP, "ac": FULL, "compile": COMPILE}, 1, LLAMA4),
    "cp2": Case(
        ParallelDims(cp=2),
        {"cp": cp("allgather"), "fsdp": FSDP},
        1,
        {**MIXTURE, "moe": replace(MIXTURE["moe"], balance_loss=0.0)},
    ),
    "fsdp2_tp2": Case(FSDP2_TP2, {"tp": TP, "fsdp": FSDP}, 2, MIXTURE),
}


def alone(case: Case) -> dict[str, Any]:
    torch.compiler.reset()
    built = build(case.nodes, model_spec=case.spec())
    names = {name for name, _ in built.model.named_parameters()}
    return train(built, case, Env.from_environ("cpu", environ={})) | {"names": names}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_loads_equal_one_process(name: str) -> None:
    case = CASES[name]
    expected = one_process(case)
    if case.model is MIXTURE:
        assert all(bias.any() for bias in expected["biases"]) and expected["routing"][0]["balance_loss"] > 0
    ranks = [alone(case)] if case.dims.world_size == 1 else run_ranks(on_mesh, case.dims.world_size, case, {})
    for actual in ranks:
        assert_equal(actual, expected)


def test_a_bias_moves_up_where_an_expert_got_less_than_the_mean() -> None:
    built = build({}, model_spec=Case(ParallelDims(), {}, 1, MIXTURE).spec())
    routers = [module for module in built.model.modules() if isinstance(module, Router)]
    chosen: dict[Router, list[Tensor]] = {router: [] for router in routers}
    for router in routers:
        router.register_forward_hook(lambda module, args, out: chosen[module].append(out[0].flatten()))
    routing = Routing(built.model, MIXTURE["moe"], built.ctx.facts, mesh=None, env=Env.from_environ("cpu", environ={}))
    routing.begin(1)
    for seed in range(2):
        tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss(built.model, tokens, tokens).backward()
    record = routing.end(1)
    loads = [torch.cat(ids).bincount(minlength=6).double() for ids in chosen.values()]
    for router, load in zip(routers, loads, strict=True):
        assert torch.equal(router.bias_E, 0.01 * (load.mean() - load).sign()) and router.bias_E.any()
    assert record["expert_load"] == pytest.approx(max((load.max() / load.mean()).item() for load in loads))
