from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanyaml.kernels import float8_cast as module
from titanyaml.kernels.float8_cast import Float8Copies, compute_amax, float8_cast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch) -> None:
    """Several programs in both directions, and last ones that are not full."""
    monkeypatch.setattr(module, "TILE_M", 32)
    monkeypatch.setattr(module, "TILE_K", 16)
    monkeypatch.setattr(module, "PARTS", 4)
    monkeypatch.setattr(module, "PART_TILE", 256)


def matrix(device: torch.device, rows: int = 80, columns: int = 40) -> Tensor:
    """Rows and columns of very different sizes, one row of zeros, one element of 1e-30."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 3, rows)[:, None]
    x[3], x[5, 5], x[6] = 0, 1e-30, 1e-20
    return x.bfloat16().to(device)


def both(x: Tensor, *, rowwise: bool, fused: bool, **options: object) -> Float8Copies:
    return float8_cast(x, compute_amax(x, rowwise=rowwise, fused=fused), fused=fused, **options)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "tensorwise"])
@pytest.mark.parametrize("power_of_2", [True, False], ids=["power_of_2", "any_scale"])
def test_equals_its_reference_to_the_bit(device, dtype: torch.dtype, rowwise: bool, power_of_2: bool) -> None:
    for x in (matrix(device), matrix(device, 64, 32)):
        options = {"dtype": dtype, "power_of_2": power_of_2}
        ours, reference = (both(x, rowwise=rowwise, fused=fused, **options) for fused in (True, False))
        maxima = compute_amax(x, rowwise=rowwise, fused=True)
        row_major, transposed = (
            float8_cast(x, maxima, fused=True, **{**options, without: False}) for without in ("transposed", "row_major")
        )
        assert row_major[2:] == transposed[:2] == (None, None)
        for our_copy, expected in zip((*ours, *row_major[:2], *transposed[2:]), reference + reference, strict=True):
            assert our_copy.shape == expected.shape and our_copy.dtype == expected.dtype and our_copy.is_contiguous()
            assert torch.equal(bits(our_copy), bits(expected))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "tensorwise"])
def test_the_numbers_come_back(device, rowwise: bool, fused: bool) -> None:
    """Within half a unit of the last of e4m3's 4 significant bits, or half its smallest number."""
    x = matrix(device)
    cast = both(x, rowwise=rowwise, dtype=E4M3, power_of_2=False, fused=fused)
    for data, inverse, source in (cast[:2] + (x,), cast[2:] + (x.t(),)):
        back = data.double() * inverse.double()
        error = (back - source.double()).abs()
        assert (error <= 2**-4 * 1.0001 * source.double().abs() + 2**-10 * inverse.double()).all()
        if rowwise:
            used = data.float().abs().amax(1)
            assert used[source.abs().amax(1) > 1e-12].eq(448).all(), "every row uses the whole range"
    if not rowwise:
        assert torch.equal(bits(cast.data_MK.t()), bits(cast.data_KM)) and torch.equal(cast.inverse_M1, cast.inverse_K1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("power_of_2", [True, False])
def test_what_is_not_finite_spoils_its_row_and_column(device, power_of_2: bool) -> None:
    for bad in (float("nan"), float("inf")):
        x = matrix(device)
        x[40, 20] = bad
        for fused in (True, False):
            cast = both(x, rowwise=True, dtype=E4M3, power_of_2=power_of_2, fused=fused)
            assert cast.data_MK[40].float().isnan().any() or not cast.inverse_M1[40].isfinite()
            assert cast.data_MK[41].float().isfinite().all()
            tensorwise = both(x, rowwise=False, dtype=E4M3, power_of_2=power_of_2, fused=fused)
            assert not (tensorwise.data_MK.float() * tensorwise.inverse_M1)[40, 20].isfinite()


def test_operator_contract(device) -> None:
    x, checks = matrix(device), {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(torch.ops.titanyaml.float8_amax.default, (x,), **checks)
    for rowwise in (True, False):
        maxima = compute_amax(x, rowwise=rowwise, fused=False)
        for copies in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(torch.ops.titanyaml.float8_cast.default, (x, maxima, E4M3, False, *copies), **checks)
