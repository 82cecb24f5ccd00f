"""Async tensor parallelism of float8 layers: what is fused, and that the fused sums are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plugins.async_tp_cases import ASYNC, AUTO, GRAPH, ROWS_NEED, SLOWER, TP2, clocked, on_fake_ranks, scales_rows
from tests.plugins.async_tp_cases import release_inductor as release_inductor  # a fixture of every test
from tests.plugins.inductor_graphs import GRAPHS
from tests.plugins.parity import FULL, SELECTIVE
from tests.ranks import run_ranks
from titanyaml.distributed import compat, float8_reduce_scatter
from titanyaml.distributed.tensor import TensorGroup, scatter_sum
from titanyaml.errors import PipelineError
from titanyaml.kernels import float8_linear
from titanyaml.pipeline.resolve import verify
from titanyaml.plugins.quant import Quantize


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
    num_repeated = ac is FULL  # recomputes one of the forward's
    assert change.summary.startswith(
        f"fused in the compiled graphs, forward + backward: 2 + {2 + num_repeated} reduce-scatters; left as they are: "
    )
    assert "reduce-scatter" not in change.summary.partition("left as they are")[2]
    assert [graph["float8_matmul_exchange"] for graph in GRAPHS] == [2, 2 + num_repeated]


def test_auto_times_scatters_behind_float8_products(monkeypatch) -> None:
    multiply_float8(monkeypatch)
    timed = clocked(monkeypatch, lambda collective: collective.float8 and collective.inner == 64)  # down
    with compat.fake_process_group(2):
        built = on_fake_ranks({"quant": own("float8_tensorwise"), "compile": GRAPH, "async_tp": AUTO}, model=SMALLEST)
        change = dict(verify(built.model, built.resolved, built.ctx))["async_tp"]
    assert [str(collective) for collective in timed] == [
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
    summed = sum(
        (left_operand.float() * scale) @ (right.float() * right_scale)
        for left_operand, right, scale, right_scale in zip(lefts, rights, left_scales, right_scales, strict=True)
    )
    expected = scatter_sum(summed.view(batch, -1, dim), group)
    actual = float8_reduce_scatter.operator(
        lefts, rights, left_scales, right_scales, batch, False, torch.float32, 2, group.name
    ).sum(0)
    return actual, expected


@pytest.mark.parametrize(("batch", "rowwise"), [(1, False), (2, False), (3, True)])
def test_float8_products_and_their_scatter(batch: int, rowwise: bool) -> None:
    if rowwise and not scales_rows():
        pytest.skip(ROWS_NEED)
    for actual, expected in run_ranks(scattered, 2, batch, rowwise):
        assert actual.shape == expected.shape == (batch, 16, 48)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
