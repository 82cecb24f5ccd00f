"""AdamW over full-precision weights, whatever dtype the model computes in.

The update is element-wise, so it runs on the local shards of DTensors: no mixture of meshes, placements and plain
tensors ever meets in one multi-tensor call. The state is kept as DTensors like the weights, for checkpoints.

Where a parameter is stored in bfloat16, its *master* (a float32 copy) is what is optimized; each microbatch's gradient
is added to a float32 sum as soon as autograd has it, and the bfloat16 one is freed. A bfloat16 sum of 16 microbatches
was off by up to 0.8 % in a small model, and a bfloat16 weight drops every update smaller than 1/512 of it. A split
master (``kernels.master``) is the same number in less memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from titanyaml import float8
from titanyaml.config import schema
from titanyaml.distributed import compat
from titanyaml.errors import TitanError
from titanyaml.kernels import master_weights as masters_of
from titanyaml.optim.groups import Group, make_groups


class Optimizer(Protocol):
    """What the loop asks of an optimizer."""

    names: tuple[str, ...]

    def grads(self) -> list[Tensor]:
        """Gradients after all microbatches, in the order of ``names``; what is clipped is these.

        Their sums are in full precision; a single microbatch's may be in the dtype of the stored parameter.
        """
        ...

    def step(self, lr: float, *, clip: Tensor | None = None) -> None:
        """One update with the gradients that ``grads`` returns, times the 0-dim ``clip`` (on their device)."""
        ...

    def runs(self) -> str:
        """What does the update, for the log."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients and free their memory."""
        ...

    def master(self, name: str) -> Tensor:
        """The full-precision weight, to be read: what is optimized, or a copy where that is split."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """All of them by name: what a checkpoint saves, and fills in place."""
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over what ``weights`` gave, after a checkpoint was read into it, and round it into the model."""
        ...

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Live state by parameter name; loading into these tensors in place restores the optimizer."""
        ...


@dataclass(eq=False)
class Slot:
    """One parameter, and its master where it has one: in float32, or split."""

    name: str
    parameter: nn.Parameter
    master: Tensor | None
    moments: dict[str, Tensor]
    step: Tensor
    grad_sum: Tensor | None = None

    @property
    def is_split(self) -> bool:
        return masters_of.is_split(self.master)

    @property
    def weight(self) -> Tensor:
        """What is optimized, or, of a split master, what lies as that would."""
        return self.parameter if self.master is None else self.master

    @property
    def dtype(self) -> torch.dtype:
        """Of the update."""
        return torch.float32 if self.is_split else self.weight.dtype

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """The shard on this rank in full precision, for an update in place."""
        if not self.is_split:
            yield local(self.weight)
            return
        weight, remainder = local(self.parameter), local(self.master)
        value = masters_of.join(weight, remainder)
        yield value
        masters_of.split_(value, weight, remainder)

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.grad if self.grad_sum is None else self.grad_sum

    @torch.no_grad()
    def accumulate(self, parameter: nn.Parameter) -> None:
        """Hook of autograd: add the fresh gradient to the sum and free it."""
        if self.grad_sum is None:
            self.grad_sum = parameter.grad.to(self.dtype)
        else:
            self.grad_sum.add_(parameter.grad)
        parameter.grad = None


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, 2019) with torch's fused, foreach or one-by-one kernels."""

    accumulates = True  # gradients of parameters with a master into a full-precision sum

    def __init__(
        self,
        spec: schema.Optim,
        named_params: Mapping[str, nn.Parameter],
        *,
        masters: Mapping[str, Tensor],
        implementation: str,
        elsewhere: Mapping[str, Tensor] | None = None,
    ) -> None:
        unique = {id(parameter): name for name, parameter in reversed(named_params.items())}
        params = {name: p for name, p in named_params.items() if unique[id(p)] == name}
        unknown = set(masters) - set(params)
        assert not unknown, f"masters of unknown parameters: {sorted(unknown)}"
        self.beta1, self.beta2, self.eps = spec.beta1, spec.beta2, spec.eps
        self.implementation = implementation
        self.names = tuple(params)
        everything = {**(elsewhere or {}), **params}
        self.groups: list[Group] = [
            Group(names, group.lr_scale, group.weight_decay)
            for group in make_groups(spec, everything)
            if (names := tuple(name for name in group.names if name in params))
        ]
        self._slots = {name: self._slot(name, p, masters.get(name)) for name, p in params.items()}

    def _slot(self, name: str, parameter: nn.Parameter, master: Tensor | None) -> Slot:
        """State of one parameter, there before the first step so that a checkpoint can be loaded into it."""
        assert parameter.requires_grad, f"{name} is frozen"
        assert master is not None or parameter.dtype.itemsize >= 4, f"{name} is {parameter.dtype} and has no master"
        weight = (parameter if master is None else master).detach()
        dtype = torch.float32 if masters_of.is_split(master) else weight.dtype
        # fused kernels count on the device, the others on the host, where reading the count waits for nothing
        place = local(weight).device if self.implementation == "fused" else "cpu"
        moments = self._moments(float8.plain(weight).to(dtype))
        step = torch.zeros((), dtype=torch.float32, device=place)
        slot = Slot(name, parameter, None if master is None else weight, moments, step)
        if master is not None and self.accumulates:
            parameter.register_post_accumulate_grad_hook(slot.accumulate)
        return slot

    def _moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Zeros for the moments of a weight, as they are kept and saved."""
        return {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}

    def grads(self) -> list[Tensor]:
        """Gradients in the order of ``names``, each placed like its weight; see ``Optimizer`` for the dtype.

        Raises:
            TitanError: a parameter got none: it would silently stay as it is, decay included.
        """
        missing = [name for name, slot in self._slots.items() if slot.grad is None]
        if missing:
            raise TitanError(f"no gradient reached {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
        for slot in self._slots.values():
            if isinstance(slot.grad, DTensor) and slot.grad.placements != slot.weight.placements:
                self._replace(slot)
        return [slot.grad for slot in self._slots.values()]

    @staticmethod
    def _replace(slot: Slot) -> None:
        """Move a gradient to where its weight is: autograd may leave it as a pending sum."""
        placed = slot.grad.to(slot.dtype).redistribute(placements=slot.weight.placements)
        if slot.master is not None:
            slot.grad_sum, slot.parameter.grad = placed, None
        else:
            slot.parameter.grad = placed

    @torch.no_grad()
    def step(self, lr: float, *, clip: Tensor | None = None) -> None:
        """One update; ``lr`` is multiplied by each group's ``lr_scale``, the gradients (in place) by ``clip``."""
        grads = self.grads()  # complains of missing ones
        if clip is not None:
            compat.foreach_mul_([local(grad) for grad in grads], clip)
        for group in self.groups:
            self._update([self._slots[name] for name in group.names], lr * group.lr_scale, group.weight_decay)
        self._publish()

    def _update(self, slots: list[Slot], lr: float, weight_decay: float) -> None:
        for slot in slots:
            if local(slot.weight).numel() == 0:
                slot.step += 1  # an empty shard: nothing to update, but all ranks save the same count
        slots = [slot for slot in slots if local(slot.weight).numel()]
        # a split master is whole during its own update alone
        together = [[slot for slot in slots if not slot.is_split], *([slot] for slot in slots if slot.is_split)]
        for some in filter(None, together):
            with ExitStack() as opened:
                self._update_together(some, [opened.enter_context(slot.opened()) for slot in some], lr, weight_decay)

    def _update_together(self, slots: list[Slot], weights: list[Tensor], lr: float, weight_decay: float) -> None:
        adamw(
            weights,
            [local(slot.grad) for slot in slots],
            [local(slot.moments["exp_avg"]) for slot in slots],
            [local(slot.moments["exp_avg_sq"]) for slot in slots],
            [],
            [slot.step for slot in slots],
            foreach=self.implementation == "foreach",
            fused=self.implementation == "fused",
            amsgrad=False,
            maximize=False,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            lr=lr,
            weight_decay=weight_decay,
        )

    def runs(self) -> str:
        """See ``Optimizer``."""
        return f"torch, {self.implementation}{self._splits()}"

    def _splits(self) -> str:
        return ", split masters" if any(slot.is_split for slot in self._slots.values()) else ""

    def zero_grad(self) -> None:
        """Forget the gradients and free their memory."""
        for slot in self._slots.values():
            slot.parameter.grad = slot.grad_sum = None

    def master(self, name: str) -> Tensor:
        """See ``Optimizer``; a copy of a plain tensor is in host memory."""
        slot = self._slots[name]
        return float8.plain(masters_of.whole(slot.parameter.detach(), slot.master))

    def weights(self) -> dict[str, Tensor]:
        """See ``Optimizer``."""
        return {name: self.master(name) for name in self.names}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """See ``Optimizer``."""
        for name, slot in self._slots.items():
            masters_of.store(weights[name], slot.parameter, slot.master)

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the float32 masters (to nearest) into the parameters of the model."""
        slots = [slot for slot in self._slots.values() if slot.master is not None and not slot.is_split]
        if slots:
            compat.foreach_copy_([local(s.parameter) for s in slots], [local(s.weight) for s in slots])

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """``{name: {exp_avg, exp_avg_sq, step}}``; moments like the weight, ``step`` 0-dim float32 (exact to 2**24)."""
        return {name: {**slot.moments, "step": slot.step} for name, slot in self._slots.items()}


def local(tensor: Tensor) -> Tensor:
    """The shard on this rank, sharing memory; to be called without grad mode."""
    return float8.plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
