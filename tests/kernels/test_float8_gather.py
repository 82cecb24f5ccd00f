from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanyaml.kernels import float8_cast as cast_module
from titanyaml.kernels import float8_gather as module
from titanyaml.kernels.float8_cast import compute_amax, float8_cast, transpose_float8
from titanyaml.kernels.float8_gather import Float8Shards

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch) -> None:
    """Several programs, and last ones that are not full."""
    monkeypatch.setattr(module, "PROGRAMS", 2)
    monkeypatch.setattr(module, "TILE", 64)
    monkeypatch.setattr(cast_module, "TRANSPOSE_TILE", 32)


def weights(device: torch.device) -> list[Tensor]:
    """Two halves of one weight, whose largest number is in the second, and of another; several tiles, none full."""
    draw = torch.Generator().manual_seed(0)
    fulls = [torch.randn(8, 48, generator=draw) * 0.02, torch.randn(40, 32, generator=draw)]
    fulls[0][6, 5], fulls[1][30, 3] = 1.2345, -17.77
    return [half.contiguous().to(device) for full in fulls for half in full.chunk(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_halves_are_cast_as_the_whole(device, dtype: torch.dtype) -> None:
    """To the bit what the cast of one weight makes, of the numbers rounded to the dtype; by kernels and without."""
    halves = weights(device)
    for fused in (True, False):
        first, second = (Float8Shards(halves[part::2], dtype=dtype, fused=fused) for part in (0, 1))
        full = torch.maximum(first.amax(), second.amax())
        for shards in (first, second):
            shards.cast(full)
        for i in range(2):
            w = torch.cat(halves[2 * i : 2 * i + 2]).to(dtype)
            expected = float8_cast(
                w, compute_amax(w, rowwise=False, fused=False), dtype=E4M3, power_of_2=False, fused=False
            )
            got = torch.cat([shards.data[i].view(torch.uint8) for shards in (first, second)])
            assert torch.equal(got, expected.data_MK.view(torch.uint8))
            assert all(torch.equal(shards.inverses[i], expected.inverse_M1) for shards in (first, second))


def test_a_second_cast_writes_to_the_same_memory(device) -> None:
    halves = weights(device)
    shards = Float8Shards(halves, dtype=torch.float32, fused=True)
    shards.cast(shards.amax())
    before = [(data.clone(), data.data_ptr()) for data in shards.data]
    halves[1].mul_(2).add_(1)
    shards.cast(shards.amax())
    unchanged = [
        torch.equal(data.view(torch.uint8), old.view(torch.uint8)) and data.data_ptr() == address
        for data, (old, address) in zip(shards.data, before, strict=True)
    ]
    assert unchanged == [True, False, True, True]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
def test_what_is_not_finite_is_the_largest(device) -> None:
    for fused in (True, False):
        for bad in (float("nan"), float("inf")):
            halves = weights(device)
            halves[2][3, 3] = bad
            maxima = Float8Shards(halves, dtype=torch.bfloat16, fused=fused).amax()
            assert maxima.view(torch.float32).isfinite().tolist() == [True, True, False, True]
            assert int(maxima[2]) == int(maxima.max())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_turns_to_the_bit(device, dtype: torch.dtype) -> None:
    for shape in ((80, 48), (32, 64), (16, 16)):
        x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
        for fused in (True, False):
            transposed = transpose_float8(x.view(dtype), after=x, fused=fused)
            assert transposed.dtype == dtype and transposed.is_contiguous()
            assert torch.equal(transposed.view(torch.uint8), x.t())


def test_operator_contract(device) -> None:
    x = torch.randn(32, 48).to(device).to(E4M3)
    torch.library.opcheck(torch.ops.titanyaml.transpose_float8.default, (x, x), test_utils=("test_faketensor",))
