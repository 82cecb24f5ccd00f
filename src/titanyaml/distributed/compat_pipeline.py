"""Private API of torch's pipelines: stages and schedules that every release from 2.11 on runs to the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


class PatchedStage(PipelineStage):
    """Torch's stage, with two mends for releases before 2.13, where they are needed; they change nothing in that one.

    A node of an ``autograd.Function`` is freed with the last tensor or node above it there, though Python still has it.
    A backward by input detaches the outputs: the nodes of which the backward by weight starts are gone, where they are
    of that kind, as a loss is. A view's node, which is of another kind and holds no memory, keeps the graph below.
    """

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], **options: Any) -> Any:
        on_top = (
            [
                get_gradient_edge(output.view_as(output)).node
                for output in bwd_kwargs["stage_output"]
                if output.requires_grad
            ]
            if backward_type == "input"
            else []
        )
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, **options)
        for group in groups or ():
            group["on_top"] = on_top  # torch drops the groups of parameters with the backward by weight
        return grads, groups

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """A rank with two stages in a row would greet itself, which gloo cannot."""
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.group_peer != self.group_rank]


def schedule_from_file(path: str, stages: list[Any], *, microbatches: int, loss_fn: Callable[..., Tensor]) -> Any:
    """A pipeline schedule that runs the computations in a CSV file, with the transfers that they need."""
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    schedule._load_csv(path, format="compute_only")
    return schedule


def collect_gradients(module: nn.Module) -> None:
    """Do for gradients that were written to ``.grad`` what autograd's hooks do for those that it accumulates itself.

    A backward by weight alone writes them so: neither does a hook see them, nor does FSDP add them up in its own dtype.
    """
    for parameter in module.parameters():
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            if parameter.grad is not None:
                hook(parameter)
    for inner in module.modules():
        state = inner._get_fsdp_state() if isinstance(inner, FSDPModule) else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (parameter for group in groups if group is not None for parameter in group.fsdp_params):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
