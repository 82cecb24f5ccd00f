"""Rotary position embedding, with the frequency scaling of Llama 3.1.

Rotate-half layout (Hugging Face): channel i of a head turns with channel i + H/2. Real arithmetic.
Shapes: B batch, S sequence, T table length, N heads, H head size, P = H/2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titanyaml.config.schema import RopeScaling
from titanyaml.errors import ConfigError
from titanyaml.models.layers import at_least_float32


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Radians per position of each channel pair, [P] in ``dtype`` on the CPU.

    theta^(-2i/H) (Su et al. 2021, RoFormer). With ``scaling`` (Llama 3.1 reference code): wavelengths above
    original/low_freq_factor are stretched by ``factor``, those below original/high_freq_factor are kept, and between
    them the frequency is interpolated linearly in original/wavelength. Every operation is rounded to ``dtype``, as in
    the code that the published models were trained with: in float32 the values are theirs to the last bit. With equal
    factors (Llama 4 Scout) nothing lies between.

    Raises:
        ConfigError: head_dim is odd, or high_freq_factor is below low_freq_factor.
    """
    if head_dim % 2:
        raise ConfigError(
            f"RoPE turns pairs of channels; {head_dim} is odd",
            key="model.head_dim",
            hint=f"model.head_dim={head_dim + 1}",
        )
    frequencies_P = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim)
    if scaling is None:
        return frequencies_P
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high < low:
        raise ConfigError(
            f"{high} is below low_freq_factor={low}",
            key="model.rope_scaling.high_freq_factor",
            hint=f"model.rope_scaling.high_freq_factor={4 * low}",
        )
    wavelengths_P = 2 * math.pi / frequencies_P
    turns_P = scaling.original_max_seq_len / wavelengths_P
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1) if high > low else (turns_P >= low).to(dtype)
    return (1 - kept_P) * frequencies_P / scaling.factor + kept_P * frequencies_P


def tables(frequencies_P: Tensor, *, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency, each [T, P] in the frequencies' dtype."""
    positions_T = torch.arange(length, dtype=frequencies_P.dtype, device=device)
    angles_TP = torch.outer(positions_T, frequencies_P.to(device))
    return angles_TP.cos(), angles_TP.sin()


def temperatures(*, length: int, strength: float, floor: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 + strength * log(1 + floor((position + 1) / floor)), [T] in ``dtype``: far queries without rotary embedding are
    made sharper (Llama 4; Nakanishi 2025, arXiv 2501.19399)."""
    positions_T = torch.arange(1, length + 1, dtype=dtype, device=device)
    return 1 + strength * (positions_T / floor).floor().log1p()


def rotate(x_BSNH: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Turn every head's channel pairs by the angles of their positions. Computed in the tables' dtype, returned in x's.

    The tables are never narrower than float32: a mixed-precision wrapper that casts a block's inputs would destroy
    far positions without a sign, and is refused here.
    """
    dtype = cos_SP.dtype
    assert dtype == at_least_float32(dtype), f"RoPE tables were cast to {dtype}; do not cast the inputs of a block"
    first, second = x_BSNH.to(torch.promote_types(x_BSNH.dtype, dtype)).chunk(2, dim=-1)
    cos_S1P, sin_S1P = cos_SP.unsqueeze(1), sin_SP.unsqueeze(1)
    turned = torch.cat((first * cos_S1P - second * sin_S1P, second * cos_S1P + first * sin_S1P), dim=-1)
    return turned.to(x_BSNH.dtype)
