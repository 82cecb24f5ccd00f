"""Private API of torch's pipelines: stages and schedules that run to the end with every tried release."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from titanyaml.distributed import compat

#: First and last release that this file was run with; backwards in two parts were mended for 2.11.
TRIED_TORCH = ("2.11", "2.13")


class PatchedStage(PipelineStage):
    """Torch's stage with two fixes for releases before 2.13, where they are needed; they change nothing in 2.13."""

    # monkeypatch: PipelineStage.backward_maybe_with_nosync, by overriding. May go when 2.13 is the oldest torch.
    # Before 2.13 the node of an autograd.Function is freed with the last tensor or node above it, though Python still
    # refers to it. A backward by input detaches the stage's outputs, so the nodes that the backward by weight starts
    # from are gone if they are of that kind, as a loss is ("Attribute '_input_metadata' is invalid"). A view's node on
    # top is of another kind, holds the graph below, and holds no memory.
    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[Any, Any], last_backward: bool = False
    ) -> Any:
        nodes_on_top = []
        if backward_type == "input":
            outputs = [output for output in bwd_kwargs["stage_output"] if output.requires_grad]
            nodes_on_top = [get_gradient_edge(output.view_as(output)).node for output in outputs]
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        for group in groups or ():
            group["nodes_on_top"] = nodes_on_top  # torch drops these groups after the backward by weight
        return grads, groups

    # monkeypatch: PipelineStage._get_init_p2p_neighbors_ops, by overriding. May go when 2.13 is the oldest torch.
    # A rank with two neighbouring stages would send its greeting to itself, which gloo cannot.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def schedule_from_file(path: str, stages: list[Any], *, microbatches: int, loss_fn: Callable[..., Tensor]) -> Any:
    """A pipeline schedule of the computations in a CSV file; torch adds the transfers that they need."""
    compat.warn_if_untried("parallel.pp", TRIED_TORCH)
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    schedule._load_csv(path, format="compute_only")
    return schedule


def collect_gradients(module: nn.Module) -> None:
    """Run, for gradients that were written to ``.grad`` directly, the hooks that autograd would have run."""
    # A backward by weight alone writes past autograd: no hook sees those gradients, and FSDP does not add them up in
    # its own dtype. With bfloat16 weights they would be summed in bfloat16 and never reach a float32 master.
    for parameter in module.parameters():
        for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            if parameter.grad is not None:
                hook(parameter)
    for inner in module.modules():
        state = inner._get_fsdp_state() if isinstance(inner, FSDPModule) else None
        # releases differ: one group of parameters a module, or several
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for fsdp_param in (fsdp_param for group in groups if group is not None for fsdp_param in group.fsdp_params):
            fsdp_param.accumulate_unsharded_grad_if_needed()
            fsdp_param.to_accumulated_grad_if_needed()
