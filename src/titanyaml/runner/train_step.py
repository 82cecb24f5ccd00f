"""One optimizer step: forward and backward of every microbatch, one gradient norm, and one update or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from titanyaml.distributed import comm, norm
from titanyaml.distributed.env import Env
from titanyaml.errors import NonFiniteError
from titanyaml.loss import IGNORE_INDEX, CrossEntropy
from titanyaml.optim import AdamW
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.runner.breakdown import UPDATE

if TYPE_CHECKING:
    from titanyaml.data.loader import Batch
    from titanyaml.runner.routing import Routing


@dataclass(frozen=True)
class StepResult:
    """Figures of one step, equal on all ranks."""

    loss: float  # mean over the valid tokens of all ranks, in nats
    grad_norm: float  # before clipping
    tokens: int  # valid ones of all ranks
    routing: dict[str, float] = field(default_factory=dict)  # of a mixture of experts (``Routing.end``)


def valid_tokens(batches: Sequence[Batch]) -> int:
    """Labels of this rank's microbatches that are not ignored."""
    return sum(int((batch.labels_BS != IGNORE_INDEX).sum()) for batch in batches)


def model_inputs(batch: Batch, device: torch.device, *, documents: bool) -> dict[str, Tensor | None]:
    """A batch as keyword arguments of the model, on its device; ids of documents only where they are read."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return {
        "tokens_BS": move(batch.tokens_BS),
        "labels_BS": move(batch.labels_BS),
        "documents_BS": move(batch.documents_BS) if documents else None,
    }


@dataclass
class TrainStep:
    """Callable that trains one step.

    The loss is a sum over tokens, divided once by the number of valid tokens of *all* ranks and microbatches, so that
    the gradient does not depend on how the batch is split.
    """

    model: nn.Module
    optimizer: AdamW
    _: KW_ONLY
    loss_fn: CrossEntropy
    max_norm: float | None  # gradients are clipped to it; None: not at all
    documents: bool  # whether attention is masked by document
    env: Env
    adds_loss: bool = True  # whether this rank's loss is added up: tp peers hold the same one
    routing: Routing | None = None  # of a mixture of experts
    square_sum: Callable[[Sequence[Tensor]], Tensor] | None = None  # see ``norm.grad_norm``

    def __call__(self, batches: Sequence[Batch], *, tokens: int, lr: float) -> StepResult:
        """Train on this rank's microbatches; ``tokens`` are the valid ones of all data ranks.

        Raises NonFiniteError for a loss or gradient norm that is not finite; weights and moments are as before.
        """
        if self.routing is not None:
            self.routing.begin(tokens)
        loss_sum = self._accumulate(batches, tokens)
        grads = self.optimizer.grads()
        if isinstance(self.model, StagedModel):
            # a tied weight lives on the first and the last stage: its two gradients are one, and count once
            counted = self.model.sum_shared_gradient(dict(zip(self.optimizer.names, grads, strict=True)))
            grad_norm = norm.grad_norm(counted, stages=self.model.group, square_sum=self.square_sum)
        else:
            grad_norm = norm.grad_norm(grads, square_sum=self.square_sum)
        # Loss and norm are read before the update, which then can be refused. The read waits for the device.
        [total] = comm.sum_scalars([float(loss_sum) if self.adds_loss else 0.0], self.env)
        result = StepResult(loss=total / max(tokens, 1), grad_norm=float(grad_norm), tokens=tokens)
        # the figures are equal on all ranks, so that all of them raise here and none waits for another in a collective
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"loss {result.loss}, gradient norm {result.grad_norm}: no update was made",
                hint="a lower optim.lr, longer schedule.warmup_steps, or resume from an earlier checkpoint",
            )
        with record_function(UPDATE):
            # clipped inside the update: scaling gradients first would be one more pass, and round bfloat16 ones
            clip = None if self.max_norm is None else norm.clip_factor(grad_norm, self.max_norm)
            self.optimizer.step(lr, clip=clip)
        self.optimizer.zero_grad()
        return result if self.routing is None else replace(result, routing=self.routing.end(tokens))

    def _accumulate(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Sum of the token losses of this rank; gradients of (sum / tokens) are left on the parameters."""
        # float64: a sum of many microbatches in float32 would round differently for each split of the batch
        total = torch.zeros((), dtype=torch.float64, device=self.env.device)
        inputs = (model_inputs(batch, self.env.device, documents=self.documents) for batch in batches)
        if isinstance(self.model, StagedModel):
            return self.model.runtime.train(list(inputs), loss_fn=self.loss_fn, divisor=max(tokens, 1))
        for microbatch in inputs:
            loss = self.model(**microbatch, loss_fn=self.loss_fn)
            (loss / max(tokens, 1)).backward()  # a batch of ignored labels alone has no tokens, and a loss of 0
            total += loss.detach()
        return total
