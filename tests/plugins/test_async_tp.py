"""Async tensor parallelism: which collectives of our own graphs are fused, and that nothing but speed changes."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.plugins import inductor_graphs
from tests.plugins.async_tp_cases import (
    ASYNC,
    AUTO,
    FSDP2_TP2,
    GRAPH,
    NO_PRODUCT,
    SLOWER,
    TP2,
    clocked,
    compiles_float64,
    fused,
    on_fake_ranks,
    release,
)
from tests.plugins.async_tp_cases import release_inductor as release_inductor  # a fixture of every test
from tests.plugins.inductor_graphs import GRAPHS
from tests.plugins.parity import EVERYTHING, FULL, SELECTIVE, TP, VOCAB, WHOLE, Case, assert_equal, on_mesh, one_process
from tests.plugins.small import COMPILE, FSDP, build, context, spec
from tests.ranks import run_ranks
from titanyaml.distributed import async_tp_times, compat, compat_compile
from titanyaml.distributed.graph_matmuls import block_places
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError
from titanyaml.pipeline.resolve import resolve, verify


@pytest.mark.parametrize(
    ("nodes", "sequences", "model", "forward", "backward", "left"),
    [
        ({}, 1, {}, (2, 2), (2, 2), {}),
        ({}, 2, EVERYTHING, (2, 2), (2, 2), {}),
        ({"ac": FULL}, 2, {}, (2, 2), (4, 3), {}),
        ({"ac": SELECTIVE}, 2, {}, (2, 2), (4, 2), {}),  # checkpointing keeps what was scattered
    ],
    ids=["one sequence", "everything", "full", "selective_op"],
)
def test_what_is_fused_in_a_block(nodes, sequences, model, forward, backward, left) -> None:
    model = {name: value for name, value in model.items() if name != "document_mask"}
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH} | nodes, sequences=sequences, model=model)
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert len(GRAPHS) == 2, "equal blocks share one graph each way"
    for graph, (gathers, scatters), side in zip(GRAPHS, (forward, backward), ("forward", "backward"), strict=True):
        assert graph["fused_all_gather_matmul"] == gathers
        assert graph["fused_matmul_reduce_scatter"] == scatters
        assert graph["all_gather_into_tensor"] == 0
        assert graph["reduce_scatter_tensor"] == sum(unfused_side == side for unfused_side, _ in left)
    reasons = [f"1 {kind} {side}: {reason}" for (side, kind), reason in left.items()]
    assert change.summary == fused(forward, backward, "; ".join(reasons) or "none")


def test_only_what_was_asked_for_is_fused() -> None:
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH, "async_tp": {**ASYNC, "operators": ["all_gather"]}})
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert [graph["fused_all_gather_matmul"] for graph in GRAPHS] == [2, 2]
    assert [graph["reduce_scatter_tensor"] for graph in GRAPHS] == [2, 2]
    unfused = [f"2 reduce-scatters {side}: not in compile.async_tp_ops" for side in ("backward", "forward")]
    assert change.summary == (
        f"fused in the compiled graphs, forward + backward: 2 + 2 all-gathers; left as they are: {'; '.join(unfused)}"
    )


def test_a_budget_of_recomputation_and_fusions() -> None:
    """The partitioner measures what enters a graph, process groups too."""
    try:
        with compat.fake_process_group(2):
            built = on_fake_ranks({"compile": GRAPH, "ac": {**FULL, "mode": "memory_budget", "budget": 0.5}})
            changes = dict(verify(built.model, built.resolved, built.ctx))
    finally:
        compat_compile.set_activation_memory_budget(1.0)
    assert changes["ac"].summary == "graphs were compiled under a budget of 0.5"
    assert changes["async_tp"].summary.startswith("fused in the compiled graphs, forward + backward: 2 + ")


def test_auto_fuses_what_was_measured_to_gain(monkeypatch, tmp_path) -> None:
    """Gathers alone, where recomputation repeats some of their products; then from the file, with another clock."""
    timed = clocked(monkeypatch, lambda collective: collective.kind == "all_gather")
    for is_cached in (False, True):
        with compat.fake_process_group(2):
            built = on_fake_ranks({"compile": GRAPH, "ac": SELECTIVE, "async_tp": {**AUTO, "cache_dir": str(tmp_path)}})
            change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
        release()
        assert [graph["fused_all_gather_matmul"] for graph in GRAPHS] == [2, 4]
        assert [graph["reduce_scatter_tensor"] for graph in GRAPHS] == [2, 2]
        assert change.summary == (
            "fused in the compiled graphs, forward + backward: 2 + 4 all-gathers, 0 + 0 "
            f"reduce-scatters; left as they are: 2 reduce-scatters backward: {SLOWER}; "
            f"2 reduce-scatters forward: {SLOWER}"
        )
        summary = built.changes["async_tp"].summary
        assert "all_gather 32x32 to 8+8+16 1.000 ms, fused 0.500: fused" in summary
        assert "reduce_scatter 32x56 to 32 1.000 ms, fused 0.990: left" in summary
        assert bool(timed) is not is_cached
        timed = clocked(monkeypatch, lambda collective: False)
    (key,) = json.loads((tmp_path / "async_tp.json").read_text())
    assert key == f"torch {torch.__version__}; cpu; torch.bfloat16; tp 2; 2 sequences; 2 ranks"


def test_auto_leaves_a_sum_alone_that_would_lose(monkeypatch) -> None:
    """Its products are not put side by side either. One place wins, so that it is no error."""
    clocked(monkeypatch, lambda collective: collective.kind == "reduce_scatter" and collective.inner == 28)  # down
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH, "async_tp": AUTO})
        verify(built.model, built.resolved, built.ctx)
    assert [graph["fused_matmul_reduce_scatter"] for graph in GRAPHS] == [1, 0]
    assert [graph["mm"] for graph in GRAPHS] == [6, 14]


def test_auto_that_wins_nowhere_says_so_loudly(monkeypatch, caplog) -> None:
    clocked(monkeypatch, lambda collective: False)
    with compat.fake_process_group(2), caplog.at_level("WARNING"):
        built = on_fake_ranks({"compile": GRAPH, "async_tp": AUTO})
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert change.summary.startswith("NOTHING was fused, since every place was measured slower so; ")
    assert "fuses NOTHING" in caplog.text
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": COMPILE, "async_tp": AUTO})  # a backend that knows nothing of it
        with pytest.raises(PipelineError, match="was fused"):
            verify(built.model, built.resolved, built.ctx)


def test_auto_without_a_gpu_fuses_all() -> None:
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH, "async_tp": AUTO})
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert "all of them, since nothing was measured" in built.changes["async_tp"].summary
    assert change.summary == fused((2, 2), (2, 2))


def timed_apart(rank: int, folder: str) -> list[tuple[str, float, float]]:
    """Times of a rank that is as slow as its number; and that both ways of a place give the same."""
    mesh, cpu = TP2.build("cpu"), torch.device("cpu")
    group = TensorGroup.of(mesh["tp"])
    compat_async_tp = importlib.import_module("titanyaml.distributed.compat_async_tp")
    compat_async_tp.register_cpu_kernels()
    collectives = block_places(16, 12, [(8, 4)], [6])
    for collective in collectives:
        torch.manual_seed(0)
        apart, together = (
            call() for call in async_tp_times.calls(collective, group, batch=2, dtype=torch.float64, device=cpu)
        )
        together = [together] if isinstance(together, torch.Tensor) else together
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(apart, together, strict=True))
    times = async_tp_times.measure(
        collectives,
        group,
        batch=2,
        dtype=torch.float64,
        device=cpu,
        cache=Path(folder) / "times.json",
        clock=lambda call: 1.0 + rank,
    )
    return [(str(collective), time.apart, time.fused) for collective, time in times.items()]


def test_all_ranks_see_the_slowest_rank(tmp_path) -> None:
    first, second = run_ranks(timed_apart, 2, str(tmp_path))
    assert first == second
    assert {row[1:] for row in first} == {(2.0, 2.0)}
    assert [row[0] for row in first] == [
        "all_gather 16x12 to 4",
        "all_gather 16x12 to 4+8",
        "all_gather 16x12 to 6",
        "all_gather 16x12 to 8",
        "reduce_scatter 16x6 to 12",
        "reduce_scatter 16x12 to 12",
    ]


def test_a_check_says_what_will_be_done() -> None:
    with compat.fake_process_group(2):
        nodes = {"tp": TP, "async_tp": ASYNC, "compile": {**GRAPH, "backend": "inductor"}}
        built = build(nodes, model_spec=spec(vocab_size=VOCAB), dims=TP2, mesh=TP2.build("cpu"))
    assert built.changes["async_tp"].summary == (
        "all-gathers and reduce-scatters of tp(2) will be fused with matrix products when the blocks are compiled; "
        "without a GPU this checks function and gains no speed"
    )
    assert list(built.changes) == ["tp", "async_tp", "compile"]


@pytest.mark.parametrize(
    ("nodes", "hints"),
    [
        (
            {"compile": COMPILE},
            [
                "compile.async_tp_ops=[reduce_scatter] or compile.async_tp=false",
                "compile.async_tp_ops=[all_gather] or compile.async_tp=false",
            ],
        ),
        (
            {"compile": GRAPH, "tp": WHOLE, "async_tp": {**ASYNC, "operators": ["all_gather"]}},
            ["compile.async_tp=false"],
        ),
    ],
    ids=["another backend", "no sequence parallelism"],
)
def test_nothing_fused_is_an_error(nodes, hints) -> None:
    with compat.fake_process_group(2):
        built = on_fake_ranks(nodes)
        with pytest.raises(PipelineError) as error:
            verify(built.model, built.resolved, built.ctx)
    assert [problem.hint for problem in error.value.problems] == hints
    assert "was fused (no compiled graph holds one; compile.backend=inductor" in error.value.problems[0].message


def test_a_transfer_that_nothing_multiplies_is_told() -> None:
    """Something stands between the gather and the products: named, not hidden."""

    def scale(module, args):
        return (args[0] * 2,)

    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH}, hook=scale)
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert change.summary == fused(
        (1, 2),
        (2, 1),
        (
            f"1 reduce-scatter backward: {NO_PRODUCT}; "
            "1 all-gather forward: no matrix product takes the gathered tensor as its left side"
        ),
    )


def trained(rank: int, case: Case, cache: str) -> dict[str, Any]:
    """What ``on_mesh`` returns; what was fused and left by (side, kind); graphs that came out of Inductor's cache."""
    from titanyaml.distributed.compat_async_tp import fusions

    inductor_graphs.register()
    environment, before = os.environ.copy(), fusions()
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    try:
        results = on_mesh(rank, case, {})
    finally:
        release()
        os.environ.clear()
        os.environ.update(environment)
    counts = fusions() - before
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] - hits
    return results | {"fused": dict(counts.fused), "left": dict(counts.unfused), "hits": hits}


def test_losses_and_gradients_equal_one_process(tmp_path) -> None:
    """float64; both ranks of a tp group and both tp groups of FSDP, biases and full recomputation in the graphs."""
    nodes = {"tp": TP, "async_tp": ASYNC, "ac": FULL, "compile": GRAPH, "fsdp": FSDP}
    case = Case(FSDP2_TP2, nodes, 1, EVERYTHING)
    expected = one_process(case)
    for rank in run_ranks(trained, 4, case, str(tmp_path)):
        assert_equal(rank, expected)
        assert rank["fused"] == {
            ("forward", "all_gather"): 2,
            ("forward", "reduce_scatter"): 2,
            ("backward", "all_gather"): 4,
            ("backward", "reduce_scatter"): 3,
        }
        assert rank["left"] == {}


@pytest.mark.skipif(not compiles_float64(), reason="this torch (2.11) compiles no float64 attention")
def test_with_inductor_and_from_its_cache(tmp_path) -> None:
    """What was fused is known too where the graph comes out of the cache and no pass has run."""
    case = Case(TP2, {"tp": TP, "async_tp": ASYNC, "compile": {**COMPILE, "backend": "inductor"}})
    expected = one_process(case)
    for hits in (0, 2):
        for rank in run_ranks(trained, 2, case, str(tmp_path)):
            assert_equal(rank, expected)
            assert rank["fused"] == dict.fromkeys(
                ((side, kind) for side in ("forward", "backward") for kind in ("all_gather", "reduce_scatter")), 2
            )
            assert (rank["left"], rank["hits"]) == ({}, hits)


def test_a_sum_that_is_used_elsewhere_stays() -> None:
    """Its value is needed by itself, so that one product in its place would have to be made besides."""
    from titanyaml.distributed import graph_matmuls

    def scattered_sums(group: str):
        def body(a, b, c, d):
            total = (a @ b).view(2, 3, 5) + (c @ d).view(2, 3, 5)
            return [compat.reduce_scatter(sum, 2, group) for sum in (total, total + (a @ b).view(2, 3, 5))]

        return make_fx(body, tracing_mode="fake")(*(torch.ones(*shape) for shape in ((6, 4), (4, 5), (6, 7), (7, 5))))

    with compat.fake_process_group(2):
        graph = scattered_sums(TP2.build("cpu").get_group("tp").group_name).graph
    mm, scatter = torch.ops.aten.mm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default
    first, second = graph.find_nodes(op="call_function", target=scatter)
    graph_matmuls.merge_summed_matmuls(second)
    assert len(graph.find_nodes(op="call_function", target=mm)) == 3, "a part of the second sum is the first"
    assert graph_matmuls.scattered_tensor(first).target is torch.ops.aten.add.Tensor


def test_off_and_refused(monkeypatch) -> None:
    from titanyaml.distributed.compat_async_tp import fuse_collectives

    ctx = context(spec(vocab_size=VOCAB), dims=TP2)
    assert resolve({"async_tp": {**ASYNC, "enabled": False}}, ctx).off == {"async_tp": "compile.async_tp is false"}
    unknown = {**ASYNC, "operators": ["all_reduce"]}
    with pytest.raises(PipelineError) as error:
        resolve({"tp": TP, "async_tp": unknown, "compile": {**COMPILE, "mode": "auto"}}, ctx)
    needs, unknown = error.value.problems
    assert "needs the node 'compile', which is off: compile.mode is auto" in needs.message
    assert unknown.key == "compile.async_tp_ops"
    assert unknown.allowed == "some of all_gather, reduce_scatter; or auto alone"
    with pytest.raises(PipelineError, match="pipeline.plugins.async_tp: is off, but compile.async_tp is true"):
        resolve({"tp": TP, "compile": {**COMPILE, "async_tp": True}}, ctx)
    with monkeypatch.context() as patch:
        patch.delattr("torch._inductor.fx_passes.micro_pipeline_tp.fuse_matmul_reduce_scatter")
        with pytest.raises(RuntimeError, match="micro_pipeline_tp.fuse_matmul_reduce_scatter"):
            fuse_collectives("0", ("all_gather",), device_type="cpu")
    torch._inductor.config.post_grad_custom_pre_pass = lambda graph: None
    with pytest.raises(RuntimeError, match="already in use"):
        fuse_collectives("0", ("all_gather",), device_type="cpu")
