"""Weights that FSDP gathers in float8 for own products: no bit differs, and no old copy is ever used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import make
from tests.plugins.quantized import FLOAT32, MIXED, SIZES, TENSORWISE, TP, node, sizes, whole
from tests.plugins.small import AC, COMPILE, FSDP, batch, build, context, loss
from tests.ranks import run_ranks
from titanyaml import optim
from titanyaml.config import schema
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.kernels.float8_gather import Float8Shards
from titanyaml.models import decoder
from titanyaml.pipeline.resolve import after_step, verify
from titanyaml.plugins.quant import Quantize

STEPS, WEIGHTS = 2, 7 * SIZES["num_layers"]
PLAIN = node(TENSORWISE, product="own")
GATHERED = {**PLAIN, "fsdp_float8_all_gather": True, "precompute_scale": True}
LATE = {**GATHERED, "precompute_scale": False}
FSDP2 = ParallelDims(dp_shard=2)


def of(built: Any) -> optim.AdamW:
    return optim.build(schema.Optim(), dict(built.model.named_parameters()), masters=built.masters, device="cpu")


def train(built: Any, microbatches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Losses of training and, in eager, of a validation after every step, and the last weights."""
    optimizer, losses, validation_losses, reports = of(built), [], [], []
    for number in range(STEPS):
        for tokens, labels in microbatches:
            value = loss(built.model, tokens, labels)
            (value / 100).backward()
            losses.append(value.item())
        optimizer.step(3e-3)
        optimizer.zero_grad()
        after_step(built.model, built.resolved)
        reports += verify(built.model, built.resolved, built.ctx) if number == 0 else []
        if "compile" not in built.changes:  # without gradients it would be one more graph
            with torch.no_grad():
                validation_losses.append(loss(built.model, *microbatches[0]).item())
    weights = {name: whole(optimizer.master(name)) for name in optimizer.names}
    return {
        "losses": losses,
        "seen": validation_losses,
        "weights": weights,
        "told": {name: change.summary for name, change in reports},
    }


def on_mesh(rank: int, dims: ParallelDims, changes: dict, forwards: int, pipelines: list) -> list[dict]:
    """The same training with each of some pipelines, and how often weights were cast."""
    results, mesh, inner = [], dims.build("cpu"), Float8Shards.cast
    tokens, labels = batch(forwards, dims.data_degree, 2)
    data_rank, calls = dims.data_rank(mesh), []
    Float8Shards.cast = lambda self, largest: calls.append(len(self.data)) or inner(self, largest)
    try:
        for nodes in pipelines:
            torch.compiler.reset()
            calls.clear()
            built = build({**nodes, "fsdp": FSDP}, model_spec=sizes(), dims=dims, mesh=mesh, **changes)
            got = train(built, [(tokens[i, data_rank], labels[i, data_rank]) for i in range(forwards)])
            results.append({**got, "casts": list(calls)})
        return results
    finally:
        Float8Shards.cast = inner


MESHES = {
    "fsdp2": (
        FSDP2,
        MIXED,
        [
            {"quant": PLAIN},
            {"quant": GATHERED},
            {"quant": LATE},
            {"quant": GATHERED, "ac": {**AC, "mode": "selective_op"}, "compile": COMPILE},
        ],
    ),
    "fsdp2_tp2": (ParallelDims(dp_shard=2, tp=2), FLOAT32, [{"quant": PLAIN, "tp": TP}, {"quant": GATHERED, "tp": TP}]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_gather_in_float8_changes_no_bit(mesh: str) -> None:
    """Of losses with two forwards a step and validations between them, and of weights; all are cast once a step."""
    dims, changes, pipelines = MESHES[mesh]
    for plain, *gathered in run_ranks(on_mesh, dims.world_size, dims, changes, 2, pipelines):
        for got in gathered:
            assert got["losses"] == plain["losses"]
            assert got["seen"] == plain["seen"] or not got["seen"]
            assert [n for n, w in plain["weights"].items() if not torch.equal(got["weights"][n], w)] == []
            # once before the first step, and after each
            assert (plain["casts"], got["casts"]) == ([], [WEIGHTS] * (STEPS + 1))
            assert got["told"]["quant"] == f"{WEIGHTS} weights were gathered in float8"
            assert got["told"].get("compile", "1 graph").startswith("1 graph")


def test_two_ranks_are_one_process_that_reads_their_batches_in_turn() -> None:
    tokens, labels = batch(1, 2, 2)
    alone = train(build({"quant": PLAIN}, model_spec=sizes(), **FLOAT32), list(zip(tokens[0], labels[0], strict=True)))
    ranks = [result for [result] in run_ranks(on_mesh, 2, FSDP2, FLOAT32, 1, [{"quant": GATHERED}])]
    for number in range(STEPS):
        assert [rank["losses"][number] for rank in ranks] == alone["losses"][2 * number : 2 * number + 2]
    assert [n for n, w in alone["weights"].items() if not torch.equal(ranks[0]["weights"][n], w)] == []


def written(rank: int, path: str) -> dict[str, list[float]]:
    """Validation losses after weights were written in every way but a step's, with and without float8 gathers."""
    losses_by_kind = {}
    for name, quant in {"plain": PLAIN, "gathered": GATHERED}.items():
        built = build(
            {"quant": quant, "fsdp": FSDP}, model_spec=sizes(), dims=FSDP2, mesh=FSDP2.build("cpu"), **FLOAT32
        )
        optimizer, tokens = of(built), batch(2)
        weights = {"model": optimizer.weights()}
        parameter, losses = built.model.layers[1].feed_forward.w2.weight, []

        def look(model: Any = built.model, losses_seen: list = losses, tokens: Any = tokens) -> None:
            with torch.no_grad():
                losses_seen.append(loss(model, *tokens).item())

        look()
        checkpoints = make(Path(path) / name, env=Env.from_environ("cpu"))
        checkpoints.save(1, weights, {"position": 0})
        with torch.no_grad():
            parameter.mul_(-3)
            look()
            weights["model"]["layers.1.feed_forward.w2.weight"].to_local().add_(0.1)
            look()
        for weight in built.model.parameters():
            weight.data.mul_(1.5)
        look()
        value = loss(built.model, *tokens)
        value.backward()
        optimizer.step(1e-2)  # and nobody is told
        optimizer.zero_grad()
        look()
        checkpoints.load(checkpoints.latest(), weights)
        optimizer.load(weights["model"])
        look()
        losses_by_kind[name] = losses
    return losses_by_kind


def test_no_old_copy_is_gathered_whoever_writes(tmp_path: Path) -> None:
    for losses in run_ranks(written, 2, str(tmp_path)):
        assert losses["gathered"] == losses["plain"]
        assert losses["plain"][-1] == losses["plain"][0] and len(set(losses["plain"])) == 5


def quantized(ranks: int, **changes: Any) -> tuple[Quantize, Any]:
    quantize = Quantize(recipe=TENSORWISE, emulate=True, product="own", fsdp_float8_all_gather=True)
    ctx = context(sizes(**changes), dims=ParallelDims(dp_shard=ranks), **MIXED)
    return quantize, quantize.apply(decoder.build(sizes(**changes)), ctx)[1].summary


def test_what_is_gathered_in_what_is_told() -> None:
    _, summary = quantized(2)
    assert (
        "; FSDP gathers 14 weights in float8, 1 byte a number, and all else in bfloat16; shards are cast by the "
        "first gather after an update and kept, 1 byte a number" in summary
    )
    _, summary = quantized(3, ffn_dim=96)
    assert "FSDP gathers 4 weights in float8, 1 byte a number, and layers.0.attention.wq (64 rows), " in summary
    assert "and 6 more, not a multiple of 3 ranks, and all else in bfloat16" in summary
    with pytest.raises(PipelineError, match="no weight divides by 3 ranks"):
        quantized(3)


def test_weights_that_were_not_gathered_in_float8_are_an_error() -> None:
    quantize, _ = quantized(2)
    with pytest.raises(PipelineError, match="0 of 14 weights were gathered in float8 in the first step"):
        quantize.verify(None, None)
