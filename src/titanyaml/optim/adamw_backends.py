"""AdamW in one pass: by our Triton kernel, or by torch.compile, one graph for the parameters of all shapes."""

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from titanyaml.config import schema
from titanyaml.distributed import compat_compile
from titanyaml.errors import TitanError
from titanyaml.kernels.adamw import Factors, adamw_
from titanyaml.kernels.master_weights import is_split
from titanyaml.optim import adamw_formula
from titanyaml.optim.adamw import ParameterState, PerParameterAdamW, TrainedParameters, local_shard


class TritonAdamW(PerParameterAdamW):
    """The update, state and checkpoints of ``AdamW``; masters are float32 or split."""

    def describe(self) -> str:
        """See ``AdamW``."""
        return f"fused{self._split_note()}{self._accumulation_note()}"

    def _update_one(self, state: ParameterState, grad: Tensor, clip: Tensor, factors: Factors) -> None:
        moments = local_shard(state.moments["exp_avg"]), local_shard(state.moments["exp_avg_sq"])
        stored = None if state.master is None else local_shard(state.parameter)
        adamw_(stored, local_shard(state.weight), grad.contiguous(), *moments, clip, factors)


def kernel_supports(params: TrainedParameters) -> bool:
    """Whether all weights are float32 or split masters, and all shards contiguous: the kernel addresses flat memory."""
    with torch.no_grad():
        stored = [local_shard(parameter.detach()) for parameter in params.named.values()]
        weights = [local_shard(params.masters.get(name, p.detach())) for name, p in params.named.items()]
    supported_dtypes = all(weight.dtype == torch.float32 or is_split(weight) for weight in weights)
    return supported_dtypes and all(tensor.is_contiguous() for tensor in [*weights, *stored])


class CompiledAdamW(PerParameterAdamW):
    """``AdamW`` in any dtype and on any device that torch.compile with ``backend`` supports."""

    def __init__(self, spec: schema.Optim, params: TrainedParameters, *, one_backward: bool, backend: str) -> None:
        super().__init__(spec, params, one_backward=one_backward)
        self._compiled_update = _compile_update(backend)

    def describe(self) -> str:
        """See ``AdamW``."""
        return f"compiled{self._split_note()}{self._accumulation_note()}"

    def _update_one(self, state: ParameterState, grad: Tensor, clip: Tensor, factors: Factors) -> None:
        # A split master is joined and split outside the graph; its update needs no separate rounding into the model.
        with state.full_precision_shard() as weight:
            tensors = [weight, grad, local_shard(state.moments["exp_avg"]), local_shard(state.moments["exp_avg_sq"])]
            if state.master is not None and not state.is_split:
                tensors.append(local_shard(state.parameter))
            if all(tensor.is_contiguous() for tensor in tensors):
                # One dimension: one graph for all shapes. Detached: Dynamo would guard on what a view is a view of.
                tensors = [tensor.view(-1).detach() for tensor in tensors]
            factor_tensors = adamw_formula.factor_tensors(factors, step=int(state.step), like=weight)
            self._compiled_update(*tensors, clip=clip, factors=factor_tensors)


def update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    stored: Tensor | None = None,
    *,
    clip: Tensor,
    factors: tuple[Tensor, ...],
) -> None:
    """Update one parameter in place; all tensors have one shape. ``factors``: ``adamw_formula.factor_tensors``.
    weight, exp_avg, exp_avg_sq are in full precision, grad may be narrower; the weight is rounded into ``stored``.
    ``clip``: 0-dim factor on the gradient.
    """
    clipped = grad.to(weight.dtype) * clip
    new_exp_avg, new_exp_avg_sq = adamw_formula.adamw(weight, clipped, exp_avg, exp_avg_sq, factors)
    exp_avg.copy_(new_exp_avg)
    exp_avg_sq.copy_(new_exp_avg_sq)
    if stored is not None:
        stored.copy_(weight)


@functools.cache
def _compile_update(backend: str) -> Callable[..., None]:
    return compat_compile.compile_function(update, backend=backend, dynamic=True, explain=_raise_compile_error)


def _raise_compile_error(error: Exception) -> NoReturn:
    raise TitanError(f"the update cannot be compiled: {error}", key="compile.optimizer", hint="compile.optimizer=false")
