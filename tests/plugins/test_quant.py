"""Float8 linear layers: the recipes against a float64 reference, and which layers are converted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.plugins.quantized import (
    E4M3,
    E5M2,
    FLOAT32,
    HIGH_PRECISION_GRADIENT,
    MX,
    RECIPES,
    ROWWISE,
    SIZES,
    TENSORWISE,
    node,
    sizes,
    train,
)
from tests.plugins.small import AC, COMPILE, batch, build, context, loss
from titanyaml import float8
from titanyaml.config import decoder_layers, schema
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.kernels.kernel_choice import KernelChoice
from titanyaml.models import decoder
from titanyaml.models.layers import Linear
from titanyaml.pipeline.resolve import resolve, run
from titanyaml.plugins.quant import OwnFloat8Matmul, Quantize, local_shape

# ---- the recipes


def cast(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """What is left of float64 numbers after a cast at this scale."""
    scale = scale.float().double()
    return (x * scale).float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).double() / scale


def along(x: Tensor, dim: int | None, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Cast with one scale for the sum along ``dim`` (None: for all) such that the largest number just fits."""
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / amax
    return cast(x, dtype, torch.exp2(scale.log2().floor()) if power_of_two else scale)


def in_blocks(x: Tensor, dim: int) -> Tensor:
    """Cast with one power of two per 32 numbers along ``dim``, so that none is cut off."""
    blocks = x.movedim(dim, -1).unflatten(-1, (-1, 32))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    return cast(blocks, E4M3, 1 / scale).flatten(-2).movedim(-1, dim)


def reference(recipe: str, x_MK: Tensor, w_NK: Tensor, g_MN: Tensor) -> list[Tensor]:
    """Output and both gradients of the recipe, in float64."""
    if recipe == MX:
        out, grad = in_blocks(x_MK, 1) @ in_blocks(w_NK, 1).T, in_blocks(g_MN, 1) @ in_blocks(w_NK, 0)
        return [out, grad, in_blocks(g_MN, 0).T @ in_blocks(x_MK, 0)]
    if recipe == TENSORWISE:
        x, w = (along(t, None, E4M3, power_of_two=False) for t in (x_MK, w_NK))
        g = along(g_MN, None, E5M2, power_of_two=False)
        return [x @ w.T, g @ w, g.T @ x]

    def rows(t: Tensor, dim: int | None) -> Tensor:
        return along(t, dim, E4M3, power_of_two=True)

    out = rows(x_MK, 1) @ rows(w_NK, 1).T
    if recipe == HIGH_PRECISION_GRADIENT:
        return [out, rows(g_MN, 1) @ rows(w_NK, None), g_MN.T @ x_MK]
    return [out, rows(g_MN, 1) @ rows(w_NK, 0), rows(g_MN, 0).T @ rows(x_MK, 0)]


def product_of(recipe: str, owner: str) -> Any:
    if owner == "own":
        grad = "e5m2" if recipe == TENSORWISE else "e4m3"
        return OwnFloat8Matmul(recipe, fast_accum=False, grad_dtype=grad, fused=False)
    return float8.MXMatmul(emulate=True) if recipe == MX else float8.Float8Matmul(recipe, emulate=True)


@pytest.mark.parametrize(
    ("recipe", "owner"),
    [(recipe, "torchao") for recipe in RECIPES]
    + [(recipe, "own") for recipe in (TENSORWISE, ROWWISE, HIGH_PRECISION_GRADIENT)],
)
def test_products_are_those_of_the_recipe(recipe: str, owner: str) -> None:
    draw = torch.Generator().manual_seed(0)
    # rows and columns of different size: a scale along the wrong side shows
    x_MK, w_NK, g_MN = (
        torch.randn(shape, generator=draw) * torch.randn(shape[0], 1, generator=draw).exp()
        for shape in ((64, 32), (96, 32), (64, 96))
    )
    product = product_of(recipe, owner)
    inputs = [t.clone().requires_grad_() for t in (x_MK, w_NK)]
    bias = torch.randn(96, generator=draw)
    out = product(inputs[0].view(4, 16, 32), inputs[1], bias)
    out.backward(g_MN.view(4, 16, 96))
    outputs = [(out.detach() - bias).view(64, 96), *(t.grad for t in inputs)]
    exact = [F.linear(x_MK, w_NK), g_MN @ w_NK, g_MN.T @ x_MK]
    for actual, expected, high in zip(
        outputs, reference(recipe, *(t.double() for t in (x_MK, w_NK, g_MN))), exact, strict=True
    ):
        assert (actual - expected).norm() < 3e-6 * expected.norm()  # sums in float32
        assert (actual - high).norm() < 0.1 * high.norm()


# ---- what is converted


def change(model_spec: schema.Model, tp: int = 1, **arguments: Any) -> Any:
    model = decoder.build(model_spec)
    ctx = context(model_spec, dims=ParallelDims(tp=tp), **FLOAT32)
    return Quantize(emulate=True, **arguments).apply(model, ctx)[1]


def llama3_8b(compose: Any) -> schema.Model:
    sizes_8b = dict(compose("model=llama3_8b").model)
    return schema.Model(**sizes_8b | {"num_layers": 2, "rope_scaling": None})


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_automatic_filter_on_llama3_8b(compose: Any, recipe: str) -> None:
    """4096 x 4096 and 14336 x 4096 gain; keys and values, 1024 x 4096, do not."""
    got = change(llama3_8b(compose), recipe=recipe, auto_filter_small_kn=True)
    assert got.summary.startswith(f"10 linear layers multiply in {recipe}; emulated")
    assert [n.rpartition(".")[2] for n in got.modules] == ["wq", "wo", "w1", "w2", "w3"] * 2
    reasons = {n.rpartition(".")[2]: reason for n, reason in got.skipped.items()}
    assert reasons == {
        "wk": "1024 x 4096: quant.auto_filter_small_kn finds it too small to gain",
        "wv": "1024 x 4096: quant.auto_filter_small_kn finds it too small to gain",
        "output": "the head stays in high precision: the loss uses its weight itself",
    }


def test_the_automatic_filter_that_leaves_nothing_is_an_error(compose: Any) -> None:
    """On 8 tp ranks a rank's part of 14336 x 4096 is 1792 x 4096."""
    with pytest.raises(PipelineError) as error:
        change(llama3_8b(compose), tp=8, recipe=ROWWISE, auto_filter_small_kn=True)
    [problem] = error.value.problems
    assert problem.key == "quant.recipe" and "no layer can be converted" in problem.message
    assert "feed_forward.w1" in problem.message and "1792 x 4096 on each of 8 tp ranks" in problem.message
    assert len(change(llama3_8b(compose), tp=8, recipe=TENSORWISE, auto_filter_small_kn=True).modules) == 8


def test_what_a_rank_multiplies_decides() -> None:
    reason = "{} on each of 2 tp ranks: not both are multiples of 16"
    got = change(sizes(ffn_dim=48), tp=2, recipe=ROWWISE)
    assert [n for n in got.modules if "feed_forward" in n] == []
    assert got.skipped["layers.0.feed_forward.w1"] == reason.format("24 x 64")
    assert got.skipped["layers.1.feed_forward.w2"] == reason.format("64 x 24")
    assert len(change(sizes(ffn_dim=48), recipe=ROWWISE).modules) == 14
    assert "feed_forward" not in str(change(sizes(ffn_dim=48), recipe=MX).modules)


def test_names_that_stay() -> None:
    got = change(sizes(), recipe=ROWWISE, filter_fqns=["layers.0", "wo", "output"])
    assert got.modules == [
        f"layers.1.{n}"
        for n in (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "feed_forward.w1",
            "feed_forward.w2",
            "feed_forward.w3",
        )
    ]
    assert got.skipped["layers.1.attention.wo"] == "quant.filter_fqns has 'wo'"
    with pytest.raises(PipelineError) as error:
        change(sizes(), recipe=ROWWISE, filter_fqns=["wo", "feed_foward"])
    assert error.value.problems[0].hint == "'quant.filter_fqns=[wo,feed_forward]'", "the others stay"


@pytest.mark.parametrize("option", ["llama3_debug", "qwen3_0_6b", "moe_debug", "mixtral_8x7b", "llama4_17bx16e"])
def test_the_rules_know_the_names_and_shapes_of_layers(compose: Any, option: str) -> None:
    composed = compose(f"model={option}", "model.num_layers=3", "model.vocab_size=64").model
    model_spec = schema.Model(**{**composed, "moe": schema.MoE(**composed.moe), "rope_scaling": None})
    with torch.device("meta"):
        model = decoder.build(model_spec)
    shapes = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, Linear)}
    layers = decoder_layers.linear_layers(model_spec)
    assert {name: (layer.outputs, layer.inputs) for name, layer in layers.items()} == shapes
    assert decoder_layers.module_names(model_spec) == {name for name, _ in model.named_modules()} - {""}
    ctx = context(model_spec, dims=ParallelDims(tp=2), facts=model.facts)
    assert all(
        layer.local(2)[::-1] == local_shape(name, model.get_submodule(name), ctx) for name, layer in layers.items()
    )


def test_a_linear_layer_of_another_class_is_named() -> None:
    model = decoder.build(sizes())
    model.layers[0].attention.wq = nn.Linear(64, 64, bias=False)
    got = Quantize(recipe=ROWWISE, emulate=True).apply(model, context(sizes(), **FLOAT32))[1]
    assert got.skipped["layers.0.attention.wq"].startswith("a Linear, not the model's own")


def test_off_and_refused() -> None:
    assert resolve({"quant": node("none")}, context(sizes())).off == {"quant": "quant.recipe is none"}
    for bad, text in [
        (node(ROWWISE, emulate=False), "is float8_rowwise, but a cpu has no fast float8 matmuls"),
        (node("float9"), "is 'float9'"),
    ]:
        with pytest.raises(PipelineError) as error:
            resolve({"quant": bad, "compile": COMPILE}, context(sizes()))
        assert [problem.message for problem in error.value.problems] == [text]


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    gpu = replace(context(sizes()), device=torch.device("cuda", 0))
    [problem] = Quantize(recipe=ROWWISE).check(gpu)
    assert problem.message == "is float8_rowwise, but the GPU has compute capability 8"
    assert problem.allowed == "a GPU of compute capability 8.9 or higher"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert Quantize(recipe=ROWWISE).check(gpu) == []
    assert "compute capability 10 or higher" in Quantize(recipe=MX).check(gpu)[0].allowed


def test_without_compilation_the_change_warns() -> None:
    gpu = replace(context(sizes()), device=torch.device("cuda", 0))
    model, got = Quantize(recipe=ROWWISE).apply(decoder.build(sizes()), gpu)
    assert "not compiled: unfused casts usually cost more than float8 gains" in got.summary
    assert "compiled" not in Quantize(recipe=ROWWISE).apply(model, replace(gpu, active=("quant", "compile")))[1].summary


def test_an_unknown_torchao_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PipelineError) as error:
        float8.Float8Matmul(ROWWISE, emulate=True)
    assert "0.17 and 0.18 are known to work" in error.value.problems[0].message


def test_torchao_is_imported_late_and_in_silence() -> None:
    code = (
        "import sys, titanyaml.plugins.quant, titanyaml.optim\nassert 'torchao' not in sys.modules\n"
        "from titanyaml import float8\nfloat8.MXMatmul(emulate=True)\n"
        "float8.Float8Matmul('float8_rowwise', emulate=True)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_parameters_keep_names_and_the_model_its_classes() -> None:
    model = decoder.build(sizes())
    before = {name: type(module) for name, module in model.named_modules()}
    ctx = context(sizes(), **FLOAT32)
    model, _ = run(model, resolve({"quant": node(ROWWISE)}, ctx), ctx)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_own_products_cast_an_input_once_and_keep_no_weight_unless_told() -> None:
    """2 x 16 tokens; q, k and v have one input, gate and up another: four casts a block are kept for the backward."""
    dim, ffn, tokens = SIZES["dim"], SIZES["ffn_dim"], 32
    inputs, weights = tokens * (3 * dim + ffn), 4 * dim * dim + 3 * dim * ffn
    results = {}
    for recast in (True, False):
        saved_sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes_by_address: dict = saved_sizes) -> Tensor:
            if tensor.dtype == E4M3:
                sizes_by_address[tensor.data_ptr()] = tensor.numel()
            return tensor

        nodes = {"quant": node(ROWWISE, product="own", force_recompute_weight=recast)}
        built = build(nodes, model_spec=sizes(), **FLOAT32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss(built.model, *batch(2))
        value.backward()
        results[recast] = sum(saved_sizes.values()), [p.grad for p in built.model.parameters()]
    layers = SIZES["num_layers"]
    assert (results[True][0], results[False][0]) == (layers * inputs, layers * (inputs + weights))
    assert all(torch.equal(*pair) for pair in zip(results[True][1], results[False][1], strict=True))


def test_layers_of_two_kinds_share_nothing() -> None:
    """Only q is left alone: k and v each cast."""
    own = build({"quant": node(ROWWISE, product="own", filter_fqns=["wq"])}, model_spec=sizes(), **FLOAT32)
    plain = build({}, model_spec=sizes(), **FLOAT32)
    assert train(own)["losses"] == pytest.approx(train(plain)["losses"], rel=2e-2)


@pytest.mark.parametrize("fused", [True, False])
def test_the_runs_kernels_cast(fused: bool) -> None:
    model = decoder.build(sizes())
    Quantize(recipe=ROWWISE, product="own").apply(
        model, replace(context(sizes()), kernels=KernelChoice(fused, "as told"))
    )
    assert model.layers[0].attention.wq.product.options.fused == fused


def test_own_products_recompute_and_compile_to_the_same_bits() -> None:
    own = node(ROWWISE, product="own")
    plain = build({"quant": own}, model_spec=sizes(), **FLOAT32)
    nodes = {"quant": own, "ac": {**AC, "mode": "selective_op"}, "compile": COMPILE}
    transformed = build(nodes, model_spec=sizes(), **FLOAT32)
    assert "own casts and products, gradients in e4m3 with full accumulation" in plain.changes["quant"].summary
    expected, actual = train(plain), train(transformed)
    assert actual["losses"] == expected["losses"]
    assert [n for n, grad in expected["grads"].items() if not torch.equal(actual["grads"][n], grad)] == []
    assert train(build({"quant": node(ROWWISE)}, model_spec=sizes(), **FLOAT32))["losses"] == pytest.approx(
        expected["losses"], rel=2e-3
    )
