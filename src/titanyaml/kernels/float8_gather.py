"""Weights that FSDP gathers in float8: cast once after an update, however often they are gathered after it.

FSDP asks the shard of a parameter what to gather (``fsdp_pre_all_gather``), and what the gathered parameter is
(``fsdp_post_all_gather``). A ``ShardedWeight`` hands over a float8 copy of itself that lies ready: a cast in that hook
cost the host some thirty launches a block, twice a step, and a step of two H200s waited 83 of its 614 ms for it. A
``GatheredWeight`` is float8 numbers and their inverse scale, to be read by ``float8_linear`` alone.

A stale copy is never gathered. Whatever writes a tensor increments its version, our kernels by
``torch.autograd.graph.increment_version``, and each gather compares versions.

Shapes: N output features, K input features.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanyaml.distributed import compat
from titanyaml.kernels.float8_shards import Float8Shards

log = logging.getLogger("titanyaml")
aten = torch.ops.aten
#: Operators whose result is the same weight or a part of it.
_VIEWS = {aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default}
_VIEWS |= {aten.slice.Tensor, aten.split.Tensor}
#: Operators of FSDP, tensor parallelism and materialisation, whose result must be a ShardedWeight again.
_WRAPPED = _VIEWS | {aten.empty_like.default, aten.new_zeros.default, aten.copy_.default, aten.clone.default}
_WRAPPED |= {compat.TO_COPY}
_library = torch.library.Library("titanyaml", "FRAGMENT")
_library.define("gathered_parts(Tensor weight) -> (Tensor, Tensor)")


class Float8Gather:
    """The weights of some layers, cast together: one all-reduce agrees on the amax of all."""

    # Weights are rounded to the layers' compute dtype before the cast. The float8 numbers are then, to the bit, those
    # of weights that were gathered in this dtype: compared within a tolerance, a wrong scale could hide.
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
        """The weights were written: the next gather casts first."""
        self.expired = True

    def refresh(self) -> None:
        """Cast again because a copy is stale. All ranks see the same writes, so all of them come here together."""
        if not self.expired:
            log.info("weights were written outside of a step: they are cast to float8 again")
        self.cast()

    @torch.no_grad()
    def cast(self) -> None:
        """Cast all weights; every rank at the same time. Four launches, whatever the number of layers."""
        weights = [layer.weight for layer in self.layers]
        assert all(isinstance(weight, DTensor) for weight in weights), "weights are cast before FSDP has cut them"
        dtensors = cast(list[DTensor], weights)
        objects = [compat.local_shard_object(weight) for weight in dtensors]
        assert all(isinstance(shard, ShardedWeight) for shard in objects), "weights are cast while they are gathered"
        sharded = cast(list[ShardedWeight], objects)
        sources = [shard._tensor for shard in sharded]
        if self.shards is None or any(a is not b for a, b in zip(sources, self.shards.sources, strict=True)):
            self.shards = Float8Shards(sources, dtype=self.dtype, fused=self.fused)
        mesh = dtensors[0].device_mesh
        # A tp rank's part of a weight has a scale of its own, as without the gather; copies agree without asking.
        axis_names = enumerate(mesh.mesh_dim_names or ())
        [shard_axis] = [axis for axis, name in axis_names if name not in ("dp_replicate", "tp")]
        amax = compat.all_reduce(self.shards.amax(), "max", mesh.get_group(shard_axis).group_name)
        self.shards.cast(amax)
        for shard, data, inverse in zip(sharded, self.shards.data, self.shards.inverses, strict=True):
            shard.copy, shard.version_at_cast = (data, inverse), shard.version
        self.expired = False


class ShardedWeight(Tensor):
    """A weight in full precision, ``_tensor``, and its float8 copy.

    Every view of all of it holds the same ``_tensor``, and so has one version.
    """

    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, tensor: Tensor, owner: Float8Gather) -> ShardedWeight:
        return compat.make_wrapper_tensor(cls, tensor)

    def __init__(self, tensor: Tensor, owner: Float8Gather) -> None:
        self._tensor, self.owner = tensor, owner  # ``_tensor`` as in torchao's class: float8.unwrap reads both
        self.copy: tuple[Tensor, Tensor] | None = None  # float8 numbers and inverse scale
        self.version_at_cast = -1

    def __repr__(self) -> str:  # type: ignore[override] # torch passes no arguments
        return f"ShardedWeight({self._tensor})"

    @classmethod  # torch declares this one as a C function
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors: list[Tensor] = []
        owners: list[Float8Gather] = []

        def unwrap(value: Any) -> Any:
            if not isinstance(value, ShardedWeight):
                return value
            tensors.append(value._tensor)
            owners.append(value.owner)
            return value._tensor

        args, kwargs = compat.tree_map(unwrap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if compat.writes_its_input(func):  # autograd counts writes, but this runs below it
            torch.autograd.graph.increment_version(tensors)
        if func not in _WRAPPED:
            return result

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return cls(tensors[0] if func in _VIEWS and _is_all_of(tensors[0], value) else value, owners[0])

        return compat.tree_map(wrap, result)

    @property
    def version(self) -> int:
        """Number of writes, through this object or the tensor in it."""
        return compat.write_count(self) + compat.write_count(self._tensor)

    @property
    def is_fresh(self) -> bool:
        """Whether the copy was made of the numbers that the weight has now."""
        return self.version_at_cast == self.version

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """The tensors to gather, and what else the gathered weight needs."""
        if self.owner.expired or not self.is_fresh:
            self.owner.refresh()
        assert self.copy is not None
        data, inverse = self.copy
        return (data,), (inverse,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor], extra: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered weight; or, with ``out`` of an earlier gather, whose memory FSDP has filled, only its scale."""
        if out is not None:
            weight: Any = compat.local_shard_object(out) if isinstance(out, DTensor) else out
            weight.inverse_scale = extra[0]
            return None
        self.owner.num_gathered += 1
        return GatheredWeight(gathered[0], extra[0], dtype), ()


# FSDP inspects the hook's parameters at every gather, which takes longer than all else here unless it is cached so
ShardedWeight.fsdp_pre_all_gather.__dict__["__signature__"] = inspect.signature(ShardedWeight.fsdp_pre_all_gather)


class GatheredWeight(Tensor):
    """A full weight: float8 numbers [N, K] and inverse scale [1, 1], float32. To autograd a tensor of ``dtype``."""

    __torch_function__ = compat.no_torch_function

    @staticmethod
    def __new__(cls, numbers: Tensor, inverse_scale: Tensor, dtype: torch.dtype) -> GatheredWeight:
        return compat.make_wrapper_tensor(cls, numbers, dtype=dtype)

    def __init__(self, numbers: Tensor, inverse_scale: Tensor, dtype: torch.dtype) -> None:
        self.numbers = numbers
        self.inverse_scale = inverse_scale

    def __repr__(self) -> str:  # type: ignore[override] # torch.compile calls it without arguments
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["numbers"], inner["inverse_scale"], dtype)

    @classmethod  # torch declares this one as a C function
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight, *more_args = args
        if func is torch.ops.titanyaml.gathered_parts.default:
            return weight.numbers, weight.inverse_scale
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default):
            return cls(func(weight.numbers, *more_args, **(kwargs or {})), weight.inverse_scale, weight.dtype)
        raise NotImplementedError(f"{func} of a weight that was gathered in float8: only float8_linear reads it")


def gathered_parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A GatheredWeight's float8 numbers [N, K] and inverse scale [1, 1], by an operator that compilers see through."""
    return torch.ops.titanyaml.gathered_parts(weight)


def _is_all_of(tensor: Tensor, view: Tensor) -> bool:
    """Whether a view of the tensor is the tensor."""
    return view.is_contiguous() and (view.shape, view.storage_offset()) == (tensor.shape, tensor.storage_offset())
