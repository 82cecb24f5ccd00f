"""AdamW by our own kernel: one pass over a parameter's memory, clipping and publication included."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanyaml.config import schema
from titanyaml.kernels.adamw import Factors, adamw_
from titanyaml.kernels.master_weights import is_split
from titanyaml.optim.adamw import AdamW, Slot, local


class FusedAdamW(AdamW):
    """The same update, state and checkpoints as ``AdamW``.

    With one backward pass a step, a stored bfloat16 parameter's gradient is read as autograd left it: a float32 copy
    would hold the same numbers. With several, their sum is float32 as everywhere.

    Args:
        masters: float32, or split. one_backward: a step has a single backward pass. elsewhere: see ``build``.
    """

    def __init__(
        self,
        spec: schema.Optim,
        named_params: Mapping[str, nn.Parameter],
        *,
        masters: Mapping[str, Tensor],
        one_backward: bool,
        elsewhere: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.accumulates = not one_backward
        super().__init__(spec, named_params, masters=masters, implementation="kernel", elsewhere=elsewhere)
        self._state = self.state_tensors()

    def runs(self) -> str:
        """See ``Optimizer``."""
        return "fused" + self._splits() + ("" if self.accumulates else ", gradients read as autograd leaves them")

    @torch.no_grad()
    def step(self, lr: float, *, clip: Tensor | None = None) -> None:
        """See ``AdamW``; gradients are left as they are."""
        grads = dict(zip(self.names, self.grads(), strict=True))
        if clip is None:
            clip = torch.ones((), device=local(next(iter(grads.values()))).device)
        for group in self.groups:
            for name in group.names:
                slot = self._slots[name]
                slot.step += 1  # on the host; an empty shard counts too
                if local(slot.weight).numel():
                    self._update_one(slot, name, local(grads[name]), clip, lr * group.lr_scale, group.weight_decay)
                # kernels write behind torch's back; whoever keeps a copy of a weight must see that it is old
                torch.autograd.graph.increment_version(local(slot.weight))

    def _update_one(self, slot: Slot, name: str, grad: Tensor, clip: Tensor, lr: float, weight_decay: float) -> None:
        factors = Factors.at(
            int(slot.step), lr=lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=weight_decay
        )
        state = self._state[name]
        adamw_(
            None if slot.master is None else local(slot.parameter),
            local(slot.weight),
            grad.contiguous(),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            clip,
            factors,
        )


def fits(named_params: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> bool:
    """Whether the kernel can update these: float32 or split masters, or float32 parameters; and contiguous shards."""
    with torch.no_grad():
        weights = [local(masters.get(name, parameter.detach())) for name, parameter in named_params.items()]
    stored = [local(parameter.detach()) for parameter in named_params.values()]
    known = all(weight.dtype == torch.float32 or is_split(weight) for weight in weights)
    return known and all(tensor.is_contiguous() for tensor in [*weights, *stored])
