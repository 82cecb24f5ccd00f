"""Tensor parallelism against one process, from the same initial weights, through the runner's own step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.checkpoint.conftest import make
from tests.plugins.small import AC, COMPILE, FSDP, SEQ, Built, build, context, spec
from tests.ranks import run_ranks
from titanyaml import optim
from titanyaml.config import schema
from titanyaml.data.loader import Batch
from titanyaml.dist.env import Env
from titanyaml.dist.mesh import ParallelDims
from titanyaml.errors import DataError, PipelineError
from titanyaml.loss import CrossEntropy
from titanyaml.pipeline.resolve import resolve, verify
from titanyaml.runner.step import TrainStep, valid_tokens

VOCAB, STEPS, DATA_RANKS = 96, 4, 2
TP = {"_target_": "titanyaml.plugins.tp.TensorParallel"}
WHOLE = {**TP, "sequence_parallel": False}
FULL, SELECTIVE = ({**AC, "mode": mode} for mode in ("full", "selective_op"))
EVERYTHING = {"attention_bias": True, "qk_norm": True, "tie_embeddings": True, "document_mask": True}
MIXED = {"param_dtype": torch.float32, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
TP2, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)


@dataclass(frozen=True)
class Case:
    dims: ParallelDims
    nodes: dict[str, dict[str, Any]]
    accumulation: int = 1
    model: dict[str, Any] | None = None

    def spec(self) -> schema.Model:
        return spec(**{"vocab_size": VOCAB, "num_kv_heads": 2} | (self.model or {}))


CASES = {
    "tp2": Case(TP2, {"tp": TP}),
    "tp2, everything": Case(TP2, {"tp": TP}, 2, EVERYTHING),
    "tp2, whole sequence": Case(TP2, {"tp": WHOLE}, 2),
    "tp2, whole sequence, everything": Case(TP2, {"tp": WHOLE}, 1, EVERYTHING),
    "tp2, ac": Case(TP2, {"tp": TP, "ac": FULL}, 2, {"tie_embeddings": True}),
    "tp2, compile": Case(TP2, {"tp": TP, "compile": COMPILE}),
    "tp2, ac, compile": Case(TP2, {"tp": TP, "ac": FULL, "compile": COMPILE}, 1, EVERYTHING),
    "tp2, whole sequence, ac, compile": Case(TP2, {"tp": WHOLE, "ac": SELECTIVE, "compile": COMPILE}),
    "tp4": Case(ParallelDims(tp=4), {"tp": TP}, 1, {"num_kv_heads": 4}),
    "fsdp2_tp2": Case(FSDP2_TP2, {"tp": TP, "fsdp": FSDP}, 2, {"tie_embeddings": True}),
    "fsdp2_tp2, whole sequence": Case(FSDP2_TP2, {"tp": WHOLE, "fsdp": FSDP}, 1, EVERYTHING),
    "fsdp2_tp2, ac, compile": Case(FSDP2_TP2, {"tp": TP, "ac": FULL, "compile": COMPILE, "fsdp": FSDP}),
    "fsdp2_tp2, uneven": Case(FSDP2_TP2, {"tp": TP, "fsdp": FSDP}, 1, {"ffn_dim": 54, "vocab_size": 98}),
    "ddp2_tp2": Case(ParallelDims(dp_replicate=2, tp=2), {"tp": TP, "fsdp": FSDP}, 2),
}


class Watched:
    """An optimizer that remembers the gradients of every update, clipped, as whole tensors."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.seen = inner, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, lr: float) -> None:
        grads = zip(self.inner.names, self.inner.grads(), strict=True)
        self.seen.append({name: whole(grad) for name, grad in grads})
        self.inner.step(lr)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def batches(step: int, accumulation: int, data_rank: int, data_degree: int) -> list[Batch]:
    """One rank's part of the same global batch of 2 sequences a microbatch, whatever the number of data ranks.

    Of every first sequence one label in seven is ignored, of every second one six in seven.
    """
    draw = torch.Generator().manual_seed(step)
    shape = (accumulation, DATA_RANKS, SEQ)
    tokens, labels = (torch.randint(0, VOCAB, shape, generator=draw) for _ in range(2))
    ignored = torch.tensor([1 / 7, 6 / 7]).view(1, 2, 1)
    labels[torch.rand(shape, generator=draw) < ignored] = -100
    documents = (torch.rand(shape, generator=draw) < 0.2).long().cumsum(-1)
    rows = slice(data_rank * DATA_RANKS // data_degree, (data_rank + 1) * DATA_RANKS // data_degree)
    ids = torch.arange(DATA_RANKS)[rows]
    return [Batch(tokens[a, rows], labels[a, rows], documents[a, rows], ids) for a in range(accumulation)]


def train(built: Built, case: Case, env: Env) -> dict[str, Any]:
    """Losses, norms and clipped gradients of a few steps."""
    inner = optim.build(
        schema.Optim(), dict(built.model.named_parameters()), masters=built.masters, device=built.ctx.device
    )
    initial = {name: whole(inner.master(name)) for name in inner.names}
    optimizer, dims, mesh = Watched(inner), built.ctx.dims, built.ctx.mesh
    step = TrainStep(
        built.model, optimizer, loss_fn=CrossEntropy(chunk_tokens=12), max_norm=1.0,
        documents=built.model.spec.document_mask, env=env, speaks=dims.speaks(mesh),
    )
    results = []
    for number in range(STEPS):
        tokens = sum(valid_tokens(batches(number, case.accumulation, rank, DATA_RANKS)) for rank in range(DATA_RANKS))
        mine = batches(number, case.accumulation, dims.data_rank(mesh), dims.data_degree)
        results.append(step(mine, tokens=tokens, lr=1e-2))
        if number == 0:
            verify(built.model, built.resolved, built.ctx)
    return {
        "initial": initial, "losses": [r.loss for r in results], "norms": [r.grad_norm for r in results],
        "grads": optimizer.seen, "final": {name: whole(inner.master(name)) for name in inner.names},
    }


def on_mesh(rank: int, case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    torch.compiler.reset()
    warnings.simplefilter("ignore")
    mesh = case.dims.build("cpu")
    built = build(case.nodes, model_spec=case.spec(), dims=case.dims, mesh=mesh, **changes)
    facts = {
        "local": sum(p.to_local().numel() for p in built.model.parameters()), "masters": set(built.masters),
        "names": {name for name, _ in built.model.named_parameters()},
        "dtypes": {p.dtype for p in built.model.parameters()}, "change": built.changes["tp"],
    }
    return train(built, case, Env.from_environ("cpu")) | facts


def one_process(case: Case, **changes: Any) -> dict[str, Any]:
    nodes = {"fsdp": FSDP} if changes else {}
    return train(build(nodes, model_spec=case.spec(), **changes), case, Env.from_environ("cpu", environ={}))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_one_process(name: str) -> None:
    case = CASES[name]
    expected = one_process(case)
    for rank in run_ranks(on_mesh, case.dims.world_size, case, {}):
        assert rank["names"] == set(expected["initial"]), "a parameter was renamed"
        assert all(torch.equal(rank["initial"][n], value) for n, value in expected["initial"].items())
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-9, rel=0)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-8)
        for found, wanted in zip(rank["grads"], expected["grads"], strict=True):
            assert found.keys() == wanted.keys()
            for parameter, grad in wanted.items():
                assert (found[parameter] - grad).norm() <= 1e-8 * grad.norm(), parameter
    total = sum(value.numel() for value in expected["initial"].values())
    # norms and row biases are whole on every tp rank
    assert rank["local"] < 1.1 * total / (case.dims.tp * case.dims.dp_shard)


def test_bfloat16_weights_have_float32_masters_on_a_tp_only_mesh() -> None:
    case = Case(TP2, {"tp": TP, "fsdp": FSDP}, 2)
    expected, exact = one_process(case, **MIXED), one_process(case, **MIXED | {"compute_dtype": torch.float32})
    ranks = run_ranks(on_mesh, 2, case, MIXED)
    for rank in ranks:
        assert rank["dtypes"] == {torch.bfloat16}
        assert rank["masters"] == rank["names"]
        assert all(value.dtype == torch.float32 for value in (*rank["final"].values(), *rank["grads"][0].values()))
        assert rank["losses"] == pytest.approx(expected["losses"], rel=5e-3)
        assert all(torch.equal(rank["final"][n], value) for n, value in ranks[0]["final"].items()), "ranks drift apart"
        # as far from float32 as one process in bfloat16 is, and not much farther
        for name, grad in exact["grads"][0].items():
            error, usual = (got["grads"][0][name] - grad for got in (rank, expected))
            assert error.norm() < 2 * usual.norm() + 1e-3 * grad.norm(), name
    assert expected["losses"] != exact["losses"]


def save(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    built = build(case.nodes, model_spec=case.spec(), dims=case.dims, mesh=case.dims.build("cpu"))
    weights = dict(built.model.named_parameters())
    make(Path(path), env=Env.from_environ("cpu")).save(1, {"model": weights}, {"position": 0})
    return {name: whole(parameter) for name, parameter in weights.items()}


def load(rank: int, path: str, case: Case) -> dict[str, Tensor]:
    built = build(case.nodes, model_spec=case.spec(), dims=case.dims, mesh=case.dims.build("cpu"))
    weights = dict(built.model.named_parameters())
    with torch.no_grad():
        for parameter in weights.values():
            parameter.zero_()
    checkpoints = make(Path(path), env=Env.from_environ("cpu"))
    checkpoints.load(checkpoints.latest(), {"model": weights})
    return {name: whole(parameter) for name, parameter in weights.items()}


@pytest.mark.parametrize("name", ["fsdp2_tp2", "fsdp2_tp2, uneven"])
def test_checkpoints_of_fsdp2_tp2_are_read_by_one_process_and_by_tp2(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    saved = run_ranks(save, 4, str(tmp_path), case)[0]
    alone = dict(build({}, model_spec=case.spec()).model.named_parameters())
    with torch.no_grad():
        for parameter in alone.values():
            parameter.zero_()
    checkpoints = make(tmp_path)
    checkpoints.load(checkpoints.latest(), {"model": alone})
    assert alone.keys() == saved.keys()
    for found in (alone, *run_ranks(load, 2, str(tmp_path), replace(case, dims=TP2, nodes={"tp": TP}))):
        assert [n for n, value in saved.items() if not torch.equal(found[n], value)] == []


def forward(rank: int, case: Case, token: int) -> str:
    built = build(case.nodes, model_spec=case.spec(), dims=case.dims, mesh=case.dims.build("cpu"))
    tokens = torch.full((1, SEQ), 5)
    tokens[0, 3] = token
    with pytest.raises(DataError) as error:
        built.model(tokens, labels_BS=tokens, loss_fn=CrossEntropy(chunk_tokens=8))
    return error.value.message


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_no_rank_owns(token: int) -> None:
    message = f"token id {token} is outside the vocabulary of {VOCAB} ids"
    assert run_ranks(forward, 2, CASES["tp2"], token) == [message, message]


def test_the_change_names_what_is_split_and_what_is_whole() -> None:
    [rank, _] = run_ranks(on_mesh, 2, CASES["tp2"], {})
    assert rank["change"].summary == (
        "30 modules over tp(2), 9 norms replicated; vocabulary and loss by 48 ids, the residual stream by sequence"
    )
    assert len(rank["change"].modules) == 39 and "output" in rank["change"].modules


def replaced(rank: int) -> str:
    from titanyaml.models import decoder
    from titanyaml.plugins.tp import TensorParallel

    case = CASES["tp2"]
    model = decoder.build(case.spec())
    model.layers[1].attention.wq = torch.nn.Identity()
    with pytest.raises(PipelineError) as error:
        TensorParallel().apply(model, context(case.spec(), dims=case.dims, mesh=case.dims.build("cpu")))
    return error.value.problems[0].message


def test_a_layer_of_another_kind_is_not_left_whole_in_silence() -> None:
    message = "layers.1.attention.wq is a Identity, which cannot be split; only Linear can"
    assert run_ranks(replaced, 2) == [message, message]


def test_off_and_refused() -> None:
    assert resolve({"tp": TP}, context(spec())).off == {"tp": "parallel.tp is 1"}
    with pytest.raises(PipelineError) as error:
        resolve({"tp": TP}, context(spec(ffn_dim=55), dims=ParallelDims(tp=4), seq_len=18))
    assert [(problem.key, problem.hint) for problem in error.value.problems] == [
        ("model.num_kv_heads", "model.num_kv_heads=4"), ("model.ffn_dim", "model.ffn_dim=56"),
        ("model.vocab_size", "model.vocab_size=100"), ("train.seq_len", "train.seq_len=20"),
    ]
