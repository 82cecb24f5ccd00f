"""AdamW whose moments are kept in bfloat16 or in 8 bits; the weights, and all arithmetic, stay in float32.

An update decodes the moments of one parameter, does what AdamW does, and codes them again (``codes``). On a GPU that is
one compiled graph, so that no float32 moment reaches memory. Vectors (norms, biases) keep float32 moments: they weigh
nothing.

Blocks lie within a row, and there are as many in every row: codes and what belongs to their blocks are sharded as the
weight is, and a checkpoint of one mesh is read by another. The random rounding depends on the parameter's name, the
step and the place in the local shard: equal on the copies of a shard, and the same after a resume on the same mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanyaml.config import schema
from titanyaml.distributed import rng
from titanyaml.optim import codes, formula
from titanyaml.optim.adamw import AdamW, Slot, local

BLOCK = 128  # numbers that share their factors
SMALLEST = 16  # rows that cannot be cut into blocks of this keep float32 moments
_STRIDE = 0x9E3779B1  # between the seeds of two steps


class LowBitAdamW(AdamW):
    """``adamw_bf16``: 4 bytes of moments a weight; ``adamw_8bit``: 2.1; float32 ones have 8.

    Args:
        compiled: run each update as one compiled graph.
    """

    def __init__(
        self,
        spec: schema.Optim,
        named_params: Mapping[str, nn.Parameter],
        *,
        masters: Mapping[str, Tensor],
        compiled: bool,
        elsewhere: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.in_blocks = spec.name == "adamw_8bit"
        super().__init__(spec, named_params, masters=masters, implementation="foreach", elsewhere=elsewhere)
        self.rule = _compiled(self.in_blocks) if compiled else (update_8bit if self.in_blocks else update_bf16)
        self.seeds = {name: rng.seed_for(0, "moments", name) for name in self.names}

    def _moments(self, weight: Tensor) -> dict[str, Tensor]:
        assert weight.dtype == torch.float32, f"moments of a {weight.dtype} weight"
        if weight.ndim < 2:
            return super()._moments(weight)
        if not self.in_blocks:
            return {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
        block = block_size(weight)
        if block < SMALLEST:
            return super()._moments(weight)
        moments = {name: torch.zeros_like(weight, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
        for name in ("exp_avg_factor", "exp_avg_sq_low", "exp_avg_sq_high"):
            moments[name] = _per_block(weight, block)
        return moments

    def _update(self, slots: list[Slot], lr: float, weight_decay: float) -> None:
        super()._update([slot for slot in slots if not _is_narrow(slot)], lr, weight_decay)
        for slot in filter(_is_narrow, slots):
            slot.step += 1
            if local(slot.weight).numel():
                with slot.opened() as weight:
                    self._update_one(slot, weight, lr, weight_decay)

    def _update_one(self, slot: Slot, weight: Tensor, lr: float, weight_decay: float) -> None:
        step = int(slot.step)
        factors = formula.factors(
            step, lr=lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=weight_decay, like=weight
        )
        seed = torch.tensor((self.seeds[slot.name] + step * _STRIDE) % 2**32).to(weight.device, non_blocking=True)
        # one number of dimensions, whatever the weight's: one graph for all
        rows = local(slot.moments["exp_avg_factor"]).numel() if self.in_blocks else 1
        moments = [local(moment).view(rows, -1) for moment in slot.moments.values()]
        self.rule(weight.view(rows, -1), local(slot.grad).reshape(rows, -1), *moments, factors, seed)


def update_bf16(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, factors: tuple[Tensor, ...], seed: Tensor
) -> None:
    """One AdamW update of one parameter, in place.

    Args:
        weight, grad: float32. exp_avg, exp_avg_sq: bfloat16. All of one shape.
        factors: ``formula.factors``.
        seed: of the rounding.
    """
    mean, square = formula.adamw(weight, grad, exp_avg.to(torch.float32), exp_avg_sq.to(torch.float32), factors)
    bits = codes.random_bits(mean, seed)
    exp_avg.copy_(codes.to_bfloat16(mean, bits & 0xFFFF))
    exp_avg_sq.copy_(codes.to_bfloat16(square, bits >> 16))


def update_8bit(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor,
    low: Tensor,
    high: Tensor,
    factors: tuple[Tensor, ...],
    seed: Tensor,
) -> None:
    """As ``update_bf16``, of blocks [n, b]: codes (uint8) of that shape and, [n, 1], what decodes them."""
    mean, square = codes.decode_signed(exp_avg, factor), codes.decode_positive(exp_avg_sq, low, high)
    mean, square = formula.adamw(weight, grad, mean, square, factors)
    bits = codes.random_bits(mean, seed)
    coded = (*codes.encode_signed(mean, bits & 0xFFFFF), *codes.encode_positive(square, bits >> 20))
    for target, value in zip((exp_avg, factor, exp_avg_sq, low, high), coded, strict=True):
        target.copy_(value)


@functools.cache
def _compiled(in_blocks: bool) -> Callable[..., Any]:
    return torch.compile(update_8bit if in_blocks else update_bf16, fullgraph=True, dynamic=True)


def _is_narrow(slot: Slot) -> bool:
    return slot.moments["exp_avg"].dtype != torch.float32


def block_size(weight: Tensor) -> int:
    """The largest power of two, up to BLOCK, that divides every shard's rows; 1 where rows are cut unevenly."""
    row, shards = weight.shape[-1], _cuts_of_rows(weight)
    return math.gcd(row // shards, BLOCK) if row % shards == 0 else 1


def _cuts_of_rows(weight: Tensor) -> int:
    """Pieces into which the mesh cuts a row."""
    if not isinstance(weight, DTensor):
        return 1
    sizes = zip(weight.placements, weight.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if getattr(placement, "dim", None) == weight.ndim - 1)


def _per_block(weight: Tensor, block: int) -> Tensor:
    """Zeros, one a block, sharded as the weight."""
    shard = local(weight)
    zeros = shard.new_zeros((*shard.shape[:-1], shard.shape[-1] // block))
    if not isinstance(weight, DTensor):
        return zeros
    whole = torch.empty((*weight.shape[:-1], weight.shape[-1] // block), device="meta")
    return DTensor.from_local(
        zeros, weight.device_mesh, weight.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
