"""Rotary position embedding (Su et al. 2021, RoFormer), with the frequency scaling of Llama 3.1.

Rotate-half layout as in Hugging Face: channel i of a head rotates with channel i + H/2. Real arithmetic.
Shapes: B batch, S sequence, T table length, N heads, H head size, P = H/2 frequencies.
"""

import math

import torch
from torch import Tensor

from titanyaml.config.schema import RopeScaling
from titanyaml.models.layers import at_least_float32


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Radians per position of each channel pair, theta^(-2i/H): [P] in ``dtype`` on the CPU."""
    assert head_dim % 2 == 0, f"rotary embedding rotates pairs of channels; {head_dim} is odd"
    # On the CPU and rounded to ``dtype`` after every operation, as in the code that the published models were trained
    # with: in float32 the values are theirs to the last bit.
    frequencies_P = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim)
    if scaling is None:
        return frequencies_P
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Three bands, by the rotations that a pair makes within the original context (Llama 3.1 reference code): from
    # ``high`` on the frequency is kept, up to ``low`` it is divided by ``factor``, and between them it is interpolated.
    # With equal factors (Llama 4 Scout) there is no band between.
    wavelengths_P = 2 * math.pi / frequencies_P
    rotations_P = scaling.original_max_seq_len / wavelengths_P
    share_P = ((rotations_P - low) / (high - low)).clamp(0, 1) if high > low else (rotations_P >= low).to(dtype)
    return (1 - share_P) * frequencies_P / scaling.factor + share_P * frequencies_P


def tables(frequencies_P: Tensor, *, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position * frequency, each [T, P] in the frequencies' dtype."""
    positions_T = torch.arange(length, dtype=frequencies_P.dtype, device=device)
    angles_TP = torch.outer(positions_T, frequencies_P.to(device))
    return angles_TP.cos(), angles_TP.sin()


def temperatures(*, length: int, strength: float, floor: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Factors 1 + strength * log(1 + floor((position + 1) / floor)) on queries without rotary embedding, [T].
    They keep softmax sharp over long contexts (Llama 4; Nakanishi 2025, arXiv 2501.19399).
    """
    positions_T = torch.arange(1, length + 1, dtype=dtype, device=device)
    return 1 + strength * (positions_T / floor).floor().log1p()


def rotate(x_BSNH: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Rotate every head's channel pairs by the angles of their positions; computed in the tables' dtype."""
    dtype = cos_SP.dtype
    # A mixed-precision wrapper that casts a block's inputs would round cosines and sines to bfloat16 (2^-9 off), an
    # error that nothing downstream would show.
    assert dtype == at_least_float32(dtype), f"RoPE tables were cast to {dtype}; do not cast the inputs of a block"
    first, second = x_BSNH.to(torch.promote_types(x_BSNH.dtype, dtype)).chunk(2, dim=-1)
    cos_S1P, sin_S1P = cos_SP.unsqueeze(1), sin_SP.unsqueeze(1)
    rotated = torch.cat((first * cos_S1P - second * sin_S1P, second * cos_S1P + first * sin_S1P), dim=-1)
    return rotated.to(x_BSNH.dtype)
