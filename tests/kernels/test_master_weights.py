"""A float32 number in a bfloat16 one and 16 bits more: exact, and rounded as said."""

from __future__ import annotations

import torch

from titanyaml.kernels.master_weights import full_precision, join, split_, split_master, store_full_precision


def numbers() -> torch.Tensor:
    """Every sign and exponent with payloads around a rounding, and random ones."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x7FFFFF, 0x7F8000, 0x7F7FFF])
    all_bits = (torch.arange(512)[:, None] << 23 | low).flatten()
    random = torch.randint(2**32, (1 << 16,), generator=torch.Generator().manual_seed(0))
    return torch.cat((all_bits, random)).to(torch.int32).view(torch.float32)


def test_joined_is_what_was_split_and_the_weight_is_the_nearest() -> None:
    value = numbers()
    weight, remainder = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    split_(value, weight, remainder)
    nan, bits = value.isnan(), value.view(torch.int32)
    assert torch.equal(join(weight, remainder).view(torch.int32)[~nan], bits[~nan])
    assert weight[nan].isnan().all() and join(weight, remainder)[nan].isnan().all()
    ties = bits & 0xFFFF == 0x8000
    assert torch.equal(weight[~nan & ~ties], value.bfloat16()[~nan & ~ties])
    away = weight[~nan & ties].double().abs()
    assert (away > value[~nan & ties].double().abs()).all()  # where PyTorch rounds half of them down


def test_what_a_checkpoint_reads_and_fills() -> None:
    value = numbers()
    value = value[~value.isnan()]
    parameter = torch.empty_like(value, dtype=torch.bfloat16)
    remainder = split_master(value, parameter)
    full = full_precision(parameter, remainder)
    assert torch.equal(full.view(torch.int32), value.view(torch.int32))
    store_full_precision(full.neg_(), parameter, remainder)
    assert torch.equal(join(parameter, remainder), -value)
    wide = torch.zeros_like(value)
    assert full_precision(wide, None) is wide and full_precision(parameter, wide) is wide
    store_full_precision(wide, parameter, wide)
    assert not parameter.any()
