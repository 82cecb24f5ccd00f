"""One gradient norm for every mesh: each logical parameter counts once, whatever mixture of shards holds it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from titanyaml.distributed import compat

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
_CPU_CHUNK = 65536  # elements

#: A mesh and those of its axes over which shards differ; (None, ()) for plain tensors.
_ShardAxes = tuple[DeviceMesh | None, tuple[int, ...]]


@torch.no_grad()
def grad_norm(
    tensors: Iterable[Tensor],
    *,
    grads: Mapping[nn.Parameter, Tensor] | None = None,
    norm_type: float = 2.0,
    stages: dist.ProcessGroup | None = None,
    square_sum: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """Norm of all gradients as one vector: 0-dim, float64 if any is, else float32; bit-equal on all ranks.

    Sharded axes of a DTensor are summed over, replicated ones are not; a pending sum (Partial) is carried out first.
    Plain tensors are taken to be equal on all ranks. All ranks of the meshes must call with the same tensors in the
    same order.

    Args:
        tensors: gradients; an nn.Parameter stands for its gradient (from ``grads`` if given), left out if it has none.
        norm_type: 2.0, or ``inf`` for the largest absolute value.
        stages: ranks that hold different parameters (pipeline stages), over which is summed at the end.
        square_sum: sums the squares of this rank's tensors, in place of PyTorch's operators (not in float64).
    """
    assert norm_type in (2.0, float("inf")), norm_type
    shards: dict[_ShardAxes, list[Tensor]] = defaultdict(list)
    dtype, device = torch.float32, torch.device("cpu")
    for grad in _unique_gradients(tensors, grads):
        shard_axes, shard = _shard_of(grad)
        shards[shard_axes].append(shard)
        device = shard.device
        dtype = torch.float64 if shard.dtype == torch.float64 else dtype
    # Partial norms stay in float64: combining them in float32 would round once for each mesh and each collective.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, axes), local_shards in shards.items():
        if square_sum is not None and norm_type == 2.0 and dtype != torch.float64:
            local_norm = square_sum(local_shards).sqrt()
        else:
            local_norm = _local_norm(local_shards, norm_type, dtype, device)
        norm = _reduce([mesh.get_group(axis) for axis in axes] if mesh is not None else [], local_norm, norm_type)
        total = torch.maximum(total, norm) if norm_type != 2.0 else torch.hypot(total, norm)
    if stages is not None:
        total = _reduce([stages], total, norm_type)
    return total.to(dtype)


@torch.no_grad()
def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), as in torch's clip_grad_norm_: the factor that gradients are multiplied by."""
    # nothing waits for the device, so a norm that is not finite is not noticed here: callers look at it first
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)


def _unique_gradients(tensors: Iterable[Tensor], grads: Mapping[nn.Parameter, Tensor] | None) -> Iterable[Tensor]:
    """Each gradient once, also of a parameter that comes twice (tied weights)."""
    seen_ids: set[int] = set()
    for tensor in list(tensors):  # the list keeps all alive, so that no id is used twice
        if id(tensor) in seen_ids:
            continue
        seen_ids.add(id(tensor))
        if not isinstance(tensor, nn.Parameter):
            yield tensor
        elif (grad := tensor.grad if grads is None else grads.get(tensor)) is not None:
            yield grad


def _shard_of(grad: Tensor) -> tuple[_ShardAxes, Tensor]:
    """The axes over which the shards of a gradient lie, and this rank's shard."""
    if not isinstance(grad, DTensor):
        return (None, ()), grad
    if any(placement.is_partial() for placement in grad.placements):
        grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    mesh = grad.device_mesh
    axes = tuple(i for i, p in enumerate(grad.placements) if not p.is_replicate() and mesh.size(i) > 1)
    shard = grad.to_local()
    # A redistributed shard may still be on its way. torch's operators wait by themselves; our kernels read memory.
    return (mesh, axes), shard.wait() if hasattr(shard, "wait") else shard


def _local_norm(shards: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Norm of this rank's shards: each in ``dtype``, combined in float64 (0-dim)."""
    pieces = [shard for shard in shards if shard.numel()]  # an empty shard has no largest value
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu":
        # Here torch adds float32 squares one after the other: a single sum over 50 million elements was off by 4e-3,
        # chunks of 65,536 by 2e-7 at the same speed. On a GPU the sum is a tree.
        pieces = [piece for shard in pieces for piece in shard.reshape(-1).split(_CPU_CHUNK)]
    norms = torch.stack(list(compat.foreach_norm(pieces, norm_type, dtype=dtype))).double()
    return torch.linalg.vector_norm(norms, norm_type)


def _reduce(groups: list[dist.ProcessGroup], norm: Tensor, norm_type: float) -> Tensor:
    """Norm over the ranks of groups, each of which holds different elements."""
    if norm_type != 2.0:
        # a maximum over ranks may lose a NaN, so that it counts as infinite
        norm = norm.nan_to_num(nan=float("inf"), posinf=float("inf"))
        for group in groups:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    power = norm.square()
    for group in groups:
        dist.all_reduce(power, group=group)
    return power.sqrt()
