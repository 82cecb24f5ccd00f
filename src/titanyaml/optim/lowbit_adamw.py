"""AdamW with moments stored in bfloat16 or in 8 bits; weights and all arithmetic stay float32.

An update decodes the moments of one parameter, applies AdamW and encodes them again (``moment_codes``). On a GPU that
is one compiled graph, so float32 moments never reach memory.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanyaml.config import schema
from titanyaml.distributed import rng
from titanyaml.optim import adamw_formula, moment_codes
from titanyaml.optim.adamw import AdamW, ParameterState, TrainedParameters, local_shard

BLOCK = 128  # largest number of neighbouring elements that share block factors
SMALLEST_BLOCK = 16  # rows without it keep float32 moments: in blocks of 8 the factors alone take 1.5 bytes a weight
_SEED_STRIDE = 0x9E3779B1  # Knuth's prime near 2^32 / golden ratio: seeds of successive steps lie far apart


class LowBitAdamW(AdamW):
    """``adamw_bf16`` (4 bytes of moments a weight) and ``adamw_8bit`` (2.1 bytes); float32 moments take 8."""

    def __init__(self, spec: schema.Optim, params: TrainedParameters, *, compiled: bool) -> None:
        self.in_blocks = spec.name == "adamw_8bit"  # before super, which allocates the moments
        super().__init__(spec, params, implementation="foreach")
        eager_update = update_8bit if self.in_blocks else update_bf16
        self.update_rule: Callable[..., None] = _compile_update(eager_update) if compiled else eager_update
        self._seeds = {name: rng.seed_for(0, "moments", name) for name in self.names}

    def _new_moments(self, weight: Tensor) -> dict[str, Tensor]:
        assert weight.dtype == torch.float32, f"moments of a {weight.dtype} weight"
        # vectors (norms, biases) keep float32 moments: they are too small to matter
        if weight.ndim < 2 or (self.in_blocks and block_size(weight) < SMALLEST_BLOCK):
            return super()._new_moments(weight)
        dtype = torch.uint8 if self.in_blocks else torch.bfloat16
        moments = {name: torch.zeros_like(weight, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        if self.in_blocks:
            # the order is that of ``update_8bit``'s arguments
            for name in ("exp_avg_factor", "exp_avg_sq_low", "exp_avg_sq_high"):
                moments[name] = _zeros_per_block(weight, block_size(weight))
        return moments

    def _update(self, states: list[ParameterState], lr: float, weight_decay: float) -> None:
        super()._update([state for state in states if not _is_lowbit(state)], lr, weight_decay)
        for state in filter(_is_lowbit, states):
            state.step += 1  # for empty shards too: all ranks must save the same count
            if local_shard(state.weight).numel():
                with state.full_precision_shard() as weight:
                    self._update_one(state, weight, lr, weight_decay)

    def _update_one(self, state: ParameterState, weight: Tensor, lr: float, weight_decay: float) -> None:
        step = int(state.step)
        factors = adamw_formula.factor_tensors(self._factors(state, lr, weight_decay), step=step, like=weight)
        # The rounding depends on name, step and position in the shard: replicas agree, and a resume repeats it.
        seed = (self._seeds[state.name] + step * _SEED_STRIDE) % 2**32
        # a tensor, since a graph would hold a number as a constant and be compiled anew in every step
        seed_tensor = torch.tensor(seed).to(weight.device, non_blocking=True)
        # Two dimensions whatever the weight has, one block a row (or one row in all): one graph serves all shapes.
        rows = local_shard(state.moments["exp_avg_factor"]).numel() if self.in_blocks else 1
        moments = [local_shard(moment).view(rows, -1) for moment in state.moments.values()]
        grad = state.local_grad.reshape(rows, -1)
        self.update_rule(weight.view(rows, -1), grad, *moments, factors, seed_tensor)


def update_bf16(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, factors: tuple[Tensor, ...], seed: Tensor
) -> None:
    """Update one parameter in place: weight and grad float32, moments bfloat16, all of one shape.
    ``factors``: ``adamw_formula.factor_tensors``; ``seed``: 0-dim int64 seed of the stochastic rounding.
    """
    decoded = exp_avg.to(torch.float32), exp_avg_sq.to(torch.float32)
    new_exp_avg, new_exp_avg_sq = adamw_formula.adamw(weight, grad, *decoded, factors)
    bits = moment_codes.random_bits(new_exp_avg, seed)
    # one draw of 32 bits serves both moments, in disjoint parts: their roundings stay independent
    exp_avg.copy_(moment_codes.to_bfloat16(new_exp_avg, bits & 0xFFFF))
    exp_avg_sq.copy_(moment_codes.to_bfloat16(new_exp_avg_sq, bits >> 16))


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
    """As ``update_bf16`` for blocks [n, b]: uint8 codes [n, b], and block factors [n, 1] that decode them."""
    decoded = moment_codes.decode_signed(exp_avg, factor), moment_codes.decode_positive(exp_avg_sq, low, high)
    new_exp_avg, new_exp_avg_sq = adamw_formula.adamw(weight, grad, *decoded, factors)
    bits = moment_codes.random_bits(new_exp_avg, seed)
    encoded_exp_avg = moment_codes.encode_signed(new_exp_avg, bits & 0xFFFFF)
    encoded_exp_avg_sq = moment_codes.encode_positive(new_exp_avg_sq, bits >> 20)
    targets = exp_avg, factor, exp_avg_sq, low, high
    for target, value in zip(targets, (*encoded_exp_avg, *encoded_exp_avg_sq), strict=True):
        target.copy_(value)


@functools.cache
def _compile_update(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, fullgraph=True, dynamic=True)


def _is_lowbit(state: ParameterState) -> bool:
    return state.moments["exp_avg"].dtype != torch.float32


def block_size(weight: Tensor) -> int:
    """The largest power of two, up to BLOCK, that divides every shard's rows; 1 where rows are sharded unevenly."""
    # No block crosses a shard's edge, so that codes and factors are sharded exactly as the weight is, and a checkpoint
    # of one mesh loads on another.
    row_length, num_shards = weight.shape[-1], _shards_per_row(weight)
    return math.gcd(row_length // num_shards, BLOCK) if row_length % num_shards == 0 else 1


def _shards_per_row(weight: Tensor) -> int:
    """Number of pieces into which the mesh shards the last dimension."""
    if not isinstance(weight, DTensor):
        return 1
    axes = zip(weight.placements, weight.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in axes if getattr(placement, "dim", None) == weight.ndim - 1)


def _zeros_per_block(weight: Tensor, block: int) -> Tensor:
    """Zeros [..., row length / block], sharded as the weight."""
    shard = local_shard(weight)
    zeros = shard.new_zeros((*shard.shape[:-1], shard.shape[-1] // block))
    if not isinstance(weight, DTensor):
        return zeros
    # explicit global shape and stride: from an uneven shard DTensor could not infer them
    layout = torch.empty((*weight.shape[:-1], weight.shape[-1] // block), device="meta")
    return DTensor.from_local(
        zeros, weight.device_mesh, weight.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )
