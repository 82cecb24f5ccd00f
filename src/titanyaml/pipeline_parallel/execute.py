"""Run the stages of one pipeline rank: training steps by torch's schedules, evaluation by a loop of our own.

Shapes: B batch, S sequence or this rank's slice of it, D model width.
"""

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

_STREAM_DIMS = 3  # [B, S, D]


class _LossStage(compat_pipeline.PatchedStage):
    """Torch's stage, with the loss computed inside the model's forward and summed over the microbatches."""

    def __init__(self, module: nn.Module, *, loss_fn: LossFunction, **options: Any) -> None:
        super().__init__(module, **options)
        self.loss_fn = loss_fn
        # float64: the rounding error of the sum must not grow with the number of microbatches
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        output: Tensor = self.submod(*args, **kwargs, loss_fn=self.loss_fn)
        if not self.is_last:
            return output
        self.total += output.detach()
        return torch.stack([output])  # torch concatenates the outputs, which a 0-dim loss does not allow

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        compat_pipeline.collect_gradients(self.submod)


class PipelineRuntime:
    """The stages of one pipeline rank, ready to run."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        partition: PipelinePartition,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.parts = dict(zip(partition.stages_of(self.rank), parts, strict=True))
        self.partition, self.group, self.device, self.dtype = partition, group, device, dtype
        self.stream_shape: tuple[int, ...] | None = None  # [B, S, D], known after the first forward
        self.stages: list[_LossStage] = []
        self.schedule: Any = None  # built in the first step: plugins still change the stages, and shapes are unknown
        self.divisor = 1

    def train(self, inputs: Sequence[Inputs], *, loss_fn: LossFunction, divisor: int) -> Tensor:
        """Forward and backward of all microbatches; gradients of (sum of losses / divisor) are left on the parameters.

        Returns:
            Sum of the microbatches' losses (0-dim, float64), the same on every rank of the pipeline.
        """
        if self.schedule is None:
            self._build_schedule(inputs[0], loss_fn)
        assert len(inputs) == self.partition.microbatches, "the schedule was made for another number of microbatches"
        self.divisor = divisor
        for stage in self.stages:
            stage.total.zero_()
        # one batch: torch splits it into the microbatches again
        batch = {
            name: torch.cat([tensor for microbatch in inputs if (tensor := microbatch[name]) is not None])
            for name, value in inputs[0].items()
            if value is not None
        }
        tokens = batch.pop("tokens_BS")
        try:
            self.schedule.step(*([tokens] if 0 in self.parts else []), target=batch["labels_BS"], **batch)
        except RuntimeError as error:
            raise _own_error(error) from None
        return self._sum_over_ranks(sum(stage.total for stage in self.stages))

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Inputs], *, loss_fn: LossFunction) -> Tensor:
        """Sum of the microbatches' losses, as from ``train``; forwards alone."""
        owners = self.partition.owners
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        outputs: dict[tuple[int, int], Tensor] = {}  # computed here and not consumed yet
        for stage, microbatch in self._forward_order(len(inputs)):
            owner = owners[stage]
            previous_owner = owners[stage - 1] if stage else owner
            if self.rank == previous_owner != owner:
                self._send(outputs.pop((stage - 1, microbatch)), owner)
            if self.rank != owner:
                continue
            kwargs = dict(inputs[microbatch])
            stage_input = kwargs.pop("tokens_BS")
            if stage:
                is_local = previous_owner == owner
                stage_input = outputs.pop((stage - 1, microbatch)) if is_local else self._receive(previous_owner)
            output = self.parts[stage](stage_input, **kwargs, loss_fn=loss_fn)
            if stage + 1 < len(owners):
                outputs[stage, microbatch] = output
            else:
                total += output
        return self._sum_over_ranks(total)

    def _forward_order(self, microbatches: int) -> Iterator[tuple[int, int]]:
        """(stage, microbatch) of all forwards of all ranks, in one order that every rank follows."""
        # as many stages as there are ranks take all microbatches, then the next so many do. A transfer comes right
        # before the forward that needs it, on both sides, so that blocking sends cannot deadlock on any backend; after
        # its own forward a rank is free for its next one
        ranks, stages = self.partition.ranks, len(self.partition.owners)
        for first in range(0, stages, ranks):
            for microbatch in range(microbatches):
                for stage in range(first, min(first + ranks, stages)):
                    yield stage, microbatch

    def _send(self, x_BSD: Tensor, rank: int) -> None:
        peer = dist.get_global_rank(self.group, rank)
        if self.stream_shape is None:  # the receiver cannot know it before the first step
            dist.send(torch.tensor(x_BSD.shape, device=self.device), peer, group=self.group)
        dist.send(x_BSD.contiguous(), peer, group=self.group)

    def _receive(self, rank: int) -> Tensor:
        peer, shape = dist.get_global_rank(self.group, rank), self.stream_shape
        if shape is None:
            sizes = torch.empty(_STREAM_DIMS, dtype=torch.int64, device=self.device)
            dist.recv(sizes, peer, group=self.group)
            shape = tuple(sizes.tolist())
        x_BSD = torch.empty(shape, dtype=self.dtype, device=self.device)
        dist.recv(x_BSD, peer, group=self.group)
        return x_BSD

    def _sum_over_ranks(self, total: Tensor | int) -> Tensor:
        """The last stage's sum on every rank; the other ranks add zero."""
        total = torch.as_tensor(total, dtype=torch.float64, device=self.device).clone()
        dist.all_reduce(total, group=self.group)
        return total

    def _build_schedule(self, inputs: Inputs, loss_fn: LossFunction) -> None:
        if self.stream_shape is None:
            # the extra forward leaves the random state as a run without it would have it
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                self.stream_shape = self._learn_shape(inputs, loss_fn)
        partition, last = self.partition, len(self.partition.owners) - 1
        # without the shapes torch would find them by running the model, which leaves gradients of nonsense behind
        stream = torch.empty(self.stream_shape, dtype=self.dtype, device="meta", requires_grad=True)
        loss_dtype = torch.promote_types(self.dtype, torch.float32)
        loss = torch.empty(1, dtype=loss_dtype, device="meta", requires_grad=True)
        tokens = inputs["tokens_BS"]
        assert tokens is not None
        common: dict[str, Any] = {"num_stages": last + 1, "device": self.device, "group": self.group}
        for stage, part in self.parts.items():
            shapes = {"input_args": stream if stage else tokens.to("meta")}
            shapes["output_args"] = loss if stage == last else stream
            self.stages.append(_LossStage(part, loss_fn=loss_fn, stage_index=stage, **shapes, **common))
        # the stage has computed the loss already; what is left is the division, the same for every microbatch
        options = {"loss_fn": lambda output, target: output.sum() / self.divisor}
        if partition.from_file:
            path, count = partition.schedule, partition.microbatches
            self.schedule = compat_pipeline.schedule_from_file(path, self.stages, microbatches=count, **options)
            return
        kind = get_schedule_class(partition.schedule)
        stages = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        # scale_grads divides by the number of microbatches: for losses that are means, which ours are not
        self.schedule = kind(stages, partition.microbatches, scale_grads=False, **options)

    def _learn_shape(self, inputs: Inputs, loss_fn: LossFunction) -> tuple[int, ...]:
        """The shape of the residual stream between stages, by one forward in which the shape travels too."""
        handles, shapes = [], []
        for stage, part in self.parts.items():
            if stage + 1 < len(self.partition.owners):
                handles.append(part.register_forward_hook(lambda module, args, output: shapes.append(output.shape)))
            if stage:
                handles.append(part.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape)))
        self.evaluate([inputs], loss_fn=loss_fn)
        for handle in handles:
            handle.remove()
        assert len(set(shapes)) == 1, f"stages hand on tensors of different shapes: {set(map(tuple, shapes))}"
        return tuple(shapes[0])


def _own_error(error: BaseException) -> BaseException:
    """Our own error, which carries the exit code, where torch has wrapped it in one of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TitanError):
            return cause
        cause = cause.__cause__
    return error
