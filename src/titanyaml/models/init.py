"""Give a model on meta its memory and initial values, the same on every mesh.

Every value depends on seed and parameter name alone: not on the mesh, the order of construction or other parameters.
"""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from titanyaml.config.schema import Model
from titanyaml.distributed import rng
from titanyaml.distributed.tensor import place_like
from titanyaml.errors import TitanError
from titanyaml.kernels.master_weights import split_master
from titanyaml.models.layers import at_least_float32


@torch.no_grad()
def materialise(
    model: nn.Module,
    *,
    device: torch.device,
    seed: int,
    param_dtype: torch.dtype,
    storage: torch.device | None = None,
    split: bool = False,
) -> dict[str, Tensor]:
    """Allocate and initialise ``model``; at most one whole (unsharded) tensor exists besides it.

    Modules with a method ``init_buffers(device, *, dtype)`` fill their own buffers.

    Args:
        model: a decoder on meta, transformed or not; parameters may be DTensors.
        device: where values are drawn. CPU and GPU draw different numbers.
        storage: where parameters live, if not on ``device``.
        split: split the masters of bfloat16 parameters.
    Returns:
        Masters by name, placed as the parameter, of each parameter stored narrower than ``param_dtype``: the value in
        that dtype, or the remainder of a split one (``kernels.master_weights``).
    Raises:
        TitanError: nothing filled a parameter or buffer.
    """
    spec: Model = model.spec  # type: ignore[assignment]  # torch types every attribute of a module as tensor or module
    tied_names = _tied_names(model)
    model.to_empty(device=storage or device)
    _tie(model, tied_names)
    # Only what no rule writes gets NaN: filling and scanning everything took a third of this function's time on a CPU.
    for _, tensor in _tensors_without_rule(model, spec):
        tensor.fill_(math.nan)
    for module in model.modules():
        if init_buffers := getattr(module, "init_buffers", None):
            init_buffers(device, dtype=at_least_float32(param_dtype))
    masters = {}
    for name, parameter in model.named_parameters():
        if not _has_rule(name, spec):
            continue
        # drawn in float32 and then cast: every precision starts from the same weights
        value = _initial_value(name, parameter, spec=spec, device=device, seed=seed)
        # a DTensor's shard may be a view of the whole tensor, whose memory only a copy lets go
        value = value.to(param_dtype, copy=isinstance(value, DTensor))
        parameter.copy_(value)
        if torch.promote_types(parameter.dtype, param_dtype) != parameter.dtype:
            masters[name] = split_master(value, parameter) if split else value
    # listed again: init_buffers may have replaced buffers
    _refuse_nan(list(_tensors_without_rule(model, spec)))
    return masters


def initial_std(name: str, spec: Model) -> float | None:
    """Standard deviation of a matrix of the decoder; None for other names."""
    # Outputs that are added to the residual stream: two per block (Radford et al. 2019, GPT-2), so that the stream's
    # variance does not grow with depth.
    if name.endswith((".wo.weight", ".w2.weight", ".experts.w2")):
        return spec.init_std / math.sqrt(2 * spec.num_layers)
    layers = ("tok_embeddings", "output", ".wq", ".wk", ".wv", ".w1", ".w3", ".router")
    matrices = (*(f"{layer}.weight" for layer in layers), ".experts.w1", ".experts.w3")
    return spec.init_std if name.endswith(matrices) else None


def _has_rule(name: str, spec: Model) -> bool:
    return initial_std(name, spec) is not None or name.endswith(("norm.weight", ".bias"))


def _initial_value(name: str, parameter: Tensor, *, spec: Model, device: torch.device, seed: int) -> Tensor:
    """The float32 value of a parameter with a rule, placed like it."""
    std = initial_std(name, spec)
    if ".experts." in name and std is not None:
        return _stacked_value(name, parameter, std=std, device=device, seed=seed)
    # Each rank draws the whole tensor and keeps its slice: values are those of any other mesh. Each name has its own
    # generator: to add, remove or reorder parameters changes no other value.
    value = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    if std is not None:
        value.normal_(0.0, std, generator=rng.generator(seed, "init", name, device=device))
    else:
        value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank slices its own draw, nothing is communicated
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _stacked_value(name: str, parameter: Tensor, *, std: float, device: torch.device, seed: int) -> Tensor:
    # each expert has its own generator: a rank draws only its experts, and their number changes no value
    experts = range(parameter.shape[0])
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, list(parameter.placements)
        axes = [axis for axis, placement in enumerate(placements) if placement.is_shard(0) and mesh.size(axis) > 1]
        if len(axes) == 1:
            size = -(-len(experts) // mesh.size(axes[0]))  # as torch.chunk: the last shards may be smaller, or empty
            experts = experts[mesh.get_local_rank(axes[0]) * size :][:size]
            placements[axes[0]] = Replicate()  # already cut along this axis
    value = torch.empty((len(experts), *parameter.shape[1:]), dtype=torch.float32, device=device)
    for matrix, index in zip(value, experts, strict=True):
        matrix.normal_(0.0, std, generator=rng.generator(seed, "init", name, index, device=device))
    if not isinstance(parameter, DTensor):
        return value
    return place_like(distribute_tensor(value, mesh, placements, src_data_rank=None).to_local(), parameter)


def _tensors_without_rule(model: nn.Module, spec: Model) -> Iterator[tuple[str, Tensor]]:
    """Names and local tensors of buffers and of plugins' own parameters; every rule writes its parameter as a whole."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if not _has_rule(name, spec)]
    for name, tensor in [*parameters, *model.named_buffers()]:
        if tensor.is_floating_point():
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_nan(named: list[tuple[str, Tensor]]) -> None:
    flags = [tensor.isnan().any() for _, tensor in named]  # all queued on the device before the first is read
    unfilled = [name for (name, _), flag in zip(named, flags, strict=True) if bool(flag)]
    if unfilled:
        causes = "no rule knows the parameter, or no init_buffers fills the buffer"
        hint = "a plugin that adds a buffer gives its module init_buffers(device, *, dtype)"
        raise TitanError(f"no initialisation for {', '.join(unfilled)}: {causes}", key="pipeline.plugins", hint=hint)


def _tied_names(model: nn.Module) -> list[list[str]]:
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Tie the parameters that ``to_empty`` has untied by allocating once per name."""
    for first_name, *tied_names in groups:
        parameter = model.get_parameter(first_name)
        for name in tied_names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
