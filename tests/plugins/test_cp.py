"""What context parallelism cuts and refuses, and that documents do not see each other; parity is in test_parity.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.plugins import inductor_graphs
from tests.plugins.parity import SELECTIVE, cp
from tests.plugins.small import COMPILE, SEQ, VOCAB, batch, build, context, loss, spec
from tests.ranks import run_ranks
from titanyaml.distributed import compat
from titanyaml.distributed.context_parallel import even_positions, head_tail_positions
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.models import decoder
from titanyaml.pipeline.resolve import resolve
from titanyaml.plugins.cp import ContextParallel

CP2 = ParallelDims(cp=2)


def logits(rank: int, method: str, changed: bool) -> tuple[Tensor, Tensor, str]:
    """Positions of this rank, their logits, and the plugin's summary."""
    mesh = CP2.build("cpu")
    built = build({"cp": cp(method)}, model_spec=spec(document_mask=True), dims=CP2, mesh=mesh)
    tokens, documents = torch.arange(SEQ).unsqueeze(0) * 5 % VOCAB, torch.zeros(1, SEQ, dtype=torch.int64)
    documents[0, 7:] = 1
    if changed:
        tokens[0, 2:5] = 90
    choose = even_positions if method == "ulysses" else head_tail_positions
    with torch.no_grad():
        out = built.model(tokens, documents_BS=documents, loss_fn=lambda hidden, weight, _: F.linear(hidden, weight))
    positions = choose(SEQ, rank=rank, size=2, device=tokens.device)
    return positions, out[0], built.changes["cp"].summary


@pytest.mark.parametrize("method", ["allgather", "ulysses"])
def test_a_document_does_not_see_another(method: str) -> None:
    for before, after in zip(run_ranks(logits, 2, method, False), run_ranks(logits, 2, method, True), strict=True):
        positions, first, summary = before
        moved = (first != after[1]).any(-1)
        assert torch.equal(positions[moved], positions[(positions >= 2) & (positions < 7)])
    runs = {
        "allgather": "plain kernels; each rank holds 8 of 16 positions, a head and a tail run",
        "ulysses": "the usual attention kernel; each rank holds 8 of 16 positions, one run",
    }
    assert summary == f"4 attentions over cp(2) by {method}, {runs[method]}"


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("allgather", {"context_attention": 1}, {"context_attention_backward": 1}),
        ("ulysses", {"all_to_all_single": 2}, {"all_to_all_single": 2}),
    ],
)
def test_selective_recomputation_repeats_no_transfer(method: str, forward: dict, backward: dict) -> None:
    inductor_graphs.register()
    inductor_graphs.GRAPHS.clear()
    nodes = {"cp": cp(method), "ac": SELECTIVE, "compile": {**COMPILE, "backend": inductor_graphs.BACKEND}}
    with compat.fake_process_group(2):
        built = build(nodes, model_spec=spec(num_layers=1), dims=CP2, mesh=CP2.build("cpu"))
        loss(built.model, *batch(2)).backward()
    torch.compiler.reset()
    for graph, expected in zip(inductor_graphs.GRAPHS, (forward, backward), strict=True):
        transfers = {
            name: count
            for name, count in graph.items()
            if name.startswith("context_attention") or name in ("all_to_all_single", "all_gather_into_tensor")
        }
        assert transfers == expected


def refused(rank: int, method: str) -> str:
    mesh, ctx_spec = CP2.build("cpu"), spec(document_mask=method == "ring")
    ctx = context(ctx_spec, dims=CP2, mesh=mesh)
    model = decoder.build(ctx_spec)
    if method == "ring":
        model = build({"cp": cp(method)}, model_spec=ctx_spec, dims=CP2, mesh=mesh).model
        ids = torch.zeros(1, SEQ, dtype=torch.int64)
        with pytest.raises(PipelineError) as error:
            model(ids, documents_BS=ids)
    else:
        model.layers[1].attention = nn.Identity()
        with pytest.raises(PipelineError) as error:
            ContextParallel(method=method).apply(model, ctx)
    return error.value.problems[0].message


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ring", "ring takes no mask"),
        ("allgather", "layers.1.attention is a Identity, which cannot be split; only Attention can"),
    ],
)
def test_what_cannot_be_split_is_refused(method: str, message: str) -> None:
    assert run_ranks(refused, 2, method) == [message] * 2


def test_off_and_refused_before_a_rank_starts() -> None:
    assert resolve({"cp": cp("ring")}, context(spec())).off == {"cp": "parallel.cp is 1"}
    for method, changes, key, hint in [
        ("striped", {}, "parallel.cp_method", ""),
        ("ring", {"seq_len": 18}, "train.seq_len", "train.seq_len=16 or train.seq_len=24"),
        (
            "ulysses",
            {},
            "parallel.cp_method",
            "parallel.cp_method=allgather or parallel.cp_method=ring or parallel.cp=2",
        ),
    ]:
        with pytest.raises(PipelineError) as error:
            resolve({"cp": cp(method)}, context(spec(), dims=ParallelDims(cp=4), **changes))
        [problem] = error.value.problems
        assert (problem.key, problem.hint) == (key, hint)
