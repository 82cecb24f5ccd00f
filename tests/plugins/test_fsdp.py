"""FSDP2 on 2 and 4 ranks against one process, and the cast of parameters on one rank."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.plugins.small import AC, COMPILE, FSDP, LAYERS, batch, build, context, loss, spec
from tests.ranks import run_ranks
from titanyaml import machine
from titanyaml.distributed.compat import fake_tensors
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.pipeline.resolve import resolve, verify
from titanyaml.plugins.fsdp import FullyShard, ReduceIntoFreedMemory

ACCUMULATION = 2
#: float32 masters and reduction, bfloat16 compute: the default on a GPU.
MIXED = {"param_dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
MESHES = {
    "fsdp2": ParallelDims(dp_shard=2),
    "ddp2": ParallelDims(dp_replicate=2),
    "hsdp2x2": ParallelDims(dp_replicate=2, dp_shard=2),
}
PIPELINES = {
    "auto": {"fsdp": FSDP},
    "always": {"fsdp": {**FSDP, "reshard_after_forward": "always"}},
    "never": {"fsdp": {**FSDP, "reshard_after_forward": "never"}},
    "reuse": {"fsdp": {**FSDP, "reuse_memory": True}},
    "ac": {"ac": {**AC, "mode": "full"}, "fsdp": FSDP},
    "ac and compile": {"ac": {**AC, "mode": "selective_op"}, "compile": COMPILE, "fsdp": FSDP},
}


def accumulate(built, microbatches, scale):
    """Losses of all microbatches; gradients stay in the parameters."""
    losses = []
    for tokens_BS, labels_BS in microbatches:
        value = loss(built.model, tokens_BS, labels_BS)
        (value / scale).backward()
        losses.append(value.item())
    return losses


def one_process(ranks: int, **changes: Any):
    """Summed loss and gradients of the whole batch without any plugin but the cast."""
    tokens, labels = batch(ACCUMULATION, ranks, 1)
    built = build({"fsdp": FSDP}, **changes)
    pairs = zip(tokens.flatten(0, 1), labels.flatten(0, 1), strict=True)
    losses = accumulate(built, pairs, (labels != -100).sum())
    return sum(losses), {name: parameter.grad for name, parameter in built.model.named_parameters()}


def on_mesh(rank: int, dims: ParallelDims, pipeline: str, spec_changes: dict[str, Any], changes: dict[str, Any]):
    """What one data rank sees: its loss, whole gradients, and facts about its parameters."""
    torch.compiler.reset()  # ranks live on between tests, and graphs of an equal model would be used again
    mesh = dims.build("cpu")
    built = build(PIPELINES[pipeline], model_spec=spec(**spec_changes), dims=dims, mesh=mesh, **changes)
    tokens, labels = batch(ACCUMULATION, dims.data_degree, 1)
    data_rank = dims.data_rank(mesh)
    with torch.no_grad():  # a validation must leave the shards in place
        loss(built.model, tokens[0, data_rank], labels[0, data_rank])
    after_validation = all(isinstance(parameter, DTensor) for parameter in built.model.parameters())
    microbatches = [(tokens[a, data_rank], labels[a, data_rank]) for a in range(ACCUMULATION)]
    losses = accumulate(built, microbatches[:1], (labels != -100).sum())
    parameters = dict(built.model.named_parameters())
    sharded = all(p.grad.to_local().numel() == p.to_local().numel() for p in parameters.values())
    losses += accumulate(built, microbatches[1:], (labels != -100).sum())
    return {
        "loss": sum(losses),
        "grads": {name: parameter.grad.full_tensor() for name, parameter in parameters.items()},
        "dtypes": {(p.dtype, p.grad.dtype) for p in parameters.values()},
        "local": sum(p.to_local().numel() for p in parameters.values()),
        "masters": list(built.masters),
        "after_validation": after_validation,
        "sharded": sharded,
        "verified": {name: change.summary for name, change in verify(built.model, built.resolved, built.ctx)},
        "summary": built.changes["fsdp"].summary,
        "modules": built.changes["fsdp"].modules,
    }


def distance(actual, expected) -> float:
    """The worst relative error of a gradient."""
    assert actual.keys() == expected.keys()
    return max(((actual[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


@pytest.mark.parametrize(
    ("mesh", "pipeline", "tied"),
    [
        ("fsdp2", "auto", False),
        ("fsdp2", "always", True),
        ("fsdp2", "never", False),
        ("fsdp2", "reuse", False),
        ("fsdp2", "ac", True),
        ("fsdp2", "ac and compile", False),
        ("ddp2", "auto", True),
        ("ddp2", "ac and compile", False),
        ("hsdp2x2", "auto", True),
        ("hsdp2x2", "always", False),
        ("hsdp2x2", "reuse", True),
    ],
)
def test_summed_gradients_equal_one_process(mesh, pipeline, tied):
    dims = MESHES[mesh]
    shape = {"tie_embeddings": tied, "dim": 36, "num_heads": 6}  # 97 and 36 rows: uneven shards
    expected_loss, expected = one_process(dims.data_degree, model_spec=spec(**shape))
    ranks = run_ranks(on_mesh, dims.world_size, dims, pipeline, shape, {})
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(expected_loss, rel=1e-13)
    for rank in ranks:
        assert distance(rank["grads"], expected) < 1e-12
        assert rank["dtypes"] == {(torch.float64, torch.float64)}
        assert rank["after_validation"] and rank["sharded"]
    # one rank of each shard: together they hold every parameter once
    total = sum(parameter.numel() for parameter in expected.values())
    assert sum(rank["local"] for rank in ranks) == total * dims.dp_replicate
    assert max(rank["local"] for rank in ranks) < total / dims.dp_shard * 1.05
    if "compile" in pipeline:
        assert ranks[0]["verified"]["compile"] == "2 graphs compiled, 0 graph breaks", "with and without gradients"
    assert ("gradients in memory of freed activations" in ranks[0]["summary"]) == (pipeline == "reuse")
    if pipeline == "ac":
        assert ranks[0]["verified"]["ac"] == f"{LAYERS} blocks were recomputed"


@pytest.mark.parametrize("mesh", ["fsdp2", "ddp2"])
def test_bfloat16_compute_keeps_float32_parameters_and_gradients(mesh):
    expected_loss, expected = one_process(2, **MIXED)
    exact_loss, exact = one_process(2, **{**MIXED, "compute_dtype": torch.float32})
    ranks = run_ranks(on_mesh, 2, MESHES[mesh], "auto", {}, MIXED)
    for rank in ranks:
        assert rank["dtypes"] == {(torch.float32, torch.float32)}
        assert rank["masters"] == [], "the sharded parameters are the masters"
        # as far from float32 as one process in bfloat16 is, and no farther
        assert distance(rank["grads"], exact) < 1.5 * distance(expected, exact)
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(expected_loss, rel=1e-6), "the same forward"
    assert expected_loss != exact_loss


def test_the_change_names_axes_dtypes_and_modules():
    [rank, _] = run_ranks(on_mesh, 2, MESHES["fsdp2"], "auto", {}, MIXED)
    assert rank["summary"] == (
        "4 blocks and 3 other modules over dp_shard(2), computing in bfloat16; gradients summed in float32 after every "
        "microbatch; freed after forward: all blocks but the last"
    )
    assert rank["modules"] == [*(f"layers.{i}" for i in range(LAYERS)), "tok_embeddings", "norm", "output"]


@pytest.mark.parametrize("tied", [False, True])
def test_one_rank_stores_the_compute_dtype_and_the_optimizer_gets_masters(tied):
    built = build({"fsdp": FSDP}, model_spec=spec(tie_embeddings=tied), **MIXED)
    plain = build({}, model_spec=spec(tie_embeddings=tied), **MIXED)
    parameters = dict(built.model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert built.model.rope_cos_TP.dtype == torch.float32
    assert built.masters.keys() == parameters.keys()
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(built.masters[name], parameter)
    change = built.changes["fsdp"]
    count = 9 * LAYERS + (2 if tied else 3)
    assert change.summary == (
        f"one data rank: {count} parameters stored in bfloat16, the optimizer keeps the float32 masters"
    )
    assert len(change.modules) == count
    tokens_BS, _ = batch(1)
    assert built.model(tokens_BS).dtype == torch.bfloat16


def test_off_and_refused():
    resolved = resolve({"fsdp": FSDP}, context(spec()))
    assert resolved.off == {"fsdp": "one data rank, compute dtype = parameter dtype (float64)"}
    with pytest.raises(PipelineError) as error:
        resolve({"fsdp": {**FSDP, "reshard_after_forward": "sometimes"}}, context(spec(), param_dtype=torch.float32))
    assert [problem.key for problem in error.value.problems] == [
        "parallel.fsdp_reshard_after_forward",
        "train.compute_dtype",
    ]
    assert error.value.problems[1].hint == "train.param_dtype=float64"


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {"accumulation": 2}),
        ({"master": "split"}, {}),
        ({"cpu_offload": True}, {}),
        ({}, {"param_dtype": torch.float64}),
        ({}, {"dims": ParallelDims(dp_shard=2, pp=2)}),
        ({}, {"dims": ParallelDims()}),
    ],
)
def test_only_whole_gradients_take_memory_of_activations(options, changes):
    settings = {**MIXED, "dims": MESHES["fsdp2"], **changes}
    problems = FullyShard(reuse_memory=True, **options).check(context(spec(), **settings))
    assert "parallel.fsdp_reuse_memory" in [problem.key for problem in problems]
    assert not FullyShard(reuse_memory=True).check(context(spec(), **MIXED, dims=MESHES["fsdp2"]))


def gradients_of_a_gpu(reuse: bool, *, width: int = 2048, layers: int = 24) -> tuple[list[torch.Tensor], int]:
    """Of the third step of a deep narrow model whose activations are as large as its gradients; bytes reserved."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(layers)))
    mesh = init_device_mesh("cuda", (1,))
    for layer in model.cuda():
        fully_shard(layer, mesh=mesh)
        if reuse:
            layer.set_custom_reduce_scatter(ReduceIntoFreedMemory())
    x = torch.randn(4 * width, width, device="cuda")
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return [parameter.grad.to_local().clone() for parameter in model.parameters()], torch.cuda.max_memory_reserved()


@pytest.mark.skipif(not machine.gpus(), reason="streams have memory of their own on a GPU")
def test_gradients_in_memory_of_activations_are_the_same_and_reserve_less():
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        expected, apart = gradients_of_a_gpu(False)
        actual, together = gradients_of_a_gpu(True)
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, actual, expected))
    size = sum(gradient.nbytes for gradient in expected)
    assert together < apart - 0.8 * size


def test_results_of_reductions_lie_in_the_computing_streams_memory(monkeypatch):
    entered = []

    @contextmanager
    def stream(which):
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with fake_tensors():
        result = ReduceIntoFreedMemory().allocate((3, 5), dtype=torch.float32, device=torch.device("cuda", 0))
    assert result.shape == (3, 5) and result.dtype == torch.float32
    assert entered == ["default of cuda:0"]
