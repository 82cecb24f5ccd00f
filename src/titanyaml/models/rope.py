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


def inverse_frequencies(head_dim: int, *, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each channel pair, [P] float64 on the CPU.

    theta^(-2i/H) (Su et al. 2021, RoFormer). With ``scaling`` (Llama 3.1 model card and reference code): wavelengths
    above original/low_freq_factor are stretched by ``factor``, those below original/high_freq_factor are kept, and
    between them the frequency is interpolated linearly in original/wavelength.

    Raises:
        ConfigError: head_dim is odd, or high_freq_factor is not above low_freq_factor.
    """
    if head_dim % 2:
        raise ConfigError(
            f"RoPE turns pairs of channels; {head_dim} is odd", key="model.head_dim",
            hint=f"model.head_dim={head_dim + 1}",
        )
    exponents_P = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies_P = theta**-exponents_P
    if scaling is None:
        return frequencies_P
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise ConfigError(
            f"{high} is not above low_freq_factor={low}", key="model.rope_scaling.high_freq_factor",
            hint=f"model.rope_scaling.high_freq_factor={4 * low}",
        )
    turns_P = scaling.original_max_seq_len * frequencies_P / (2 * math.pi)
    kept_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return frequencies_P * (kept_P + (1 - kept_P) / scaling.factor)


def tables(frequencies_P: Tensor, *, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency, each [T, P]; angles are formed in float64, so that far positions
    keep all digits of ``dtype``."""
    positions_T = torch.arange(length, dtype=torch.float64, device=device)
    angles_TP = torch.outer(positions_T, frequencies_P.to(device))
    return angles_TP.cos().to(dtype), angles_TP.sin().to(dtype)


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
