"""AdamW by torch.compile: clipping, update and rounding into the model in one graph for parameters of all shapes."""

import functools
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from titanyaml.config import schema
from titanyaml.distributed import compat_compile
from titanyaml.errors import TitanError
from titanyaml.kernels.adamw import Factors
from titanyaml.optim import adamw_formula
from titanyaml.optim.adamw import ParameterState, PerParameterAdamW, TrainedParameters, local_shard


class CompiledAdamW(PerParameterAdamW):
    """``AdamW`` in any dtype and on any device that torch.compile supports.

    Args:
        backend: torch.compile backend.
    """

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
    """Update one parameter in place; all tensors have one shape.

    Args:
        weight, exp_avg, exp_avg_sq: full precision. grad: full precision or narrower.
        stored: the narrower parameter into which the weight is rounded.
        clip: 0-dim factor on the gradient.
        factors: ``adamw_formula.factor_tensors``.
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
