"""Training in float8, alone and under every other plugin, against one process and full precision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.conftest import make
from tests.plugins.quantized import (
    CP,
    FLOAT32,
    HIGH_PRECISION_GRADIENT,
    MIXED,
    MX,
    RECIPES,
    ROWWISE,
    SIZES,
    TENSORWISE,
    TP,
    node,
    sizes,
    train,
    whole,
)
from tests.plugins.small import AC, COMPILE, FSDP, SEQ, CountOperators, batch, build, loss
from tests.ranks import run_ranks
from titanyaml.distributed import compat_compile
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.plugins.quant import OwnFloat8Matmul

# ---- training


def one_process(nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    torch.compiler.reset()
    return train(build(nodes, model_spec=sizes(), **(FLOAT32 | changes)))


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(((actual[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected)


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
        actual = one_process(nodes)
        assert actual["losses"] == plain["losses"]
        assert all(torch.equal(actual["grads"][n], grad) for n, grad in plain["grads"].items())


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


@pytest.mark.parametrize(("recipe", "product"), [(TENSORWISE, "own"), (ROWWISE, "torchao")])
def test_a_compiled_block_that_is_recomputed_keeps_its_input_only(
    recipe: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, rotation and random state aside. torch 2.11 by itself keeps what each product of ours puts out."""
    if product == "own":
        monkeypatch.setattr(compat_compile, "recomputes_autograd_functions", lambda: False)
    torch.compiler.reset()
    compiled = {"ac": {**AC, "mode": "full"}, "compile": COMPILE}
    model_spec = sizes(num_layers=1)
    saved_shapes, grads = [], []
    for nodes in ({}, compiled):
        model = build({"quant": node(recipe, product=product), **nodes}, model_spec=model_spec, **FLOAT32).model
        value = loss(model, *batch(2))
        saved_shapes.append(sorted(kept_by_graphs(value, list(model.layers[0].parameters()))))
        value.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    head_dim = model_spec.dim // model_spec.num_heads
    assert saved_shapes == [[], [(2, SEQ, model_spec.dim), *[(SEQ, head_dim // 2)] * 2]]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def kept_by_graphs(value: Tensor, parameters: list[Tensor]) -> list[tuple[int, ...]]:
    """Shapes of what compiled forwards keep for their backwards, but for parameters and random states."""
    parameter_addresses, saved = {parameter.data_ptr() for parameter in parameters}, []
    todo, visited = [value.grad_fn], {None}
    while todo:
        if (function := todo.pop()) in visited:
            continue
        visited.add(function)
        todo += [earlier for earlier, _ in function.next_functions]
        if function.name() == "CompiledFunctionBackward":
            saved += [
                tensor
                for tensor in function.saved_tensors
                if tensor.data_ptr() not in parameter_addresses and tensor.dtype != torch.uint8
            ]
    return [tuple(tensor.shape) for tensor in saved]


def test_a_kept_float8_weight_is_cast_once() -> None:
    results = {}
    for recast in (True, False):
        dtypes: list[torch.dtype] = []
        model = build({"quant": node(TENSORWISE, force_recompute_weight=recast)}, model_spec=sizes(), **FLOAT32).model

        def pack(tensor: Tensor, names: list = dtypes) -> Tensor:
            names.append(type(tensor).__name__)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss(model, *batch(2))
        value.backward()
        results[recast] = dtypes.count("Float8TrainingTensor"), [p.grad for p in model.parameters()]
    assert (results[True][0], results[False][0]) == (0, 7 * SIZES["num_layers"])
    assert all(torch.equal(*pair) for pair in zip(results[True][1], results[False][1], strict=True))


# ---- meshes


def on_mesh(rank: int, dims: ParallelDims, nodes: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    torch.compiler.reset()
    mesh = dims.build("cpu")
    built = build(nodes, model_spec=sizes(), dims=dims, mesh=mesh, **(FLOAT32 | changes))
    result = train(built, ranks=dims.data_degree, rank=dims.data_rank(mesh))
    scales = [getattr(p._local_tensor, "_precomputed_scale", None) for p in built.model.parameters()]
    return {
        "tp": built.changes["tp"].summary if "tp" in built.changes else "",
        "losses": result["losses"],
        "grads": result["grads"],
        "scales": sum(scale is not None for scale in scales),
        "kinds": {type(weight.to_local()) for weight in result["weights"].values()},
        "weights": {name: whole(weight) for name, weight in result["weights"].items()},
    }


def summed(ranks: list[dict[str, Any]], dims: ParallelDims) -> list[float]:
    """Losses of the whole batch: each data rank has its own sequences, tp ranks have the same."""
    return [sum(parts) for parts in zip(*(rank["losses"] for rank in ranks[:: dims.tp]), strict=True)]


MESHES = {
    "fsdp2": (ParallelDims(dp_shard=2), {"fsdp": FSDP}),
    "fsdp2, ac, compile": (
        ParallelDims(dp_shard=2),
        {"ac": {**AC, "mode": "selective_op"}, "compile": COMPILE, "fsdp": FSDP},
    ),
    "tp2": (ParallelDims(tp=2), {"tp": TP}),
    "tp2, compile": (ParallelDims(tp=2), {"tp": TP, "compile": COMPILE}),
    "cp2": (ParallelDims(cp=2), {"cp": CP, "fsdp": FSDP}),
    "fsdp2_tp2": (ParallelDims(dp_shard=2, tp=2), {"tp": TP, "fsdp": FSDP}),
}


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [*((mesh, ROWWISE) for mesh in MESHES), ("fsdp2", HIGH_PRECISION_GRADIENT), ("fsdp2", MX), ("tp2", MX)],
)
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
    results = [on_mesh(rank, dims, nodes, {})]
    able = OwnFloat8Matmul.with_gathered_input
    OwnFloat8Matmul.with_gathered_input = lambda self, group: None
    try:
        return [*results, on_mesh(rank, dims, nodes, {})]
    finally:
        OwnFloat8Matmul.with_gathered_input = able


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
        for options in (
            {},
            {"fsdp_float8_all_gather": True},
            {"fsdp_float8_all_gather": True, "precompute_scale": True},
        )
    )
    count = 7 * SIZES["num_layers"]
    assert [rank["scales"] for rank in gathered + precomputed] == [0] * len(gathered) + [count] * len(gathered)
    for rank, precomputed_rank in zip(gathered, precomputed, strict=True):
        assert rank["losses"] == precomputed_rank["losses"]
        assert rank["kinds"] == {Tensor}, "what is saved needs no torchao to be read"
        assert all(torch.equal(rank["weights"][n], w) for n, w in precomputed_rank["weights"].items())
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
