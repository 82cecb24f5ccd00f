"""AdamW over full-precision weights, whatever dtype the model computes in.

Where a parameter is stored in bfloat16, its *master*, the float32 value, is what is optimized: in bfloat16 alone a
weight would drop every update below 1/512 of it. A split master (``kernels.master_weights``) is the same number in 2
bytes beside the stored weight. Moments are float32 too (float64 for float64 weights), and DTensors as the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from titanyaml import float8
from titanyaml.config import schema
from titanyaml.distributed import compat
from titanyaml.errors import TitanError
from titanyaml.kernels import master_weights
from titanyaml.kernels.adamw import Factors
from titanyaml.optim.parameter_groups import ParameterGroup, make_groups


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of one optimizer.

    Args:
        named: trainable parameters by name.
        masters: of every parameter narrower than float32: its float32 copy, or the remainder of a split master.
        remote: parameters that only other pipeline ranks hold, on meta; a group's pattern may match those alone.
    """

    named: Mapping[str, nn.Parameter]
    masters: Mapping[str, Tensor]
    remote: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, named: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor], remote: Mapping[str, Tensor]
    ) -> TrainedParameters:
        """Drop every name of a tied parameter but the first: it must be updated once."""
        first_names: dict[int, str] = {}
        for name, parameter in named.items():
            first_names.setdefault(id(parameter), name)
        unique = {name: parameter for name, parameter in named.items() if first_names[id(parameter)] == name}
        unknown = set(masters) - set(unique)
        assert not unknown, f"masters of unknown parameters: {sorted(unknown)}"
        return cls(unique, masters, remote)


@dataclass(eq=False)
class ParameterState:
    """Optimizer state of one parameter. ``master``: float32, the int16 remainder of a split one, or None."""

    name: str
    parameter: nn.Parameter
    master: Tensor | None
    moments: dict[str, Tensor]
    step: Tensor
    grad_sum: Tensor | None = None

    @property
    def is_split(self) -> bool:
        return master_weights.is_split(self.master)

    @property
    def weight(self) -> Tensor:
        """The optimized tensor; of a split master its remainder, which has the same placement and local shape."""
        return self.parameter if self.master is None else self.master

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the update's arithmetic."""
        return torch.float32 if self.is_split else self.weight.dtype

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.grad if self.grad_sum is None else self.grad_sum

    @property
    def local_grad(self) -> Tensor:
        assert self.grad is not None, f"{self.name} has no gradient"
        return local_shard(self.grad)

    @contextmanager
    def full_precision_shard(self) -> Iterator[Tensor]:
        """Yield this rank's shard for an update in place; a split master is joined before and split again after."""
        if self.master is None or not self.is_split:
            yield local_shard(self.weight)
            return
        weight, remainder = local_shard(self.parameter), local_shard(self.master)
        value = master_weights.join(weight, remainder)
        yield value
        master_weights.split_(value, weight, remainder)

    @torch.no_grad()
    def accumulate(self, parameter: nn.Parameter) -> None:
        """Autograd hook: add the fresh gradient to the full-precision sum and free it."""
        # A bfloat16 sum of 16 microbatches was off by up to 0.8 % in a small model. Freed here, before autograd forms
        # the next parameter's gradient, bfloat16 gradients never exist all at once.
        assert parameter.grad is not None
        if self.grad_sum is None:
            self.grad_sum = parameter.grad.to(self.dtype)
        else:
            self.grad_sum.add_(parameter.grad)
        parameter.grad = None


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with torch's fused, foreach or single-tensor kernels.
    ``implementation`` is ``fused``, ``foreach``, ``loop``, or ``kernel`` of the subclasses with their own update;
    ``accumulates`` adds gradients of parameters with a master into a full-precision sum.
    """

    def __init__(
        self, spec: schema.Optim, params: TrainedParameters, *, implementation: str, accumulates: bool = True
    ) -> None:
        self.beta1, self.beta2, self.eps = spec.beta1, spec.beta2, spec.eps
        self.implementation, self.accumulates = implementation, accumulates
        self.names = tuple(params.named)
        # Groups are made over all pipeline ranks' parameters, so that a pattern is refused only where none matches it.
        self.groups = [
            ParameterGroup(local_names, group.lr_scale, group.weight_decay)
            for group in make_groups(spec, {**params.remote, **params.named})
            if (local_names := tuple(name for name in group.names if name in params.named))
        ]
        self._states = {name: self._new_state(name, p, params.masters.get(name)) for name, p in params.named.items()}

    def _new_state(self, name: str, parameter: nn.Parameter, master: Tensor | None) -> ParameterState:
        """Allocate the state before the first step, so that a checkpoint can be loaded into it."""
        assert parameter.requires_grad, f"{name} is frozen"
        assert master is not None or parameter.dtype.itemsize >= 4, f"{name} is {parameter.dtype} and has no master"
        weight = (parameter if master is None else master).detach()
        dtype = torch.float32 if master_weights.is_split(master) else weight.dtype
        # torch's fused kernel reads the step count on the device; all others read it on the host, without a sync
        step_device = local_shard(weight).device if self.implementation == "fused" else torch.device("cpu")
        moments = self._new_moments(float8.unwrap(weight).to(dtype))
        step = torch.zeros((), dtype=torch.float32, device=step_device)
        state = ParameterState(name, parameter, None if master is None else weight, moments, step)
        if master is not None and self.accumulates:
            parameter.register_post_accumulate_grad_hook(state.accumulate)
        return state

    def _new_moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Zero moments of a weight, as they are stored and saved."""
        return {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}

    def grads(self) -> list[Tensor]:
        """Gradients after all microbatches, in the order of ``names`` and placed like their weights.
        Their sums are in full precision; a single microbatch's gradient may be in the stored dtype. A TitanError says
        that a parameter got no gradient: it would silently stay as it is, without even decay.
        """
        missing = [name for name, state in self._states.items() if state.grad is None]
        if missing:
            raise TitanError(f"no gradient reached {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
        return [self._placed_grad(state) for state in self._states.values()]

    @staticmethod
    def _placed_grad(state: ParameterState) -> Tensor:
        """Redistribute a gradient that autograd left placed unlike its weight, for example as a pending sum."""
        grad, weight = state.grad, state.weight
        assert grad is not None
        if not (isinstance(grad, DTensor) and isinstance(weight, DTensor)) or grad.placements == weight.placements:
            return grad
        # widened before the reduction: a pending sum is to be summed over ranks in full precision
        wide = grad.to(state.dtype)
        assert isinstance(wide, DTensor)
        placed = wide.redistribute(placements=weight.placements)
        if state.master is None:
            state.parameter.grad = placed
        else:
            state.grad_sum, state.parameter.grad = placed, None
        return placed

    @torch.no_grad()
    def step(self, lr: float, *, clip: Tensor | None = None) -> None:
        """Update once; the 0-dim ``clip``, on the gradients' device, scales them in place."""
        grads = self.grads()
        if clip is not None:
            compat.foreach_mul_([local_shard(grad) for grad in grads], clip)
        for group in self.groups:
            self._update([self._states[name] for name in group.names], lr * group.lr_scale, group.weight_decay)
        self._publish()

    def _update(self, states: list[ParameterState], lr: float, weight_decay: float) -> None:
        # AdamW is element-wise, so it runs on local shards: a multi-tensor call never meets a mixture of meshes,
        # placements and plain tensors.
        for state in states:
            if local_shard(state.weight).numel() == 0:
                state.step += 1  # an empty shard has nothing to update, but all ranks must save the same count
        states = [state for state in states if local_shard(state.weight).numel()]
        # Split masters are updated one at a time: only one joined float32 copy exists at any moment.
        batches = [[state for state in states if not state.is_split], *([state] for state in states if state.is_split)]
        for batch in filter(None, batches):
            with ExitStack() as stack:
                weights = [stack.enter_context(state.full_precision_shard()) for state in batch]
                self._update_batch(batch, weights, lr, weight_decay)

    def _update_batch(
        self, states: list[ParameterState], weights: list[Tensor], lr: float, weight_decay: float
    ) -> None:
        adamw(
            weights,
            [state.local_grad for state in states],
            [local_shard(state.moments["exp_avg"]) for state in states],
            [local_shard(state.moments["exp_avg_sq"]) for state in states],
            [],
            [state.step for state in states],
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

    def _factors(self, state: ParameterState, lr: float, weight_decay: float) -> Factors:
        """Scalars of the update numbered ``state.step``, for subclasses with their own update."""
        betas = {"beta1": self.beta1, "beta2": self.beta2}
        return Factors.at(int(state.step), lr=lr, **betas, eps=self.eps, weight_decay=weight_decay)

    def describe(self) -> str:
        """Name of the implementation, for the log."""
        return f"torch, {self.implementation}{self._split_note()}"

    def _split_note(self) -> str:
        return ", split masters" if any(state.is_split for state in self._states.values()) else ""

    def zero_grad(self) -> None:
        """Drop the gradients and free their memory."""
        for state in self._states.values():
            state.parameter.grad = state.grad_sum = None

    def master(self, name: str) -> Tensor:
        """The full-precision weight for reading: the optimized tensor, or a copy in host memory where it is split."""
        state = self._states[name]
        return float8.unwrap(master_weights.full_precision(state.parameter.detach(), state.master))

    def weights(self) -> dict[str, Tensor]:
        """All masters by name; a checkpoint saves them, or fills them in place before ``load``."""
        return {name: self.master(name) for name in self.names}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Round into the model what ``weights`` returned and a checkpoint filled."""
        for name, state in self._states.items():
            master_weights.store_full_precision(weights[name], state.parameter, state.master)

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the float32 masters to nearest into the model; split masters were stored by their own update."""
        states = [state for state in self._states.values() if state.master is not None and not state.is_split]
        if states:
            compat.foreach_copy_([local_shard(s.parameter) for s in states], [local_shard(s.weight) for s in states])

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Live state ``{name: {exp_avg, exp_avg_sq, step}}``; filling it in place restores the optimizer.
        Moments are like the weight, ``step`` is 0-dim float32 (exact to 2**24).
        """
        return {name: {**state.moments, "step": state.step} for name, state in self._states.items()}


class PerParameterAdamW(AdamW):
    """Base of updates that handle one parameter at a time: clipping, update and rounding into the model in one pass."""

    def __init__(self, spec: schema.Optim, params: TrainedParameters, *, one_backward: bool) -> None:
        # After one backward pass a bfloat16 gradient is read as it is: a float32 copy would hold the same numbers.
        super().__init__(spec, params, implementation="kernel", accumulates=not one_backward)

    @torch.no_grad()
    def step(self, lr: float, *, clip: Tensor | None = None) -> None:
        """See ``AdamW``, but gradients are left unclipped: scaling them would be one more pass over memory."""
        grads = dict(zip(self.names, map(local_shard, self.grads()), strict=True))
        if clip is None:
            clip = torch.ones((), device=next(iter(grads.values())).device)
        for group in self.groups:
            for state in (self._states[name] for name in group.names):
                state.step += 1  # for empty shards too: all ranks must save the same count
                if local_shard(state.weight).numel():
                    factors = self._factors(state, lr * group.lr_scale, group.weight_decay)
                    self._update_one(state, grads[state.name], clip, factors)
                # Our kernels write without autograd noticing. Holders of a copy, such as the cached float8 cast of a
                # weight, compare versions to see that it is stale.
                torch.autograd.graph.increment_version(local_shard(state.weight))

    def _update_one(self, state: ParameterState, grad: Tensor, clip: Tensor, factors: Factors) -> None:
        raise NotImplementedError

    def _accumulation_note(self) -> str:
        return "" if self.accumulates else ", gradients read as autograd leaves them"


def local_shard(tensor: Tensor) -> Tensor:
    """The shard on this rank, sharing memory. To be called without grad mode, which would record ``to_local``."""
    return float8.unwrap(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
