"""One optimizer step: forwards and backwards over the microbatches, one norm, one update, or none at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from titanyaml.distributed import comm, norm
from titanyaml.distributed.env import Env
from titanyaml.errors import NonFiniteError
from titanyaml.loss import IGNORE_INDEX, CrossEntropy
from titanyaml.optim import Optimizer
from titanyaml.pipeline_parallel.staged import Staged
from titanyaml.runner.breakdown import UPDATE
from titanyaml.runner.setup import to_device

if TYPE_CHECKING:
    from titanyaml.data.loader import Batch
    from titanyaml.runner.routing import Routing


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the valid tokens of all ranks (nats). grad_norm: before clipping. tokens: valid ones.
    routing: figures of a mixture's routers (``Routing.end``)."""

    loss: float
    grad_norm: float
    tokens: int
    routing: dict[str, float] = field(default_factory=dict)


def valid_tokens(batches: Sequence[Batch]) -> int:
    """Labels that count, in this rank's microbatches."""
    return sum(int((batch.labels_BS != IGNORE_INDEX).sum()) for batch in batches)


class TrainStep:
    """Callable that trains one step.

    The loss is a sum over tokens divided once by the number of valid tokens of *all* ranks and microbatches, so the
    gradient does not depend on how the batch is split.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss_fn: CrossEntropy,
        max_norm: float | None,
        documents: bool,
        env: Env,
        adds_loss: bool = True,
        routing: Routing | None = None,
        square_sum: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        """``adds_loss``: whether this rank's loss is added up (``ParallelDims.adds_loss``); ``routing``: or None;
        ``square_sum``: see ``norm.grad_norm``."""
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.max_norm, self.documents, self.env, self.adds_loss = max_norm, documents, env, adds_loss
        self.routing, self.square_sum = routing, square_sum

    def __call__(self, batches: Sequence[Batch], *, tokens: int, lr: float) -> StepResult:
        """Train on this rank's microbatches.

        Args:
            tokens: valid tokens of all data ranks in this step.
            lr: learning rate.

        Raises:
            NonFiniteError: loss or gradient norm is not finite; weights and moments are as before.
        """
        if self.routing is not None:
            self.routing.begin(tokens)
        loss_sum = self._accumulate(batches, tokens)
        grads = self.optimizer.grads()
        if isinstance(self.model, Staged):
            counted = self.model.settle(dict(zip(self.optimizer.names, grads, strict=True)))
            grad_norm = norm.grad_norm(counted, stages=self.model.group, square_sum=self.square_sum)
        else:
            grad_norm = norm.grad_norm(grads, square_sum=self.square_sum)
        [total] = comm.sum_scalars([float(loss_sum) if self.adds_loss else 0.0], self.env)
        result = StepResult(loss=total / max(tokens, 1), grad_norm=float(grad_norm), tokens=tokens)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"loss {result.loss}, gradient norm {result.grad_norm}: no update was made",
                hint="a lower optim.lr, longer schedule.warmup_steps, or resume from an earlier checkpoint",
            )
        with record_function(UPDATE):
            clip = None if self.max_norm is None else norm.clip_factor(grad_norm, self.max_norm)
            self.optimizer.step(lr, clip=clip)
        self.optimizer.zero_grad()
        return result if self.routing is None else replace(result, routing=self.routing.end(tokens))

    def _accumulate(self, batches: Sequence[Batch], tokens: int) -> Tensor:
        """Sum of token losses of this rank; gradients of (sum / tokens) are left on the parameters."""
        total = torch.zeros((), dtype=torch.float64, device=self.env.device)
        inputs = (to_device(batch, self.env.device, documents=self.documents) for batch in batches)
        if isinstance(self.model, Staged):
            return self.model.train_step(list(inputs), loss_fn=self.loss_fn, divisor=max(tokens, 1))
        for one in inputs:
            loss = self.model(**one, loss_fn=self.loss_fn)
            (loss / max(tokens, 1)).backward()
            total += loss.detach()
        return total
