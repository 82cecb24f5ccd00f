"""Expert parallelism: what is spread, that it computes the same as one process, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint.conftest import make
from tests.plugins.parity import FULL, TP, Case, assert_equal, cp, on_mesh, one_process, whole
from tests.plugins.small import COMPILE, FSDP, build, context, spec
from tests.ranks import run_ranks
from titanyaml.config.schema import MoE
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.models import decoder
from titanyaml.pipeline.resolve import resolve
from titanyaml.plugins.ep import ExpertParallel

EP = {"_target_": "titanyaml.plugins.ep.ExpertParallel"}
#: Block 1 of two is a mixture.
MIXTURE = {
    "num_layers": 2,
    "moe": MoE(
        num_experts=8,
        top_k=3,
        ffn_dim=24,
        shared_ffn_dim=16,
        every=2,
        score="sigmoid",
        normalize=True,
        bias_rate=0.01,
        balance_loss=0.05,
    ),
}
EVEN = {**MIXTURE, "moe": replace(MIXTURE["moe"], balance_loss=0.0)}
#: Weights before the experts, and so few tokens an expert that some ranks get none.
LLAMA4 = {
    "num_layers": 2,
    "nope_every": 2,
    "qk_l2_norm": True,
    "init_std": 0.5,
    "moe": MoE(num_experts=8, top_k=1, ffn_dim=24, shared_ffn_dim=24, score="sigmoid", weight_at="input"),
}
SPREAD = {"ep": EP, "fsdp": FSDP}
EP2, FSDP4_EP2 = ParallelDims(dp_shard=2, ep=2), ParallelDims(dp_shard=4, ep=2)
EP2_TP2 = ParallelDims(dp_shard=2, tp=2, ep=2)
CASES = {
    "ep2": Case(EP2, SPREAD, 2, MIXTURE),
    "ep2, ac, compile": Case(EP2, {"ep": EP, "ac": FULL, "compile": COMPILE, "fsdp": FSDP}, 1, LLAMA4),
    "ep4": Case(ParallelDims(dp_shard=4, ep=4), SPREAD, 1, LLAMA4),
    "fsdp4_ep2": Case(FSDP4_EP2, SPREAD, 2, MIXTURE),
    "hsdp2x2_ep2": Case(ParallelDims(dp_replicate=2, dp_shard=2, ep=2), SPREAD, 1, MIXTURE),
    "ep2_tp2": Case(EP2_TP2, {"tp": TP, **SPREAD}, 2, MIXTURE),
    "ep2_tp2, ac, compile": Case(EP2_TP2, {"tp": TP, "ac": FULL, "compile": COMPILE, **SPREAD}, 1, LLAMA4),
    "ep4_tp2": Case(replace(EP2_TP2, ep=4), {"tp": TP, **SPREAD}, 1, MIXTURE),
    "tp2_ep2 alone": Case(ParallelDims(tp=2, ep=2), {"tp": TP, "ep": EP}, 2, MIXTURE),
    "cp2_ep2": Case(ParallelDims(cp=2, ep=2), {"cp": cp("allgather"), **SPREAD}, 1, EVEN),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_loads_equal_one_process(name: str) -> None:
    case = CASES[name]
    expected = one_process(case)
    ranks = run_ranks(on_mesh, case.dims.world_size, case, {})
    for actual in ranks:
        assert_equal(actual, expected)
    total = sum(value.numel() for key, value in expected["initial"].items() if ".experts." in key)
    num_others = sum(value.numel() for value in expected["initial"].values()) - total
    shards = case.dims.dp_shard * case.dims.cp
    # every expert lies in pieces on all ranks but copies; of what tp replicates (router, norms) a little more is here
    assert ranks[0]["local"] <= total / (shards * case.dims.tp) + 1.1 * num_others / (shards * case.dims.tp)


def crowd(rank: int, expert: int) -> dict[str, Tensor]:
    """All pairs of both ranks to one expert, and the same by experts that are all here."""
    model_spec = spec(**MIXTURE)
    mesh = EP2.build_experts("cpu")
    model = build({}, model_spec=model_spec).model
    wholes = model.layers[1].feed_forward.experts
    spread, _ = ExpertParallel().apply(
        decoder.build(model_spec).double(), context(model_spec, dims=EP2, expert_mesh=mesh)
    )
    part = spread.layers[1].feed_forward.experts
    for name, weight in wholes.named_parameters():
        shard = weight.detach().chunk(2)[rank].clone()
        setattr(part, name, torch.nn.Parameter(DTensor.from_local(shard, mesh["ep"], [Shard(0)])))
    draw = torch.Generator().manual_seed(rank)
    x_BSD = torch.randn(1, 6 + rank, 32, generator=draw, dtype=torch.float64)
    ids = torch.full((*x_BSD.shape[:2], 3), expert)
    weights = torch.rand(ids.shape, generator=draw, dtype=torch.float64)
    results = {}
    for name, experts in (("whole", wholes), ("spread", part)):
        x = x_BSD.clone().requires_grad_()
        out = experts(x, ids, weights, ids.flatten().bincount(minlength=8)).view_as(x)
        (out * x_BSD.flip(1)).sum().backward()
        results |= {name: out.detach(), f"{name} dx": x.grad}
    return results | {"dw spread": whole(part.w2.grad), "dw whole": wholes.w2.grad}


def test_all_tokens_to_one_rank_and_none_to_the_other() -> None:
    ranks = run_ranks(crowd, 2, 6)
    for results in ranks:
        torch.testing.assert_close(results["spread"], results["whole"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(results["spread dx"], results["whole dx"], rtol=1e-12, atol=1e-14)
    total = sum(results["dw whole"] for results in ranks)
    torch.testing.assert_close(ranks[0]["dw spread"], total, rtol=1e-12, atol=1e-14)
    assert (total[6] != 0).any() and not total[:6].any()


def save(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    built = build(
        case.nodes,
        model_spec=case.spec(),
        dims=case.dims,
        mesh=case.dims.build("cpu"),
        expert_mesh=case.dims.build_experts("cpu"),
    )
    weights = dict(built.model.named_parameters())
    make(Path(path), env=Env.from_environ("cpu")).save(1, {"model": weights}, {"position": 0})
    return {name: whole(parameter) for name, parameter in weights.items()}


def load(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    built = build(
        case.nodes,
        model_spec=case.spec(),
        dims=case.dims,
        mesh=case.dims.build("cpu"),
        expert_mesh=case.dims.build_experts("cpu"),
    )
    return {name: whole(parameter) for name, parameter in filled(built.model, Path(path)).items()}


def filled(model: torch.nn.Module, path: Path) -> dict[str, Tensor]:
    """The parameters, zeroed and then read from the checkpoint."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in weights.values():
            parameter.zero_()
    checkpoints = make(path, env=Env.from_environ("cpu"))
    checkpoints.load(checkpoints.latest(), {"model": weights})
    return weights


def test_checkpoints_go_from_ep_to_one_process_and_back(tmp_path: Path) -> None:
    case = CASES["fsdp4_ep2"]
    saved = run_ranks(save, 4, str(tmp_path), case)[0]
    alone = filled(build({}, model_spec=case.spec()).model, tmp_path)
    assert alone.keys() == saved.keys()
    make(tmp_path / "alone").save(1, {"model": alone}, {"position": 0})
    back = run_ranks(load, 4, str(tmp_path / "alone"), replace(CASES["ep2_tp2"]))
    for state in (alone, *back, *run_ranks(load, 2, str(tmp_path), CASES["ep2"])):
        assert [n for n, value in saved.items() if not torch.equal(state[n], value)] == []


def replaced(rank: int) -> str:
    model_spec = spec(**MIXTURE)
    model = decoder.build(model_spec)
    model.layers[1].feed_forward.experts = torch.nn.Identity()
    with pytest.raises(PipelineError) as error:
        ExpertParallel().apply(model, context(model_spec, dims=EP2, expert_mesh=EP2.build_experts("cpu")))
    return error.value.problems[0].message


def test_what_is_not_experts_is_not_left_whole_in_silence() -> None:
    assert run_ranks(replaced, 2)[0] == (
        "layers.1.feed_forward.experts is a Identity, which cannot be split; only Experts can"
    )


def changes(rank: int, case: Case) -> dict[str, Any]:
    built = build(
        case.nodes,
        model_spec=case.spec(),
        dims=case.dims,
        mesh=case.dims.build("cpu"),
        expert_mesh=case.dims.build_experts("cpu"),
    )
    return {name: (change.summary, change.skipped) for name, change in built.changes.items()}


def test_changes_say_what_is_spread_and_what_is_not() -> None:
    summaries = run_ranks(changes, 4, CASES["ep2_tp2, ac, compile"])[0]
    summary, skipped = summaries["ep"]
    assert summary == "2 mixtures: 4 of 8 experts on each of 2 ranks; tokens travel by two all-to-alls each way"
    assert skipped == {}
    assert "experts over expert_shard(2)" in summaries["fsdp"][0]
    assert list(summaries["compile"][1]) == ["layers.0.feed_forward.experts", "layers.1.feed_forward.experts"]


def test_off_and_refused() -> None:
    assert resolve({"ep": EP}, context(spec(**MIXTURE))).off == {"ep": "parallel.ep is 1"}
    for model_spec in (spec(), spec(num_layers=2, moe=MoE(num_experts=9))):
        with pytest.raises(PipelineError) as error:
            resolve({"ep": EP}, context(model_spec, dims=EP2))
        assert [(problem.key, problem.hint) for problem in error.value.problems] == [("parallel.ep", "parallel.ep=1")]


@pytest.mark.parametrize("name", ["fsdp4_ep2", "tp2_ep2 alone"])
def test_experts_compute_in_bfloat16_and_have_float32_masters(name: str) -> None:
    mixed = {"param_dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    case = replace(CASES[name], nodes={**CASES[name].nodes, "fsdp": FSDP})
    expected = one_process(case, **mixed)
    for actual in run_ranks(on_mesh, case.dims.world_size, case, mixed):
        # FSDP keeps float32 shards and gathers bfloat16; without it the optimizer has the masters
        assert actual["dtypes"] == ({torch.bfloat16} if "alone" in name else {torch.float32})
        assert all(grad.dtype == torch.float32 for grad in actual["grads"][0].values())
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-2)
