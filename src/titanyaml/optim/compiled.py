"""AdamW by torch.compile: clipping, update and publication of a parameter in one graph, the same for all sizes.

A split master is put together before and taken apart behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from titanyaml.config import schema
from titanyaml.distributed import compat_compile
from titanyaml.errors import TitanError
from titanyaml.optim import formula
from titanyaml.optim.adamw import Slot, local
from titanyaml.optim.fused import FusedAdamW


class CompiledAdamW(FusedAdamW):
    """As ``FusedAdamW``, for whatever dtype and device torch.compile knows.

    Args:
        backend: torch.compile backend.
    """

    def __init__(
        self,
        spec: schema.Optim,
        named_params: Mapping[str, nn.Parameter],
        *,
        masters: Mapping[str, Tensor],
        one_backward: bool,
        backend: str,
        elsewhere: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(spec, named_params, masters=masters, one_backward=one_backward, elsewhere=elsewhere)
        self.rule = _compiled(backend)

    def runs(self) -> str:
        """See ``Optimizer``."""
        return "compiled" + self._splits() + ("" if self.accumulates else ", gradients read as autograd leaves them")

    def _update_one(self, slot: Slot, name: str, grad: Tensor, clip: Tensor, lr: float, weight_decay: float) -> None:
        state = self._state[name]
        with slot.opened() as weight:
            factors = formula.factors(
                int(slot.step),
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                eps=self.eps,
                weight_decay=weight_decay,
                like=weight,
            )
            tensors = [weight, grad, local(state["exp_avg"]), local(state["exp_avg_sq"])]
            tensors += [] if slot.master is None or slot.is_split else [local(slot.parameter)]
            if all(tensor.is_contiguous() for tensor in tensors):
                # one graph for all shapes; Dynamo would look at what a view is a view of
                tensors = [tensor.view(-1).detach() for tensor in tensors]
            self.rule(*tensors, clip=clip, factors=factors)


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
    """One AdamW update of one parameter, in place.

    Args:
        weight, exp_avg, exp_avg_sq: full precision. grad: that, or narrower. All of one shape.
        stored: the narrower parameter into which the weight is rounded. clip: 0-dim, multiplies the gradient.
        factors: ``formula.factors``.
    """
    mean, square = formula.adamw(weight, grad.to(weight.dtype) * clip, exp_avg, exp_avg_sq, factors)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    if stored is not None:
        stored.copy_(weight)


@functools.cache
def _compiled(backend: str) -> Callable[..., Any]:
    return compat_compile.compile_function(update, backend=backend, dynamic=True, explain=_explain)


def _explain(error: Exception) -> NoReturn:
    raise TitanError(f"the update cannot be compiled: {error}", key="compile.optimizer", hint="compile.optimizer=false")
