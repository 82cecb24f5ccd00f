"""Float8 products on a GPU that has them: compiled and not, against the same float8 numbers multiplied in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from titanyaml.kernels.float8_cast import compute_amax, float8_cast
from titanyaml.kernels.float8_linear import E4M3, Float8Options, cast_operand, float8_linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with float8 products"
)
E5M2 = torch.float8_e5m2
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
TOKENS, K, N = (2, 256), 768, 512


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x with a few large features, w, and the output's gradient, whose rows differ in size."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, w, grad = draw(*TOKENS, K), draw(N, K) * 0.02, draw(*TOKENS, N) * torch.logspace(-6, -3, TOKENS[1])[:, None]
    x[..., 5] *= 20
    return tuple(t.to("cuda", torch.bfloat16).requires_grad_(t is not grad) for t in (x, w, grad))


def numbers(x: Tensor, *, rowwise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What float8 leaves of a matrix, in float64: scaled along its rows, and along its columns."""
    x = x.detach().reshape(-1, x.shape[-1])
    cast = float8_cast(x, compute_amax(x, rowwise=rowwise, fused=False), dtype=dtype, power_of_2=rowwise, fused=False)
    return (cast.data_MK.double() * cast.inverse_M1.double(), (cast.data_KM.double() * cast.inverse_K1.double()).t())


def reference(recipe: str, x: Tensor, w: Tensor, grad: Tensor, grad_dtype: torch.dtype) -> list[Tensor]:
    rowwise = recipe != "tensorwise"
    (x_rows, x_columns), (w_rows, w_columns) = (numbers(t, rowwise=rowwise, dtype=E4M3) for t in (x, w))
    g_rows, g_columns = numbers(grad, rowwise=rowwise, dtype=grad_dtype)
    if recipe == "rowwise_with_gw_hp":
        g_columns, x_columns = (t.detach().double().flatten(0, -2) for t in (grad, x))
    return [x_rows @ w_rows.t(), g_rows @ w_columns, g_columns.t() @ x_columns]


def run(function: object, x: Tensor, w: Tensor, grad: Tensor, options: Float8Options) -> list[Tensor]:
    """Output and both gradients as matrices."""
    y = function(x, w, options)
    return [t.flatten(0, -2) for t in (y.detach(), *torch.autograd.grad(y, (x, w), grad))]


def distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("fast_accum", [True, False], ids=["fast", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_float8_numbers(recipe: str, fast_accum: bool, grad_dtype: torch.dtype) -> None:
    """To the rounding of the output to bfloat16 (at most 2^-9 of a number, 2^-9 / sqrt(3) in the root mean square).

    The short accumulator keeps about 13 bits of partial sums; its error is far below what 4 significant bits leave.
    """
    x, w, grad = inputs()
    options = Float8Options(recipe, fast_accum=fast_accum, grad_dtype=grad_dtype, fused=True)
    results, expected = run(float8_linear, x, w, grad, options), reference(recipe, x, w, grad, grad_dtype)
    sums = {"y": True, "grad_x": fast_accum, "grad_w": fast_accum and recipe != "rowwise_with_gw_hp"}
    for (name, short), ours, reference_tensor in zip(sums.items(), results, expected, strict=True):
        assert distance(ours, reference_tensor) < (4e-3 if short else 2e-3), name
    x_MK, g_MN = x.detach().double().flatten(0, -2), grad.double().flatten(0, -2)
    exact = [x_MK @ w.detach().double().t(), g_MN @ w.detach().double(), g_MN.t() @ x_MK]
    # two operands of 4 or 3 significant bits: 3.7 % and 5.8 %
    for ours, reference_tensor in zip(results, exact, strict=True):
        assert distance(ours, reference_tensor) < (0.05 if grad_dtype == E4M3 else 0.075)


def layers(x: Tensor, w: Tensor, options: Float8Options) -> Tensor:
    """What a compiler fuses with casts: a norm before, an activation behind, an input of two layers."""
    operand = cast_operand(torch.nn.functional.rms_norm(x, x.shape[-1:]), options)
    gate, up = float8_linear(operand, w, options), float8_linear(operand, w * 0.5, options)
    return float8_linear(torch.nn.functional.silu(gate) * up, w.t().contiguous(), options)


def exact(x: Tensor, w: Tensor) -> Tensor:
    """``layers`` in float64, nothing cast."""
    x, w = x.double(), w.double()
    x = torch.nn.functional.rms_norm(x, x.shape[-1:])
    return (torch.nn.functional.silu(x @ w.t()) * (x @ w.t() * 0.5)) @ w


@pytest.mark.parametrize(("recipe", "recast"), list(itertools.product(RECIPES, [True, False])))
def test_compiled_is_what_eager_computes(recipe: str, recast: bool) -> None:
    """Inductor keeps float32 where eager rounds to bfloat16: some numbers fall to the neighbouring float8 one. With
    ``rowwise_with_gw_hp`` the compiler makes the casts too, of numbers never rounded: then only as near to exact."""
    x, w, _ = inputs()
    grad = torch.randn_like(x) * 1e-3
    options = Float8Options(recipe, fast_accum=False, fused=True, recast_weight=recast)
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, dynamic=False)
    eager, plain = run(layers, x, w, grad, options), run(layers, x, w, grad, Float8Options(recipe, False, fused=False))
    true = run(lambda x, w, _: exact(x, w), x, w, grad.double(), options)
    for _ in range(2):  # the second call reuses buffers
        for ours, reference_tensor, expected in zip(run(compiled, x, w, grad, options), eager, true, strict=True):
            assert distance(ours, expected) < 1.1 * distance(reference_tensor, expected)
            assert distance(ours, reference_tensor) < 0.02 or not options.weight_gradient_in_float8
    for ours, reference_tensor in zip(eager, plain, strict=True):
        assert torch.equal(ours, reference_tensor), "the Triton casts are those of plain PyTorch to the bit"
