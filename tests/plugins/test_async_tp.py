"""Async tensor parallelism: which collectives of our own graphs are fused, and that nothing but speed changes."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.plugins import inductor_graphs
from tests.plugins.inductor_graphs import GRAPHS
from tests.plugins.parity import EVERYTHING, FULL, SELECTIVE, TP, VOCAB, WHOLE, Case, assert_equal, on_mesh, one_process
from tests.plugins.small import COMPILE, FSDP, Built, batch, build, context, loss, spec
from tests.ranks import run_ranks
from titanyaml.distributed import async_tp_times, compat, compat_compile, float8_reduce_scatter
from titanyaml.distributed.collective_places import CollectivePlace, block_places
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.distributed.tensor import TensorGroup, scatter_sum
from titanyaml.errors import PipelineError
from titanyaml.kernels import float8_linear
from titanyaml.pipeline.resolve import resolve, verify
from titanyaml.plugins.async_tp import AsyncTensorParallel
from titanyaml.plugins.quant import Quantize

ASYNC = {"_target_": "titanyaml.plugins.async_tp.AsyncTensorParallel"}
GRAPH = {**COMPILE, "backend": inductor_graphs.BACKEND}
TP2, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)
BFLOAT16 = {"param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ROWS_NEED = "this torch (2.11) has no float8 products with a scale a row on a CPU"
NO_PRODUCT = "what is scattered is no matrix product of this graph, and no sum of such alone"


def scales_rows() -> bool:
    a, ones = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        compat.scaled_mm(a, a.t(), ones, ones.t())
    except RuntimeError:
        return False
    return True


def compiles_float64() -> bool:
    """torch 2.11 takes the log-sum-exp of fused attention for float32."""
    with compat.fake_tensors():
        q = torch.ones(1, 1, 2, 8, dtype=torch.float64)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].dtype == q.dtype


@pytest.fixture(autouse=True)
def release_inductor() -> Iterator[None]:
    yield
    release()


def release() -> None:
    import torch._inductor.config as config

    config.post_grad_custom_pre_pass = None
    torch.compiler.reset()


def fused(forward: tuple[int, int], backward: tuple[int, int], left: str = "none") -> str:
    return (
        f"fused in the compiled graphs, forward + backward: {forward[0]} + {backward[0]} all-gathers, "
        f"{forward[1]} + {backward[1]} reduce-scatters; left as they are: {left}"
    )


def on_fake_ranks(
    nodes: dict[str, Any], *, sequences: int = 2, model: dict[str, Any] | None = None, hook: Any = None
) -> Built:
    """A forward and a backward on rank 0 of two that do not exist: its graphs are those of a real one.

    Args:
        hook: forward pre-hook of each feed-forward, which acts on what was gathered.
    """
    inductor_graphs.register()
    GRAPHS.clear()
    sizes = {"vocab_size": VOCAB, "num_layers": 2} | (model or {})
    built = build(
        {"tp": TP, "async_tp": ASYNC} | nodes, model_spec=spec(**sizes), dims=TP2, mesh=TP2.build("cpu"), **BFLOAT16
    )
    for layer in built.model.layers if hook else ():
        layer.feed_forward.register_forward_pre_hook(hook)
    tokens_BS, labels_BS = (part % VOCAB for part in batch(sequences))
    loss(built.model, tokens_BS, labels_BS).backward()
    return built


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
        assert graph["reduce_scatter_tensor"] == sum(where == side for where, _ in left)
    reasons = [f"1 {kind} {side}: {reason}" for (side, kind), reason in left.items()]
    assert change.summary == fused(forward, backward, "; ".join(reasons) or "none")


def test_only_what_was_asked_for_is_fused() -> None:
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH, "async_tp": {**ASYNC, "operators": ["all_gather"]}})
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert [graph["fused_all_gather_matmul"] for graph in GRAPHS] == [2, 2]
    assert [graph["reduce_scatter_tensor"] for graph in GRAPHS] == [2, 2]
    left = [f"2 reduce-scatters {side}: not in compile.async_tp_ops" for side in ("backward", "forward")]
    assert change.summary == (
        f"fused in the compiled graphs, forward + backward: 2 + 2 all-gathers; left as they are: {'; '.join(left)}"
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


AUTO = {**ASYNC, "operators": ["auto"]}
SLOWER = "measured slower when fused"


def clocked(monkeypatch, wins: Callable[[CollectivePlace], bool]) -> list[CollectivePlace]:
    """A clock that says of each place, apart and fused, what ``wins`` wants; the places that it is asked about."""
    asked, calls = [], async_tp_times.calls

    def told(place, group, **options):
        asked.append(place)
        assert all(map(callable, calls(place, group, **options)))
        return 1.0, 0.5 if wins(place) else 0.99  # less than the margin

    monkeypatch.setattr(async_tp_times, "calls", told)
    monkeypatch.setattr(AsyncTensorParallel, "clock", staticmethod(lambda milliseconds: milliseconds))
    return asked


def test_auto_fuses_what_was_measured_to_gain(monkeypatch, tmp_path) -> None:
    """Gathers alone, where recomputation repeats some of their products; then from the file, with another clock."""
    asked = clocked(monkeypatch, lambda place: place.kind == "all_gather")
    for again in (False, True):
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
        told = built.changes["async_tp"].summary
        assert "all_gather 32x32 to 8+8+16 1.000 ms, fused 0.500: fused" in told
        assert "reduce_scatter 32x56 to 32 1.000 ms, fused 0.990: left" in told
        assert bool(asked) is not again
        asked = clocked(monkeypatch, lambda place: False)
    (key,) = json.loads((tmp_path / "async_tp.json").read_text())
    assert key == f"torch {torch.__version__}; cpu; torch.bfloat16; tp 2; 2 sequences; 2 ranks"


def test_auto_leaves_a_sum_alone_that_would_lose(monkeypatch) -> None:
    """Its products are not put side by side either. One place wins, so that it is no error."""
    clocked(monkeypatch, lambda place: place.kind == "reduce_scatter" and place.inner == 28)  # down
    with compat.fake_process_group(2):
        built = on_fake_ranks({"compile": GRAPH, "async_tp": AUTO})
        verify(built.model, built.resolved, built.ctx)
    assert [graph["fused_matmul_reduce_scatter"] for graph in GRAPHS] == [1, 0]
    assert [graph["mm"] for graph in GRAPHS] == [6, 14]


def test_auto_that_wins_nowhere_says_so_loudly(monkeypatch, caplog) -> None:
    clocked(monkeypatch, lambda place: False)
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
    places = block_places(16, 12, [(8, 4)], [6])
    for place in places:
        torch.manual_seed(0)
        apart, together = (
            call() for call in async_tp_times.calls(place, group, batch=2, dtype=torch.float64, device=cpu)
        )
        together = [together] if isinstance(together, torch.Tensor) else together
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(apart, together, strict=True))
    times = async_tp_times.measure(
        places,
        group,
        batch=2,
        dtype=torch.float64,
        device=cpu,
        cache=Path(folder) / "times.json",
        clock=lambda call: 1.0 + rank,
    )
    return [(str(place), time.apart, time.fused) for place, time in times.items()]


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


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"])
def test_float8_layers_cast_between_the_gather_and_the_product(recipe: str) -> None:
    """Emulated: so no gather is fused, which is an error, and of the scatters those of the backward pass."""
    quant = {"_target_": "titanyaml.plugins.quant.Quantize", "recipe": recipe, "emulate": True}
    sizes = {"dim": 64, "ffn_dim": 64, "num_kv_heads": 4}
    with compat.fake_process_group(2):
        built = on_fake_ranks({"quant": quant, "compile": GRAPH}, model=sizes)
        with pytest.raises(PipelineError, match="no all-gather was fused") as error:
            verify(built.model, built.resolved, built.ctx)
    assert error.value.problems[0].hint == "compile.async_tp_ops=[reduce_scatter] or compile.async_tp=false"
    assert [graph["fused_matmul_reduce_scatter"] for graph in GRAPHS] == [0, 2]
    assert [graph["all_gather_into_tensor"] for graph in GRAPHS] == [2, 2]


SMALLEST = {"dim": 64, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 128}  # sides of 16 on a rank


def multiply_float8(monkeypatch) -> None:
    """Own products as a GPU has them: in the graph, and with a CPU's kernel in place of a GPU's."""
    monkeypatch.setattr(Quantize, "check", lambda self, ctx: [])
    monkeypatch.setattr(
        float8_linear,
        "_multiply",
        lambda a, inverse_a, b, inverse_b, *, fast_accum, dtype: compat.scaled_mm(
            a, b.t(), inverse_a, inverse_b.t(), fast_accum=fast_accum, dtype=dtype
        ),
    )


def own(recipe: str) -> dict[str, Any]:
    return {"_target_": "titanyaml.plugins.quant.Quantize", "recipe": recipe, "product": "own"}


@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"])
@pytest.mark.parametrize("ac", [None, SELECTIVE, FULL], ids=["none", "selective_op", "full"])
def test_scatters_behind_float8_products_are_fused(recipe: str, ac, monkeypatch) -> None:
    if recipe != "float8_tensorwise" and not scales_rows():
        pytest.skip(ROWS_NEED)
    multiply_float8(monkeypatch)
    nodes = {"quant": own(recipe), "compile": GRAPH, "async_tp": {**ASYNC, "operators": ["reduce_scatter"]}}
    with compat.fake_process_group(2):
        built = on_fake_ranks(nodes | ({"ac": ac} if ac else {}), model=SMALLEST)
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    again = ac is FULL  # recomputes one of the forward's
    assert change.summary.startswith(
        f"fused in the compiled graphs, forward + backward: 2 + {2 + again} reduce-scatters; left as they are: "
    )
    assert "reduce-scatter" not in change.summary.partition("left as they are")[2]
    assert [graph["float8_matmul_exchange"] for graph in GRAPHS] == [2, 2 + again]


def test_auto_times_scatters_behind_float8_products(monkeypatch) -> None:
    multiply_float8(monkeypatch)
    asked = clocked(monkeypatch, lambda place: place.float8 and place.inner == 64)  # down
    with compat.fake_process_group(2):
        built = on_fake_ranks({"quant": own("float8_tensorwise"), "compile": GRAPH, "async_tp": AUTO}, model=SMALLEST)
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert [str(place) for place in asked] == [
        "reduce_scatter 32x32 to 64 float8",
        "reduce_scatter 32x64 to 64 float8",
        "reduce_scatter 32x96 to 64 float8",
        "reduce_scatter 32x128 to 64 float8",
    ]
    assert [graph["float8_matmul_exchange"] for graph in GRAPHS] == [1, 0]
    assert f"2 reduce-scatters backward: {SLOWER}; " in change.summary


def scattered(rank: int, batch: int, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum of two float8 products, scattered by the fused operator and one step after the other."""
    group = TensorGroup.of(TP2.build("cpu")["tp"])
    tokens, dim, lefts, rights, left_scales, right_scales = batch * 32, 48, [], [], [], []
    for number, inner in enumerate((16, 32)):
        torch.manual_seed(10 * rank + number)
        lefts.append(torch.randn(tokens, inner).to(torch.float8_e4m3fn))
        rights.append(torch.randn(dim, inner).to(torch.float8_e4m3fn).t())
        left_scales.append(torch.rand(tokens, 1) + 0.5 if rowwise else torch.tensor(0.5 + number))
        right_scales.append(torch.rand(1, dim) + 0.5 if rowwise else torch.tensor(2.0))
    whole = sum(
        (left.float() * scale) @ (right.float() * other)
        for left, right, scale, other in zip(lefts, rights, left_scales, right_scales, strict=True)
    )
    expected = scatter_sum(whole.view(batch, -1, dim), group)
    found = float8_reduce_scatter.operator(
        lefts, rights, left_scales, right_scales, batch, False, torch.float32, 2, group.name
    ).sum(0)
    return found, expected


@pytest.mark.parametrize(("batch", "rowwise"), [(1, False), (2, False), (3, True)])
def test_float8_products_and_their_scatter(batch: int, rowwise: bool) -> None:
    if rowwise and not scales_rows():
        pytest.skip(ROWS_NEED)
    for found, expected in run_ranks(scattered, 2, batch, rowwise):
        assert found.shape == expected.shape == (batch, 16, 48)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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
    done = fusions() - before
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] - hits
    return results | {"fused": dict(done.fused), "left": dict(done.unfused), "hits": hits}


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
