"""A pipeline's ranks at work: forwards and backwards by torch's schedules, and forwards alone.

Shapes: B batch, S sequence or this rank's slice of it, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titanyaml.distributed import compat_pipeline
from titanyaml.errors import TitanError
from titanyaml.pipeline_parallel.partition import PipelinePartition

#: Keyword arguments of one forward: ``tokens_BS``, ``labels_BS``, ``documents_BS`` (may be None).
Inputs = Mapping[str, Tensor | None]
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

_DIMENSIONS = 3  # of the residual stream


class _Stage(compat_pipeline.Stage):
    """Torch's stage, which computes the loss inside the model's forward, and adds up the losses."""

    def __init__(self, module: nn.Module, *, loss_fn: LossFunction, **options: Any) -> None:
        super().__init__(module, **options)
        self.loss_fn = loss_fn
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        out = self.submod(*args, **kwargs, loss_fn=self.loss_fn)
        if not self.is_last:
            return out
        self.total += out.detach()
        return torch.stack([out])  # torch joins the outputs along a dimension

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        compat_pipeline.collect_gradients(self.submod)


class Runtime:
    """The stages of one pipeline rank, ready to run.

    Args:
        parts: the modules of its stages. plan: the whole pipeline. group: the ranks of the pipeline.
        device: where they compute. dtype: of the residual stream.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plan: PipelinePartition,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.parts = dict(zip(plan.stages_of(self.rank), parts, strict=True))
        self.plan, self.group, self.device, self.dtype = plan, group, device, dtype
        self.shape: tuple[int, ...] | None = None  # [B, S, D] of what travels, once known
        self.stages: list[_Stage] = []
        self.schedule: Any = None
        self.divisor = 1

    def train(self, inputs: Sequence[Inputs], *, loss_fn: LossFunction, divisor: int) -> Tensor:
        """Forward and backward of all microbatches; gradients of (sum of losses / divisor) are left on the parameters.

        Returns:
            Sum of the microbatches' losses (0-dim, float64), the same on every rank of the pipeline.
        """
        if self.schedule is None:
            self._prepare(inputs[0], loss_fn)
        assert len(inputs) == self.plan.microbatches, "the schedule was made for another number of microbatches"
        self.divisor = divisor
        for stage in self.stages:
            stage.total.zero_()
        batch = {
            name: torch.cat([one[name] for one in inputs]) for name, value in inputs[0].items() if value is not None
        }
        tokens = batch.pop("tokens_BS")
        try:
            self.schedule.step(*([tokens] if 0 in self.parts else []), target=batch["labels_BS"], **batch)
        except RuntimeError as error:
            raise _cause(error) from None
        return self._everywhere(sum(stage.total for stage in self.stages))

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Inputs], *, loss_fn: LossFunction) -> Tensor:
        """Sum of the microbatches' losses (0-dim, float64), the same on every rank of the pipeline; forwards alone."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        held: dict[tuple[int, int], Tensor] = {}
        for stage, microbatch in self._forwards(len(inputs)):
            owner = self.plan.owners[stage]
            before = self.plan.owners[stage - 1] if stage else owner
            if self.rank == before != owner:
                self._send(held.pop((stage - 1, microbatch)), owner)
            if self.rank != owner:
                continue
            kwargs = dict(inputs[microbatch])
            tokens = kwargs.pop("tokens_BS")
            if stage:
                tokens = held.pop((stage - 1, microbatch)) if before == owner else self._receive(before)
            out = self.parts[stage](tokens, **kwargs, loss_fn=loss_fn)
            if stage + 1 < len(self.plan.owners):
                held[stage, microbatch] = out
            else:
                total += out
        return self._everywhere(total)

    def _forwards(self, microbatches: int) -> Iterator[tuple[int, int]]:
        """All forwards of all ranks in one order that every rank follows.

        As many stages as there are ranks take all microbatches, then the next so many do. A transfer stands right
        before the forward that needs it, on both sides, so that ranks cannot wait for each other whatever the
        backend; and after its own forward a rank is free for its next one.
        """
        ranks, stages = self.plan.ranks, len(self.plan.owners)
        for first in range(0, stages, ranks):
            for microbatch in range(microbatches):
                for stage in range(first, min(first + ranks, stages)):
                    yield stage, microbatch

    def _send(self, x_BSD: Tensor, rank: int) -> None:
        peer = dist.get_global_rank(self.group, rank)
        if self.shape is None:
            dist.send(torch.tensor(x_BSD.shape, device=self.device), peer, group=self.group)
        dist.send(x_BSD.contiguous(), peer, group=self.group)

    def _receive(self, rank: int) -> Tensor:
        peer, shape = dist.get_global_rank(self.group, rank), self.shape
        if shape is None:
            sizes = torch.empty(_DIMENSIONS, dtype=torch.int64, device=self.device)
            dist.recv(sizes, peer, group=self.group)
            shape = tuple(sizes.tolist())
        x_BSD = torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.recv(x_BSD, peer, group=self.group)
        return x_BSD

    def _everywhere(self, total: Tensor | int) -> Tensor:
        """The last stage's sum on every rank; the others have zero."""
        total = torch.as_tensor(total, dtype=torch.float64, device=self.device).clone()
        dist.all_reduce(total, group=self.group)
        return total

    def _prepare(self, inputs: Inputs, loss_fn: LossFunction) -> None:
        """Learn the shape of what travels by one forward, and build torch's schedule on it.

        Given the shapes, torch does not run the model to find them, which would leave gradients of nonsense behind.
        """
        if self.shape is None:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                self._learn_shape(inputs, loss_fn)
        last = len(self.plan.owners) - 1
        wide = torch.promote_types(self.dtype, torch.float32)
        stream = torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=True)
        tokens, loss = inputs["tokens_BS"].to("meta"), torch.empty(1, dtype=wide, device="meta", requires_grad=True)
        self.stages = [
            _Stage(
                part,
                loss_fn=loss_fn,
                stage_index=stage,
                num_stages=last + 1,
                device=self.device,
                group=self.group,
                input_args=stream if stage else tokens,
                output_args=loss if stage == last else stream,
            )
            for stage, part in self.parts.items()
        ]
        options = {"loss_fn": lambda out, target: out.sum() / self.divisor}
        if self.plan.from_file:
            self.schedule = compat_pipeline.schedule_from_file(
                self.plan.schedule, self.stages, microbatches=self.plan.microbatches, **options
            )
            return
        kind = get_schedule_class(self.plan.schedule)
        stages = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        self.schedule = kind(stages, self.plan.microbatches, scale_grads=False, **options)

    def _learn_shape(self, inputs: Inputs, loss_fn: LossFunction) -> None:
        """One forward through all stages, in which the shape travels too; then every rank knows it."""
        handles, shapes = [], []
        for stage, part in self.parts.items():
            if stage + 1 < len(self.plan.owners):
                handles.append(part.register_forward_hook(lambda module, args, out: shapes.append(out.shape)))
            if stage:
                handles.append(part.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape)))
        self.shape = None
        self.evaluate([inputs], loss_fn=loss_fn)
        for handle in handles:
            handle.remove()
        assert len(set(shapes)) == 1, f"stages hand on tensors of different shapes: {set(map(tuple, shapes))}"
        self.shape = tuple(shapes[0])


def _cause(error: BaseException) -> BaseException:
    """Our own error, where torch has put one of its own around it."""
    here: BaseException | None = error
    while here is not None:
        if isinstance(here, TitanError):
            return here
        here = here.__cause__
    return error
