from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.models.cases import BASE
from titanyaml.config.schema import RopeScaling
from titanyaml.errors import ConfigError
from titanyaml.models import decoder
from titanyaml.models.rope import inverse_frequencies, rotate, tables

CPU = torch.device("cpu")


def test_scaling_keeps_short_waves_stretches_long_ones_and_joins_them_without_a_jump() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    plain = inverse_frequencies(128, theta=500000.0, scaling=None, dtype=torch.float64)
    scaled = inverse_frequencies(128, theta=500000.0, scaling=scaling, dtype=torch.float64)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and (~short & ~long).sum() >= 5
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-15, atol=0)
    # one frequency in the middle, by the published formula
    i = int((~short & ~long).nonzero()[0])
    smooth = (8192 / wavelength[i] - 1) / 3
    torch.testing.assert_close(scaled[i], (1 - smooth) * plain[i] / 8 + smooth * plain[i])
    assert (scaled.diff() < 0).all()


def test_rotation_turns_channel_pairs_half_a_head_apart_by_position_times_frequency() -> None:
    frequencies = inverse_frequencies(6, theta=100.0, scaling=None, dtype=torch.float64)
    cos, sin = tables(frequencies, length=5, device=CPU)
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = torch.view_as_complex(torch.stack((x[..., :3], x[..., 3:]), -1)) * torch.polar(
        torch.ones(5, 1, 3, dtype=torch.float64), torch.arange(5)[:, None, None] * frequencies
    )
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_precision_of_far_positions() -> None:
    last = 131071
    for dtype, limit in ((torch.float32, last * 2e-7), (torch.float64, last * 1e-15)):
        cos, sin = tables(inverse_frequencies(8, theta=10.0, scaling=None, dtype=dtype), length=last + 1, device=CPU)
        assert cos.dtype == sin.dtype == dtype
        for i in range(4):
            angle = last * 10.0 ** (-i / 4)
            assert abs(cos[last, i].item() - math.cos(angle)) < limit
            assert abs(sin[last, i].item() - math.sin(angle)) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rotation_returns_the_inputs_dtype_and_rounds_once(dtype: torch.dtype) -> None:
    cos, sin = tables(inverse_frequencies(8, theta=100.0, scaling=None, dtype=torch.float64), length=7, device=CPU)
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    got = rotate(x, cos.to(wide), sin.to(wide))
    assert got.dtype == dtype
    exact = rotate(x.double(), cos, sin)
    assert (got.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps


def test_tables_that_a_wrapper_has_narrowed_are_refused() -> None:
    cos, sin = tables(inverse_frequencies(8, theta=100.0, scaling=None), length=4, device=CPU)
    with pytest.raises(AssertionError, match="cast to torch.bfloat16"):
        rotate(torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16), cos.bfloat16(), sin.bfloat16())


def test_impossible_frequencies_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="model.head_dim"):
        decoder.build(replace(BASE, head_dim=7))
    with pytest.raises(ConfigError, match="high_freq_factor"):
        decoder.build(replace(BASE, rope_scaling=RopeScaling(low_freq_factor=5.0, high_freq_factor=4.0)))
