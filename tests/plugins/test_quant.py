"""Float8 linear layers: the recipes against a float64 reference, alone and under every other plugin."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.conftest import make
from tests.plugins.small import AC, COMPILE, FSDP, CountOperators, batch, build, context, loss, spec
from tests.ranks import run_ranks
from titanyaml import float8, optim
from titanyaml.config import schema
from titanyaml.dist.env import Env
from titanyaml.dist.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.kernels.choice import Choice
from titanyaml.models import decoder
from titanyaml.pipeline.resolve import after_step, resolve, run
from titanyaml.plugins.quant import OwnProduct, Quantize

TENSORWISE, ROWWISE, HIGH_PRECISION_GRADIENT, MX = RECIPES = (
    "float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8",
)
TP = {"_target_": "titanyaml.plugins.tp.TensorParallel"}
CP = {"_target_": "titanyaml.plugins.cp.ContextParallel"}
FLOAT32 = {"param_dtype": torch.float32, "compute_dtype": torch.float32, "reduce_dtype": torch.float32}
MIXED = {**FLOAT32, "compute_dtype": torch.bfloat16}
SIZES = {"vocab_size": 98, "dim": 64, "ffn_dim": 128, "num_kv_heads": 4, "num_layers": 2}
STEPS = 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def node(recipe: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": "titanyaml.plugins.quant.Quantize", "recipe": recipe, "emulate": True, **arguments}


def sizes(**changes: Any) -> schema.Model:
    return spec(**(SIZES | changes))


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
        return OwnProduct(recipe, fast_accum=False, grad_dtype=grad, fused=False)
    return float8.MXProduct(emulate=True) if recipe == MX else float8.Float8Product(recipe, emulate=True)


@pytest.mark.parametrize(("recipe", "owner"), [(recipe, "torchao") for recipe in RECIPES] + [
    (recipe, "own") for recipe in (TENSORWISE, ROWWISE, HIGH_PRECISION_GRADIENT)
])
def test_products_are_those_of_the_recipe(recipe: str, owner: str) -> None:
    draw = torch.Generator().manual_seed(0)
    # rows and columns of different size: a scale along the wrong side shows
    x_MK, w_NK, g_MN = (torch.randn(shape, generator=draw) * torch.randn(shape[0], 1, generator=draw).exp()
                        for shape in ((64, 32), (96, 32), (64, 96)))
    product = product_of(recipe, owner)
    inputs = [t.clone().requires_grad_() for t in (x_MK, w_NK)]
    bias = torch.randn(96, generator=draw)
    out = product(inputs[0].view(4, 16, 32), inputs[1], bias)
    out.backward(g_MN.view(4, 16, 96))
    found = [(out.detach() - bias).view(64, 96), *(t.grad for t in inputs)]
    exact = [F.linear(x_MK, w_NK), g_MN @ w_NK, g_MN.T @ x_MK]
    for mine, wanted, high in zip(found, reference(recipe, *(t.double() for t in (x_MK, w_NK, g_MN))), exact,
                                  strict=True):
        assert (mine - wanted).norm() < 3e-6 * wanted.norm()  # sums in float32
        assert (mine - high).norm() < 0.1 * high.norm()


# ---- training

def train(built: Any, *, ranks: int = 1, rank: int = 0, keep: int = 0) -> dict[str, Any]:
    """Losses and the gradients of the step ``keep`` over the steps of AdamW on one fixed batch."""
    optimizer = optim.build(schema.Optim(), dict(built.model.named_parameters()), masters=built.masters, device="cpu")
    tokens, labels = batch(4)
    rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    losses, grads = [], {}
    for step in range(STEPS):
        value = loss(built.model, tokens[rows], labels[rows])
        (value / (labels != -100).sum()).backward()
        losses.append(value.item())
        if step == keep:
            grads = {n: whole(g) for n, g in zip(optimizer.names, optimizer.grads(), strict=True)}
        optimizer.step(3e-4)
        optimizer.zero_grad()
        after_step(built.model, built.resolved)
    return {"losses": losses, "grads": grads, "weights": {n: optimizer.master(n) for n in optimizer.names}}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def one_process(nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    torch.compiler.reset()
    return train(build(nodes, model_spec=sizes(), **(FLOAT32 | changes)))


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(((found[n] - wanted[n]).norm() / wanted[n].norm()).item() for n in wanted)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_follows_full_precision(recipe: str) -> None:
    """The loss falls as in float32, within 1 % at every step, and the gradients are not float32's."""
    full, got = one_process({}), one_process({"quant": node(recipe)})
    assert got["losses"] == pytest.approx(full["losses"], rel=1e-2)
    assert 1e-3 < distance(got["grads"], full["grads"]) < 0.3
    assert got["losses"][-1] < got["losses"][0]


@pytest.mark.parametrize(("recipe", "mode"), [(TENSORWISE, "full"), (ROWWISE, "selective_op"), (MX, "full")])
def test_recomputation_and_compilation_change_nothing(recipe: str, mode: str) -> None:
    plain = one_process({"quant": node(recipe)})
    recomputed = {"quant": node(recipe), "ac": {**AC, "mode": mode}}
    for nodes in (recomputed, {**recomputed, "compile": COMPILE}):
        found = one_process(nodes)
        assert found["losses"] == plain["losses"]
        assert all(torch.equal(found["grads"][n], grad) for n, grad in plain["grads"].items())


def test_selective_recomputation_keeps_every_second_float8_product() -> None:
    counts = []
    for nodes in ({}, {"ac": {**AC, "mode": "full"}}, {"ac": {**AC, "mode": "selective_op"}}):
        model = build({"quant": node(ROWWISE), **nodes}, model_spec=sizes(), **FLOAT32).model
        value = loss(model, *batch(2))
        with CountOperators() as operators:
            value.backward()
        counts.append(operators.counts["mm"])
    # all 7 products again: unlike a plain one, the last is not known to be needless; k, o and up are kept
    assert [count - counts[0] for count in counts] == [0, 7 * SIZES["num_layers"], 4 * SIZES["num_layers"]]


def test_a_kept_float8_weight_is_cast_once() -> None:
    kept = {}
    for recast in (True, False):
        dtypes: list[torch.dtype] = []
        model = build({"quant": node(TENSORWISE, force_recompute_weight=recast)}, model_spec=sizes(), **FLOAT32).model

        def pack(tensor: Tensor, seen: list = dtypes) -> Tensor:
            seen.append(type(tensor).__name__)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss(model, *batch(2))
        value.backward()
        kept[recast] = dtypes.count("Float8TrainingTensor"), [p.grad for p in model.parameters()]
    assert (kept[True][0], kept[False][0]) == (0, 7 * SIZES["num_layers"])
    assert all(torch.equal(*pair) for pair in zip(kept[True][1], kept[False][1], strict=True))


# ---- meshes

def on_mesh(rank: int, dims: ParallelDims, nodes: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    torch.compiler.reset()
    mesh = dims.build("cpu")
    built = build(nodes, model_spec=sizes(), dims=dims, mesh=mesh, **(FLOAT32 | changes))
    found = train(built, ranks=dims.data_degree, rank=dims.data_rank(mesh))
    scales = [getattr(p._local_tensor, "_precomputed_scale", None) for p in built.model.parameters()]
    return {
        "tp": built.changes["tp"].summary if "tp" in built.changes else "",
        "losses": found["losses"], "grads": found["grads"], "scales": sum(scale is not None for scale in scales),
        "kinds": {type(weight.to_local()) for weight in found["weights"].values()},
        "weights": {name: whole(weight) for name, weight in found["weights"].items()},
    }


def summed(ranks: list[dict[str, Any]], dims: ParallelDims) -> list[float]:
    """Losses of the whole batch: each data rank has its own sequences, tp ranks have the same."""
    return [sum(parts) for parts in zip(*(rank["losses"] for rank in ranks[:: dims.tp]), strict=True)]


MESHES = {
    "fsdp2": (ParallelDims(dp_shard=2), {"fsdp": FSDP}),
    "fsdp2, ac, compile": (
        ParallelDims(dp_shard=2), {"ac": {**AC, "mode": "selective_op"}, "compile": COMPILE, "fsdp": FSDP}),
    "tp2": (ParallelDims(tp=2), {"tp": TP}),
    "tp2, compile": (ParallelDims(tp=2), {"tp": TP, "compile": COMPILE}),
    "cp2": (ParallelDims(cp=2), {"cp": CP, "fsdp": FSDP}),
    "fsdp2_tp2": (ParallelDims(dp_shard=2, tp=2), {"tp": TP, "fsdp": FSDP}),
}


@pytest.mark.parametrize(("mesh", "recipe"), [
    *((mesh, ROWWISE) for mesh in MESHES), ("fsdp2", HIGH_PRECISION_GRADIENT), ("fsdp2", MX), ("tp2", MX),
])
def test_scales_per_row_make_meshes_equal(mesh: str, recipe: str) -> None:
    """A row belongs to one token or one feature, so FSDP and the forward of tp cut none; what tp cuts has powers of two
    for scales. What is left is the order of sums, and a cast that falls on the other side because of it."""
    dims, nodes = MESHES[mesh]
    expected = one_process({"quant": node(recipe)})
    ranks = run_ranks(on_mesh, dims.world_size, dims, {"quant": node(recipe), **nodes}, {})
    # the gradients of the first step; a number near the middle of two float8 ones may be rounded either way
    assert distance(ranks[0]["grads"], expected["grads"]) < 2e-2
    assert summed(ranks, dims)[0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert summed(ranks, dims) == pytest.approx(expected["losses"], rel=1e-3)


def test_own_products_of_gathered_inputs_make_tp_equal() -> None:
    """What q, k and v share is cast behind the gather, on every rank."""
    dims, nodes = MESHES["tp2, compile"]
    own = {"quant": node(ROWWISE, product="own")}
    expected = one_process(own)
    ranks = run_ranks(on_mesh, 2, dims, {**own, **nodes}, {})
    assert distance(ranks[0]["grads"], expected["grads"]) < 2e-2
    assert summed(ranks, dims) == pytest.approx(expected["losses"], rel=1e-3)


def gathered_both_ways(rank: int, dims: ParallelDims, nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """Cast before the gather, and, with a product that cannot, behind it."""
    found = [on_mesh(rank, dims, nodes, {})]
    able = OwnProduct.of_parts
    OwnProduct.of_parts = lambda self, group: None
    try:
        return [*found, on_mesh(rank, dims, nodes, {})]
    finally:
        OwnProduct.of_parts = able


@pytest.mark.parametrize("more", [{}, {"compile": COMPILE, "ac": {**AC, "mode": "selective_op"}}], ids=["eager", "ac"])
def test_a_cast_before_the_gather_changes_no_bit(more: dict[str, Any]) -> None:
    dims, nodes = ParallelDims(tp=2), {"tp": TP, "quant": node(TENSORWISE, product="own"), **more}
    for early, late in run_ranks(gathered_both_ways, 2, dims, nodes):
        assert "4 entries" in early["tp"] and "entries" not in late["tp"]
        assert early["losses"] == late["losses"]
        assert all(torch.equal(early["grads"][name], late["grads"][name]) for name in late["grads"])


def test_one_scale_a_tensor_differs_by_its_shard() -> None:
    """A scale of a shard is never coarser than that of the whole; so the error is of the size of the recipe's own."""
    full, expected = one_process({}), one_process({"quant": node(TENSORWISE)})
    own = distance(expected["grads"], full["grads"])
    for mesh in ("fsdp2", "tp2"):
        dims, nodes = MESHES[mesh]
        ranks = run_ranks(on_mesh, 2, dims, {"quant": node(TENSORWISE), **nodes}, {})
        assert summed(ranks, dims) == pytest.approx(full["losses"], rel=1e-2)
        assert distance(ranks[0]["grads"], full["grads"]) < 1.5 * own


@pytest.mark.parametrize(("mesh", "changes"), [("fsdp2, ac, compile", MIXED), ("cp2", {}), ("fsdp2_tp2", {})])
def test_gathering_in_float8_with_and_without_precomputed_scales(mesh: str, changes: dict[str, Any]) -> None:
    dims, nodes = MESHES[mesh]
    plain, gathered, precomputed = (
        run_ranks(on_mesh, dims.world_size, dims, {"quant": node(TENSORWISE, **options), **nodes}, changes)
        for options in ({}, {"fsdp_float8_all_gather": True},
                        {"fsdp_float8_all_gather": True, "precompute_scale": True})
    )
    count = 7 * SIZES["num_layers"]
    assert [rank["scales"] for rank in gathered + precomputed] == [0] * len(gathered) + [count] * len(gathered)
    for rank, other in zip(gathered, precomputed, strict=True):
        assert rank["losses"] == other["losses"]
        assert rank["kinds"] == {Tensor}, "what is saved needs no torchao to be read"
        assert all(torch.equal(rank["weights"][n], w) for n, w in other["weights"].items())
    # with float32 compute the cast sees what it would see after the gathering; bfloat16 rounds once less
    assert summed(gathered, dims) == pytest.approx(summed(plain, dims), rel=1e-2 if changes else 1e-6)


class Gathered(TorchDispatchMode):
    """dtype and bytes of all that is gathered inside the ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.bytes[args[1].dtype] += args[1].nbytes
        return func(*args, **(kwargs or {}))


def gathers(rank: int, options: dict[str, Any]) -> Counter[torch.dtype]:
    dims = ParallelDims(dp_shard=2)
    nodes = {"quant": node(TENSORWISE, **options), "fsdp": FSDP}
    built = build(nodes, model_spec=sizes(), dims=dims, mesh=dims.build("cpu"), **MIXED)
    with Gathered() as gathered:
        loss(built.model, *batch(2))
    return gathered.bytes


def test_weights_travel_in_one_byte() -> None:
    half, quarter = (run_ranks(gathers, 2, {"fsdp_float8_all_gather": on})[0] for on in (False, True))
    assert set(half) == {torch.bfloat16}
    assert sum(quarter.values()) < 0.7 * sum(half.values()), "the embedding and the head stay in bfloat16"


def save(rank: int, path: str) -> dict[str, Tensor]:
    nodes = {"quant": node(TENSORWISE, fsdp_float8_all_gather=True), "fsdp": FSDP}
    dims = ParallelDims(dp_shard=2)
    built = build(nodes, model_spec=sizes(), dims=dims, mesh=dims.build("cpu"), **FLOAT32)
    weights = train(built, ranks=2, rank=rank)["weights"]
    make(Path(path), env=Env.from_environ("cpu")).save(1, {"model": weights}, {"position": 0})
    return {name: whole(weight) for name, weight in weights.items()}


def test_a_checkpoint_of_gathered_weights_is_read_by_one_process(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, str(tmp_path))[0]
    alone = dict(build({}, model_spec=sizes(), **FLOAT32).model.named_parameters())
    checkpoints = make(tmp_path)
    checkpoints.load(checkpoints.latest(), {"model": alone})
    assert [name for name, value in saved.items() if not torch.equal(alone[name], value)] == []


# ---- what is converted

def change(model_spec: schema.Model, tp: int = 1, **arguments: Any) -> Any:
    model = decoder.build(model_spec)
    ctx = context(model_spec, dims=ParallelDims(tp=tp), **FLOAT32)
    return Quantize(emulate=True, **arguments).apply(model, ctx)[1]


def llama3_8b(compose: Any) -> schema.Model:
    given = dict(compose("model=llama3_8b").model)
    return schema.Model(**given | {"num_layers": 2, "rope_scaling": None})


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
    assert got.modules == [f"layers.1.{n}" for n in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1",
                                                     "feed_forward.w2", "feed_forward.w3")]
    assert got.skipped["layers.1.attention.wo"] == "quant.filter_fqns has 'wo'"
    with pytest.raises(PipelineError) as error:
        change(sizes(), recipe=ROWWISE, filter_fqns=["feed_foward"])
    assert error.value.problems[0].hint == "nearest: feed_forward"


def test_a_linear_layer_of_another_class_is_named() -> None:
    model = decoder.build(sizes())
    model.layers[0].attention.wq = nn.Linear(64, 64, bias=False)
    got = Quantize(recipe=ROWWISE, emulate=True).apply(model, context(sizes(), **FLOAT32))[1]
    assert got.skipped["layers.0.attention.wq"].startswith("a Linear, not the model's own")


def test_off_and_refused() -> None:
    assert resolve({"quant": node("none")}, context(sizes())).off == {"quant": "quant.recipe is none"}
    kept = node(TENSORWISE, force_recompute_weight=False)
    for bad, text in [
        (node(ROWWISE, emulate=False), "is float8_rowwise, but a cpu has no fast float8 products"),
        (node("float9"), "is 'float9'"),
        (kept, "is false, but a compiled graph casts each weight again in any case"),
    ]:
        with pytest.raises(PipelineError) as error:
            resolve({"quant": bad, "compile": COMPILE}, context(sizes()))
        assert [problem.message for problem in error.value.problems] == [text]


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    gpu = replace(context(sizes()), device=torch.device("cuda", 0))
    [problem] = Quantize(recipe=ROWWISE).check(gpu)
    assert problem.message == "is float8_rowwise, but the GPU has compute capability 8.0; it needs 8.9 or higher"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert Quantize(recipe=ROWWISE).check(gpu) == []
    assert "it needs 10.0" in Quantize(recipe=MX).check(gpu)[0].message


def test_without_compilation_the_change_warns() -> None:
    gpu = replace(context(sizes()), device=torch.device("cuda", 0))
    model, got = Quantize(recipe=ROWWISE).apply(decoder.build(sizes()), gpu)
    assert "not compiled: unfused casts usually cost more than float8 gains" in got.summary
    assert "compiled" not in Quantize(recipe=ROWWISE).apply(model, replace(gpu, active=("quant", "compile")))[1].summary


def test_an_unknown_torchao_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PipelineError) as error:
        float8.Float8Product(ROWWISE, emulate=True)
    assert "0.17 and 0.18 are known to work" in error.value.problems[0].message


def test_torchao_is_imported_late_and_in_silence() -> None:
    code = ("import sys, titanyaml.plugins.quant, titanyaml.optim\nassert 'torchao' not in sys.modules\n"
            "from titanyaml import float8\nfloat8.MXProduct(emulate=True)\n"
            "float8.Float8Product('float8_rowwise', emulate=True)\n")
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
    found = {}
    for recast in (True, False):
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, seen: dict = kept) -> Tensor:
            if tensor.dtype == E4M3:
                seen[tensor.data_ptr()] = tensor.numel()
            return tensor

        nodes = {"quant": node(ROWWISE, product="own", force_recompute_weight=recast)}
        built = build(nodes, model_spec=sizes(), **FLOAT32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss(built.model, *batch(2))
        value.backward()
        found[recast] = sum(kept.values()), [p.grad for p in built.model.parameters()]
    layers = SIZES["num_layers"]
    assert (found[True][0], found[False][0]) == (layers * inputs, layers * (inputs + weights))
    assert all(torch.equal(*pair) for pair in zip(found[True][1], found[False][1], strict=True))


def test_layers_of_two_kinds_share_nothing() -> None:
    """Only q is left alone: k and v each cast."""
    own = build({"quant": node(ROWWISE, product="own", filter_fqns=["wq"])}, model_spec=sizes(), **FLOAT32)
    plain = build({}, model_spec=sizes(), **FLOAT32)
    assert train(own)["losses"] == pytest.approx(train(plain)["losses"], rel=2e-2)


@pytest.mark.parametrize("fused", [True, False])
def test_the_runs_kernels_cast(fused: bool) -> None:
    model = decoder.build(sizes())
    Quantize(recipe=ROWWISE, product="own").apply(model, replace(context(sizes()), kernels=Choice(fused, "as told")))
    assert model.layers[0].attention.wq.product.options.fused == fused


def test_own_products_recompute_and_compile_to_the_same_bits() -> None:
    own = node(ROWWISE, product="own")
    plain = build({"quant": own}, model_spec=sizes(), **FLOAT32)
    nodes = {"quant": own, "ac": {**AC, "mode": "selective_op"}, "compile": COMPILE}
    again = build(nodes, model_spec=sizes(), **FLOAT32)
    assert "own casts and products, gradients in e4m3 with full accumulation" in plain.changes["quant"].summary
    expected, found = train(plain), train(again)
    assert found["losses"] == expected["losses"]
    assert [n for n, grad in expected["grads"].items() if not torch.equal(found["grads"][n], grad)] == []
    assert train(build({"quant": node(ROWWISE)}, model_spec=sizes(), **FLOAT32))["losses"] == pytest.approx(
        expected["losses"], rel=2e-3
    )
