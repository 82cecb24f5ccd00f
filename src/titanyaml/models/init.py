"""Give a model on meta its memory and its first values, the same on every mesh.

Every value depends on (seed, parameter name) alone: the whole tensor is drawn from a generator of that name on each
rank, and a rank keeps its slice. Of stacked experts each has a generator of its own. Whatever no rule writes stays NaN
unless somebody else fills it, and is reported, never trained on.
"""

from __future__ import annotations

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
    """Allocate ``model`` on ``device`` and initialise it. At most one whole tensor exists besides the model.

    Values are drawn in float32 on the type of ``device`` (CPU and GPU draw different numbers) and cast afterwards, so
    every precision starts from the same weights. Modules with a method ``init_buffers(device, *, dtype)`` fill their
    own buffers. Parameters that were tied on meta are tied afterwards.

    Args:
        model: a decoder on meta, transformed or not; parameters may be DTensors. seed: ``run.seed``.
        param_dtype: dtype of master weights. storage: where parameters live, if not on ``device``: they are drawn on
            ``device`` all the same, so that they are the same. split: masters of bfloat16 parameters are split.

    Returns:
        Masters by name, placed as the parameter, of each parameter stored narrower than ``param_dtype``: the value in
        that dtype, or the remainder of a split one (``kernels.master``).

    Raises:
        TitanError: a parameter or buffer was filled by nobody.
    """
    shared = _shared_names(model)
    model.to_empty(device=storage or device)
    _share(model, shared)
    for _, tensor in _without_rule(model):
        tensor.fill_(math.nan)
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(device, dtype=at_least_float32(param_dtype))
    masters = {}
    for name, parameter in model.named_parameters():
        if not _has_rule(name, model.spec):
            continue
        value = _initial_value(name, parameter, spec=model.spec, device=device, seed=seed)
        # the copy frees a DTensor's shard from the memory of the whole tensor that it may be a view of
        value = value.to(param_dtype, copy=isinstance(value, DTensor))
        parameter.copy_(value)
        if torch.promote_types(parameter.dtype, param_dtype) != parameter.dtype:
            masters[name] = split_master(value, parameter) if split else value
    _refuse_nan(list(_without_rule(model)))  # init_buffers may have put others in place
    return masters


def initial_std(name: str, spec: Model) -> float | None:
    """Standard deviation of a matrix: ``init_std``, divided by sqrt(2 * layers) where its output is added to the
    residual stream (Radford et al. 2019, GPT-2), so that the stream's variance does not grow with depth. None for
    names that are no matrix of the decoder."""
    if name.endswith((".wo.weight", ".w2.weight", ".experts.w2")):
        return spec.init_std / math.sqrt(2 * spec.num_layers)
    matrices = (
        "tok_embeddings.weight",
        "output.weight",
        ".wq.weight",
        ".wk.weight",
        ".wv.weight",
        ".w1.weight",
        ".w3.weight",
        ".router.weight",
        ".experts.w1",
        ".experts.w3",
    )
    return spec.init_std if name.endswith(matrices) else None


def _has_rule(name: str, spec: Model) -> bool:
    """Whether ``_initial_value`` knows the parameter."""
    return initial_std(name, spec) is not None or name.endswith(("norm.weight", ".bias"))


def _initial_value(name: str, parameter: Tensor, *, spec: Model, device: torch.device, seed: int) -> Tensor:
    """The float32 value of a parameter with a rule, placed as it is."""
    std = initial_std(name, spec)
    if ".experts." in name and std is not None:
        return _stacked_value(name, parameter, std=std, device=device, seed=seed)
    value = torch.empty(parameter.shape, dtype=torch.float32, device=device)
    if std is not None:
        value.normal_(0.0, std, generator=rng.generator(seed, "init", name, device=device))
    else:
        value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every rank slices its own draw, nothing is sent
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


def _stacked_value(name: str, parameter: Tensor, *, std: float, device: torch.device, seed: int) -> Tensor:
    """Stacked matrices, [E, ...]: one stream per matrix, so that a rank draws only those of its experts."""
    mesh, placements = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else (None, ())
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard(0) and mesh.size(axis) > 1]
    mine, rest = range(parameter.shape[0]), list(placements)
    if len(axes) == 1:
        size = -(-len(mine) // mesh.size(axes[0]))  # as torch.chunk: the last shards may be smaller, or empty
        mine = mine[mesh.get_local_rank(axes[0]) * size :][:size]
        rest[axes[0]] = Replicate()
    value = torch.empty((len(mine), *parameter.shape[1:]), dtype=torch.float32, device=device)
    for matrix, index in zip(value, mine, strict=True):
        matrix.normal_(0.0, std, generator=rng.generator(seed, "init", name, index, device=device))
    if mesh is None:
        return value
    return place_like(distribute_tensor(value, mesh, rest, src_data_rank=None).to_local(), parameter)


def _without_rule(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and local tensor of what is not written by a rule: buffers, and a plugin's own parameters. All else is
    written as a whole, so that there is nothing to look for in it."""
    named = [(name, one) for name, one in model.named_parameters() if not _has_rule(name, model.spec)]
    for name, tensor in [*named, *model.named_buffers()]:
        if tensor.is_floating_point():
            yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_nan(named: list[tuple[str, Tensor]]) -> None:
    flags = [tensor.isnan().any() for _, tensor in named]  # all queued before the first is waited for
    bad = [name for (name, _), flag in zip(named, flags, strict=True) if bool(flag)]
    if bad:
        raise TitanError(
            f"no initialisation for {', '.join(bad)}: no rule knows the parameter, or no init_buffers fills the buffer",
            key="pipeline.plugins",
            hint="a plugin that adds a buffer gives its module init_buffers(device, *, dtype)",
        )


def _shared_names(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has more than one."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _share(model: nn.Module, groups: list[list[str]]) -> None:
    """Tie again what ``to_empty`` has untied: it allocates once per name."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)
