"""How tp, cp and ep change modules in place: only modules of a known class, under their old names."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_tensor

from titanyaml.errors import PipelineError

M = TypeVar("M", bound=nn.Module)


def find_module(model: nn.Module, name: str, kind: type[M], *, axis: str) -> M:
    """The module of this name.

    Raises:
        PipelineError: it is not exactly a ``kind``, whose arithmetic is known: an earlier plugin replaced it.
    """
    module = model.get_submodule(name)
    if type(module) is not kind:
        raise PipelineError(
            f"{name} is a {type(module).__name__}, which cannot be split; only {kind.__name__} can",
            key=f"parallel.{axis}",
            hint=f"parallel.{axis}=1, or switch off the plugin that replaced it",
        )
    return module


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    """Turn the module's own parameters into DTensors on ``mesh``, each placed by its name."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        # src_data_rank=None: each rank takes its own slice. On meta nothing can be sent, and values come later.
        shard = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
