"""Compilation changes speed, and nothing else; whatever is not compiled as asked is an error."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.runtime import cache_dir_utils

from tests.plugins import inductor_graphs
from tests.plugins.small import AC, COMPILE, LAYERS, batch, build, context, spec, step
from titanyaml.config.rules.compile import BACKENDS, DEBUGGING
from titanyaml.distributed import compat_compile
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.loss import CrossEntropy
from titanyaml.pipeline.resolve import resolve, verify

OPERATORS: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(side):
    def compiler(graph, example_inputs):
        for node in graph.graph.nodes:
            # attention is a random operator to torch, so its recomputation is an argument of "run with this rng state"
            for target in (node.target, *node.args):
                if isinstance(target, torch._ops.OpOverload):
                    OPERATORS[side][target.overloadpacket.__name__] += 1
        return make_boxed_func(graph)

    return compiler


@pytest.fixture(scope="module")
def counting_backend():
    """A backend that records the operators of the graphs that inductor would get."""
    torch._dynamo.register_backend(
        aot_autograd(
            fw_compiler=counting("forward"),
            bw_compiler=counting("backward"),
            partition_fn=min_cut_rematerialization_partition,
        ),
        "count_operators",
    )
    return "count_operators"


def nodes(mode, *, backend="aot_eager", ac="none"):
    return {"ac": {**AC, "mode": ac}, "compile": {**COMPILE, "mode": mode, "backend": backend}}


def relative(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert grads.keys() == expected.keys()
    return max(((grads[name] - expected[name]).norm() / expected[name].norm()).item() for name in grads)


@pytest.mark.parametrize("mode", ["block", "model"])
@pytest.mark.parametrize("ac", ["none", "full", "selective_op"])
def test_loss_and_gradients_equal_eager(mode, ac):
    plain, plain_grads = step(build({}).model)
    built = build(nodes(mode, ac=ac))
    value, grads = step(built.model)
    assert value.item() == pytest.approx(plain.item(), rel=1e-14)
    assert relative(grads, plain_grads) < 1e-13
    summary = dict(verify(built.model, built.resolved, built.ctx))["compile"].summary
    assert summary == "1 graph compiled, 0 graph breaks", "equal blocks share one graph"


def test_inductor_equals_eager():
    def built(pipeline, *, layers=LAYERS):
        return build(
            pipeline,
            model_spec=spec(num_layers=layers),
            param_dtype=torch.float32,
            compute_dtype=torch.float32,
            reduce_dtype=torch.float32,
        ).model

    plain, plain_grads = step(built({}))
    value, grads = step(built(nodes("block", backend="inductor", ac="full")))
    assert value.item() == pytest.approx(plain.item(), rel=1e-6)
    assert relative(grads, plain_grads) < 1e-5
    torch._dynamo.reset()
    step(built(nodes("block", backend="inductor", ac="full")))  # torch 2.11: a symbol's name is another one, then stays
    torch._dynamo.reset()
    earlier = compat_compile.compile_counts()
    step(built(nodes("block", backend="inductor", ac="full"), layers=2 * LAYERS))
    counts = compat_compile.compile_counts() - earlier
    assert (counts.graphs, counts.built, counts.cached) == (1, 0, 2), "twice as many blocks, and nothing is built anew"


@pytest.mark.parametrize(("ac", "products", "attention"), [("none", 0, 0), ("full", 6, 1), ("selective_op", 3, 0)])
def test_checkpointing_survives_compilation(counting_backend, ac, products, attention):
    for counter in OPERATORS.values():
        counter.clear()
    step(build(nodes("block", backend=counting_backend, ac=ac)).model)
    assert OPERATORS["forward"]["mm"] == 7
    assert OPERATORS["backward"]["mm"] == 2 * 7 + products
    assert OPERATORS["backward"]["_scaled_dot_product_flash_attention_for_cpu"] == attention


def test_blocks_that_keep_the_same_products_share_a_graph(counting_backend):
    plain, plain_grads = step(build({}).model)
    for counter in OPERATORS.values():
        counter.clear()
    pipeline = nodes("block", backend=counting_backend)
    built = build({**pipeline, "ac": {**AC, "mode": "selective_op", "keep_products": 0.75}})
    value, grads = step(built.model)
    assert value.item() == pytest.approx(plain.item(), rel=1e-14) and relative(grads, plain_grads) < 1e-13
    assert OPERATORS["backward"]["mm"] == 2 * 2 * 7 + 3, "one graph repeats every second product, the other none"
    assert OPERATORS["backward"]["_scaled_dot_product_flash_attention_for_cpu"] == 0
    assert dict(verify(built.model, built.resolved, built.ctx))["compile"].summary.startswith("2 graphs compiled")


@pytest.fixture
def budget():
    yield
    compat_compile.set_activation_memory_budget(1.0)


def test_a_memory_budget_recomputes_more_the_less_it_allows(counting_backend, budget):
    plain, plain_grads = step(build({}).model)
    products = []
    for share in (0.9, 0.4, 0.0):
        torch._dynamo.reset()
        for counter in OPERATORS.values():
            counter.clear()
        pipeline = nodes("block", backend=counting_backend)
        built = build({**pipeline, "ac": {**AC, "mode": "memory_budget", "budget": share}})
        value, grads = step(built.model)
        assert value.item() == pytest.approx(plain.item(), rel=1e-14)
        assert relative(grads, plain_grads) < 1e-13
        assert f"a budget of {share:g}" in dict(verify(built.model, built.resolved, built.ctx))["ac"].summary
        products.append(OPERATORS["backward"]["mm"] - 2 * 7)
    assert products == sorted(products) and products[0] == 0 and products[-1] >= 6
    compat_compile.set_activation_memory_budget(0.5)
    with pytest.raises(PipelineError, match="another budget"):
        verify(built.model, built.resolved, built.ctx)


def test_inductor_keeps_the_sums_of_two_norms_apart(monkeypatch):
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.scheduler import MixOrderReduction
    from torch._inductor.virtualized import V

    from titanyaml.distributed import compat_inductor

    assert V.choices is not None  # a thread that has compiled before has its choices
    with config.patch(inductor_choices_class=None):
        compat_inductor.keep_row_sums_apart()
        assert config.inductor_choices_class is compat_inductor.SeparateRowSums
    assert isinstance(V.choices, compat_inductor.SeparateRowSums) and V.choices.uuid()
    monkeypatch.setattr(InductorChoices, "can_fuse_horizontal", staticmethod(lambda *_: "asked"))
    monkeypatch.setattr(MixOrderReduction, "is_split_reduction", staticmethod(lambda node: node == "sum"))
    nodes = (("sum", "sum"), ("sum", "row"), ("row", "row"))
    assert [V.choices.can_fuse_horizontal(None, *pair, 1) for pair in nodes] == [False, "asked", "asked"]


def test_compiled_kernels_are_kept_where_told(monkeypatch, tmp_path):
    def summary(folder, backend="inductor"):
        pipeline = nodes("block", backend=backend)
        pipeline["compile"]["cache_dir"] = str(folder)
        return build(pipeline).changes["compile"].summary

    monkeypatch.setenv(compat_compile.CACHE_VARIABLE, str(tmp_path / "mine"))  # restored afterwards
    assert summary(tmp_path / "theirs").endswith(f"; cold cache {tmp_path / 'mine'}"), "the environment goes first"
    monkeypatch.delenv(compat_compile.CACHE_VARIABLE)
    assert summary(tmp_path / "x", backend="aot_eager").endswith("in the first step")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "kernel").touch()
    assert summary(tmp_path / "x").endswith(f"; warm cache {tmp_path / 'x'}")
    assert cache_dir_utils.cache_dir() == os.environ[compat_compile.CACHE_VARIABLE] == str(tmp_path / "x")


def test_names_stay_and_the_change_names_the_blocks():
    built = build(nodes("block"))
    assert list(built.model.state_dict()) == list(build({}).model.state_dict())
    assert built.changes["compile"].modules == [f"layers.{i}" for i in range(LAYERS)]
    assert build(nodes("model")).changes["compile"].modules == ["*"]


def test_off_with_a_reason():
    assert build(nodes("none")).resolved.off["compile"] == "compile.mode is none"
    assert "the device is cpu" in build(nodes("auto")).resolved.off["compile"]
    on_gpu = resolve(nodes("auto"), context(spec(), device=torch.device("cuda")))
    assert on_gpu.active == ("compile",)


def test_auto_on_a_gpu_compiles_blocks():
    ctx = context(spec(), device=torch.device("cuda"))
    [(_, transform)] = resolve(nodes("auto"), ctx).steps
    _, change = transform.apply(build({}).model, ctx)
    assert change.modules == [f"layers.{i}" for i in range(LAYERS)]


def test_bad_arguments_are_problems():
    ctx = context(spec(), dims=ParallelDims(dp_shard=2))
    for mode, backend, key, words in [
        ("blocks", "aot_eager", "compile.mode", "'blocks'"),
        ("block", "inductr", "compile.backend", "is inductr"),
        ("model", "aot_eager", "compile.mode", "2 data ranks"),
    ]:
        with pytest.raises(PipelineError) as error:
            resolve(nodes(mode, backend=backend), ctx)
        [problem] = error.value.problems
        assert problem.key == key and words in problem.message


def test_the_rules_know_torchs_backends():
    backends = {
        name
        for name in torch.compiler.list_backends(exclude_tags=None)
        if "minifier" not in name and not name.endswith("TESTING_ONLY")
    }
    assert backends - {"count_operators", inductor_graphs.BACKEND} == {*BACKENDS, *DEBUGGING}


def test_only_the_loss_where_auto_compiles_no_block():
    built = build({"compile": {**COMPILE, "mode": "auto", "loss": True}})
    assert built.changes["compile"].summary == "the loss will be compiled by aot_eager in the first step"
    step(built.model)  # by the eager loss
    with pytest.raises(PipelineError) as error:
        verify(built.model, built.resolved, built.ctx)
    [problem] = error.value.problems
    assert problem.key == "compile.loss" and "nothing was compiled" in problem.message
    tokens_BS, labels_BS = batch(2)
    built.model(tokens_BS, labels_BS=labels_BS, loss_fn=CrossEntropy(chunk_tokens=8, compiled="aot_eager")).backward()
    summary = dict(verify(built.model, built.resolved, built.ctx))["compile"].summary
    assert summary == "1 graph compiled, 0 graph breaks; 1 of them for compile.loss"


def test_nothing_compiled_is_an_error():
    built = build(nodes("block"))
    with torch.compiler.set_stance("force_eager"):
        step(built.model)
    with pytest.raises(PipelineError, match="nothing was compiled"):
        verify(built.model, built.resolved, built.ctx)


@pytest.mark.parametrize("mode", ["block", "model"])
def test_a_graph_break_raises_in_the_step(mode):
    built = build(nodes(mode))
    built.model.layers[2].ffn_norm.register_forward_hook(lambda module, args, out: torch._dynamo.graph_break())
    with pytest.raises(PipelineError, match=r"breaks at .*test_compile\.py:\d+ \(<lambda>\): Call to"):
        step(built.model)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_hook_on_one_block_acts_on_that_block_alone(layer):
    def hooked(pipeline):
        model = build(pipeline).model
        model.layers[layer].ffn_norm.register_forward_hook(lambda module, args, out: out * 1.5)
        return step(model)

    plain, plain_grads = hooked({})
    value, grads = hooked(nodes("block"))
    assert value.item() == pytest.approx(plain.item(), rel=1e-14)
    assert relative(grads, plain_grads) < 1e-13
    assert abs(value.item() - step(build({}).model)[0].item()) > 1e-3


def test_more_shapes_than_the_recompile_limit_raise():
    built = build(nodes("block", backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for length in (4, 5):
            built.model(torch.zeros(1, length, dtype=torch.int64))
        with pytest.raises(PipelineError, match=r"TransformerBlock.forward \(.*decoder\.py:\d+\) .* more than 2 "):
            built.model(torch.zeros(1, 6, dtype=torch.int64))


def test_a_graph_break_elsewhere_is_reported():
    built = build(nodes("block"))
    step(built.model)

    @torch.compile(backend="eager")
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    broken(torch.ones(1))
    with pytest.raises(PipelineError, match="the graph broke"):
        verify(built.model, built.resolved, built.ctx)
