"""A few steps on a mesh and in one process, from the same initial weights, through the runner's own step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from tests.plugins.small import AC, FSDP, SEQ, Built, build, spec
from titanyaml import optim
from titanyaml.config import schema
from titanyaml.data.loader import Batch
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.loss import CrossEntropy
from titanyaml.models.moe import expert_biases
from titanyaml.pipeline.resolve import verify
from titanyaml.runner.routing import Routing
from titanyaml.runner.train_step import TrainStep, valid_tokens

VOCAB, STEPS, SEQUENCES = 96, 5, 4
TP = {"_target_": "titanyaml.plugins.tp.TensorParallel"}
WHOLE = {**TP, "sequence_parallel": False}
FULL, SELECTIVE = ({**AC, "mode": mode} for mode in ("full", "selective_op"))
EVERYTHING = {"attention_bias": True, "qk_norm": True, "tie_embeddings": True, "document_mask": True}


def cp(method: str) -> dict[str, str]:
    """The node of context parallelism."""
    return {"_target_": "titanyaml.plugins.cp.ContextParallel", "method": method}


@dataclass(frozen=True)
class Case:
    dims: ParallelDims
    nodes: dict[str, dict[str, Any]]
    accumulation: int = 1
    model: dict[str, Any] | None = None
    fused_loss: bool = False
    steps: int = STEPS

    def spec(self) -> schema.Model:
        return spec(**{"vocab_size": VOCAB, "num_kv_heads": 2} | (self.model or {}))


class RecordingOptimizer:
    """An optimizer that remembers the clipped gradients of every update."""

    def __init__(self, inner: optim.AdamW) -> None:
        self.inner = inner
        self.local_steps: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, lr: float, *, clip: Tensor) -> None:
        self.local_steps.append(
            {
                name: grad.detach().clone() * clip
                for name, grad in zip(self.inner.names, self.inner.grads(), strict=True)
            }
        )
        self.inner.step(lr, clip=clip)

    def full_gradients(self) -> list[dict[str, Tensor]]:
        """Of each step, by parameter: whole tensors. All ranks must call."""
        by_name = {name: _full_each([step[name] for step in self.local_steps]) for name in self.inner.names}
        return [{name: tensors[i] for name, tensors in by_name.items()} for i in range(len(self.local_steps))]


def _full_each(tensors: list[Tensor]) -> list[Tensor]:
    """``full_tensor`` of equally placed tensors by one all-gather: gathering one by one took a third of these tests."""
    first = tensors[0]
    if not isinstance(first, DTensor):
        return tensors
    stacked = DTensor.from_local(
        torch.stack([tensor.to_local() for tensor in tensors]),
        first.device_mesh,
        [_one_dim_further(placement) for placement in first.placements],
        shape=torch.Size([len(tensors), *first.shape]),
        stride=(first.numel(), *torch.empty(first.shape, device="meta").stride()),
    )
    return list(stacked.full_tensor().unbind())


def _one_dim_further(placement: Placement) -> Placement:
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def batches(step: int, accumulation: int, data_rank: int, data_degree: int) -> list[Batch]:
    """One rank's part of the same global batch of SEQUENCES a microbatch, whatever the number of data ranks.

    Of every first sequence one label in seven is ignored, of every second one six in seven.
    """
    draw = torch.Generator().manual_seed(step)
    shape = (accumulation, SEQUENCES, SEQ)
    tokens, labels = (torch.randint(0, VOCAB, shape, generator=draw) for _ in range(2))
    ignored = torch.tensor([1 / 7, 6 / 7] * (SEQUENCES // 2)).view(1, SEQUENCES, 1)
    labels[torch.rand(shape, generator=draw) < ignored] = -100
    documents = (torch.rand(shape, generator=draw) < 0.2).long().cumsum(-1)
    rows = slice(data_rank * SEQUENCES // data_degree, (data_rank + 1) * SEQUENCES // data_degree)
    ids = torch.arange(SEQUENCES)[rows]
    return [Batch(tokens[a, rows], labels[a, rows], documents[a, rows], ids) for a in range(accumulation)]


def train(built: Built, case: Case, env: Env, inner: optim.AdamW | None = None) -> dict[str, Any]:
    """Losses, norms and clipped gradients of a few steps."""
    inner = inner or optim.build(
        schema.Optim(), dict(built.model.named_parameters()), masters=built.masters, device=built.ctx.device
    )
    initial = {name: whole(inner.master(name)) for name in inner.names}
    optimizer, dims, mesh = RecordingOptimizer(inner), built.ctx.dims, built.ctx.mesh
    moe = built.model.spec.moe
    routing = Routing(built.model, moe, built.ctx.facts, mesh=mesh, env=env) if moe.num_experts else None
    step = TrainStep(
        built.model,
        optimizer,
        loss_fn=CrossEntropy(chunk_tokens=12, fused=case.fused_loss),
        max_norm=1.0,
        documents=built.model.spec.document_mask,
        env=env,
        adds_loss=dims.adds_loss(mesh),
        routing=routing,
    )
    results = []
    for number in range(case.steps):
        tokens = sum(valid_tokens(batches(number, case.accumulation, rank, SEQUENCES)) for rank in range(SEQUENCES))
        share = batches(number, case.accumulation, dims.data_rank(mesh), dims.data_degree)
        results.append(step(share, tokens=tokens, lr=1e-2))
        if number == 0:
            verify(built.model, built.resolved, built.ctx)
    return {
        "initial": initial,
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "routing": [r.routing for r in results],
        "biases": [b.clone() for b in expert_biases(built.model).values()],
        "grads": optimizer.full_gradients(),
        "final": {name: whole(inner.master(name)) for name in inner.names},
    }


def on_mesh(rank: int, case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    torch.compiler.reset()
    warnings.simplefilter("ignore")
    mesh = case.dims.build("cpu")
    built = build(
        case.nodes,
        model_spec=case.spec(),
        dims=case.dims,
        mesh=mesh,
        expert_mesh=case.dims.build_experts("cpu"),
        **changes,
    )
    facts = {
        "local": sum(p.to_local().numel() for p in built.model.parameters()),
        "masters": set(built.masters),
        "names": {name for name, _ in built.model.named_parameters()},
        "dtypes": {p.dtype for p in built.model.parameters()},
        "changes": built.changes,
    }
    return train(built, case, Env.from_environ("cpu")) | facts


def one_process(case: Case, **changes: Any) -> dict[str, Any]:
    nodes = {"fsdp": FSDP} if changes else {}
    return train(build(nodes, model_spec=case.spec(), **changes), case, Env.from_environ("cpu", environ={}))


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Initial weights bit for bit; losses within 1e-9, norms and every gradient within 1e-8 of its size; of mixtures
    also loads and biases."""
    assert actual["names"] == set(expected["initial"]), "a parameter was renamed"
    assert [n for n, value in expected["initial"].items() if not torch.equal(actual["initial"][n], value)] == []
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-9, rel=0)
    assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-8)
    assert actual["routing"] == [pytest.approx(row, rel=1e-9) for row in expected["routing"]]
    assert all(torch.equal(a, b) for a, b in zip(actual["biases"], expected["biases"], strict=True))
    for grads, expected_grads in zip(actual["grads"], expected["grads"], strict=True):
        assert grads.keys() == expected_grads.keys()
        for parameter, grad in expected_grads.items():
            assert (grads[parameter] - grad).norm() <= 1e-8 * grad.norm(), parameter
