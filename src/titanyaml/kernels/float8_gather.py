"""Weights that FSDP gathers in float8: cast once after an update, whatever is gathered how often after it.

FSDP asks the shard of a parameter what is to be gathered (``fsdp_pre_all_gather``), and what the gathered parameter is
(``fsdp_post_all_gather``). A ``ShardedWeight`` hands over a float8 copy of itself that lies ready, so that nothing is
launched; a ``GatheredWeight`` is float8 numbers and their inverse scale, to be read by ``float8_linear`` alone.

A copy that is older than the weight is never gathered: whatever writes a tensor counts up its version, a kernel of our
own by ``torch.autograd.graph.increment_version``, and a gather compares versions.

Shapes: N output features, K input features.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from titanyaml.distributed import compat
from titanyaml.kernels.float8_shards import Float8Shards

log = logging.getLogger("titanyaml")
aten = torch.ops.aten
#: What FSDP, tensor parallelism and materialisation do to a shard that must remain one.
_VIEWS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.view.default,
        aten.as_strided.default,
        aten.slice.Tensor,
        aten.split.Tensor,
    }
)
_KEEP = _VIEWS | {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.clone.default,
}
_library = torch.library.Library("titanyaml", "FRAGMENT")
_library.define("gathered_parts(Tensor weight) -> (Tensor, Tensor)")


class Float8Gather:
    """The weights of some layers, cast together: one maximum a weight is agreed on by one reduction.

    Args:
        dtype: of what the layers compute in; weights are rounded to it first, so that the float8 numbers are, to the
            bit, those of a weight that was gathered in it. fused: the Triton kernels cast.
    """

    def __init__(self, *, dtype: torch.dtype, fused: bool) -> None:
        self.dtype, self.fused = dtype, fused
        self.layers: list[nn.Linear] = []
        self.shards: Float8Shards | None = None
        self.expired = True
        self.num_gathered = 0  # weights that FSDP has gathered in float8

    def add(self, layer: nn.Linear) -> None:
        """Have the layer's weight (float32, on any device) gathered in float8."""
        weight = layer.weight
        layer.weight = nn.Parameter(ShardedWeight(weight.detach(), self), weight.requires_grad)
        self.layers.append(layer)

    def expire(self) -> None:
        """The weights were written: what was cast before is not to be used."""
        self.expired = True

    def refresh(self) -> None:
        """Cast again, since a copy is not that of its weight's numbers."""
        if not self.expired:
            log.info("weights were written outside of a step: they are cast to float8 again")
        self.cast()

    @torch.no_grad()
    def cast(self) -> None:
        """Cast all; every rank does at the same time.

        Two launches, one reduction of a number a weight, and one more to find the largest of parts.
        """
        weights = [layer.weight for layer in self.layers]
        assert all(isinstance(weight, DTensor) for weight in weights), "weights are cast before FSDP has cut them"
        sharded = [compat.local_shard_object(weight) for weight in weights]
        assert all(isinstance(shard, ShardedWeight) for shard in sharded), "weights are cast while they are gathered"
        sources = [shard._tensor for shard in sharded]
        if self.shards is None or any(a is not b for a, b in zip(sources, self.shards.sources, strict=True)):
            self.shards = Float8Shards(sources, dtype=self.dtype, fused=self.fused)
        mesh = weights[0].device_mesh
        [axis] = [i for i, name in enumerate(mesh.mesh_dim_names) if name not in ("dp_replicate", "tp")]
        largest = compat.all_reduce(self.shards.largest(), "max", mesh.get_group(axis).group_name)
        self.shards.cast(largest)
        for shard, data, inverse in zip(sharded, self.shards.data, self.shards.inverses, strict=True):
            shard.kept, shard.cast_at = (data, inverse), shard.written
        self.expired = False


class ShardedWeight(Tensor):
    """A weight in full precision, ``_tensor``, and its float8 copy. Every view of the whole of it has one ``_tensor``,
    and so one version."""

    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, tensor: Tensor, owner: Float8Gather) -> ShardedWeight:
        return compat.wrapper(cls, tensor)

    def __init__(self, tensor: Tensor, owner: Float8Gather) -> None:
        self._tensor, self.owner = tensor, owner
        self.kept: tuple[Tensor, Tensor] | None = None
        self.cast_at = -1

    def __repr__(self) -> str:
        return f"ShardedWeight({self._tensor})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner, owners = [], []

        def unwrap(value: Any) -> Any:
            if not isinstance(value, ShardedWeight):
                return value
            inner.append(value._tensor)
            owners.append(value.owner)
            return value._tensor

        args, kwargs = tree_map(unwrap, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func._schema.is_mutable:  # below autograd nobody counts
            torch.autograd.graph.increment_version(inner)
        if func not in _KEEP:
            return found

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return cls(inner[0] if func in _VIEWS and _is_all_of(inner[0], value) else value, owners[0])

        return tree_map(wrap, found)

    @property
    def written(self) -> int:
        """How often, through this tensor or what it holds."""
        return self._version + self._tensor._version

    @property
    def is_fresh(self) -> bool:
        """Whether there is a copy, made of the numbers that the weight has now."""
        return self.cast_at == self.written

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What is gathered, and what else the gathered weight needs."""
        if self.owner.expired or not self.is_fresh:
            self.owner.refresh()
        data, inverse = self.kept
        return (data,), (inverse,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], extra: tuple[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered weight; or, with ``out``, which has its memory, nothing to do."""
        if out is not None:
            (compat.local_shard_object(out) if isinstance(out, DTensor) else out).inverse = extra[0]
            return None
        self.owner.num_gathered += 1
        return GatheredWeight(gathered[0], extra[0], dtype), ()


# FSDP counts the parameters at every gather, which takes Python longer than all else here unless it was done before
ShardedWeight.fsdp_pre_all_gather.__signature__ = inspect.signature(ShardedWeight.fsdp_pre_all_gather)


class GatheredWeight(Tensor):
    """A whole weight: data [N, K], float8, and inverse [1, 1], float32. To autograd a tensor of ``dtype``."""

    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, numbers: Tensor, inverse: Tensor, dtype: torch.dtype) -> GatheredWeight:
        return compat.wrapper(cls, numbers, dtype=dtype)

    def __init__(self, numbers: Tensor, inverse: Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.inverse = numbers, inverse

    def __repr__(self) -> str:  # torch.compile asks for it, whatever becomes of it
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "inverse"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["numbers"], inner["inverse"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight, *rest = args
        if func is torch.ops.titanyaml.gathered_parts.default:
            return weight.numbers, weight.inverse
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default):
            return cls(func(weight.numbers, *rest, **(kwargs or {})), weight.inverse, weight.dtype)
        raise NotImplementedError(f"{func} of a weight that was gathered in float8: only float8_linear reads it")


def gathered_parts(weight: GatheredWeight) -> tuple[Tensor, Tensor]:
    """Its float8 numbers [N, K] and their inverse scale [1, 1]. An operator, by which a compiler sees through it."""
    return torch.ops.titanyaml.gathered_parts(weight)


def _is_all_of(tensor: Tensor, view: Tensor) -> bool:
    """Whether a view of the tensor is the tensor."""
    return view.is_contiguous() and (view.shape, view.storage_offset()) == (tensor.shape, tensor.storage_offset())
