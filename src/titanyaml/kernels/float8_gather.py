"""Weights that FSDP gathers in float8: cast once after an update, however often they are gathered after it.

FSDP asks the shard of a parameter what to gather (``fsdp_pre_all_gather``), and what the gathered parameter is
(``fsdp_post_all_gather``). A ``ShardedWeight`` hands over a float8 copy of itself that lies ready: a cast in that hook
cost the host some thirty launches a block, twice a step, and a step of two H200s waited 83 of its 614 ms for it. A
``GatheredWeight`` is float8 numbers and their inverse scale, to be read by ``float8_linear`` alone.

A stale copy is never gathered. Whatever writes a tensor increments its version, our kernels by
``torch.autograd.graph.increment_version``, and each gather compares versions.

The shards of all weights are cast by two launches. Between them the ranks agree on one amax a weight. A model has
hundreds of shards, and the host takes longer to launch a kernel for each than a GPU to run it. So one kernel handles
them all, by a table of addresses.

Shapes: N output features, K input features.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanyaml.distributed import compat
from titanyaml.kernels.float8_cast import SMALLEST, float8_cast, scale_of
from titanyaml.kernels.triton_support import ceil_div, jit, tl

log = logging.getLogger("titanyaml")
aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
PROGRAMS, TILE, WARPS = 256, 4096, 8  # programs a shard at most, and elements that each takes at once
#: Operators whose result is the same weight or a part of it.
_VIEWS = {aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default}
_VIEWS |= {aten.slice.Tensor, aten.split.Tensor}
#: Operators of FSDP, tensor parallelism and materialisation, whose result must be a ShardedWeight again.
_WRAPPED = _VIEWS | {aten.empty_like.default, aten.new_zeros.default, aten.copy_.default, aten.clone.default}
_WRAPPED |= {compat.TO_COPY}
_library = torch.library.Library("titanyaml", "FRAGMENT")
_library.define("gathered_parts(Tensor weight) -> (Tensor, Tensor)")


class Float8Shards:
    """The float8 copies of some tensors, and their inverse scales, in memory that is reused by every cast.
    Sources are contiguous, float32, not empty, of a multiple of 16 elements, on one device.
    They count as rounded to ``dtype`` (float32 or bfloat16), their amax included.
    """

    def __init__(self, sources: Sequence[Tensor], *, dtype: torch.dtype, fused: bool) -> None:
        assert all(s.is_contiguous() and s.numel() and s.numel() % 16 == 0 for s in sources)
        self.sources, self.dtype, self.fused = list(sources), dtype, fused
        self.data = [torch.empty_like(source, dtype=E4M3) for source in sources]
        self.programs = min(PROGRAMS, ceil_div(max(source.numel() for source in sources), TILE))
        # 16 bytes each: Inductor copies an input that is aligned otherwise than the one it compiled for
        self.inverses = list(sources[0].new_empty((len(sources), 1, 4), dtype=torch.float32)[:, :, :1])
        if fused:
            assert all(source.data_ptr() % 16 == 0 for source in sources), "the kernels read 16 bytes at once"
            rows = [[t.data_ptr() for t in tensors] for tensors in (self.sources, self.data, self.inverses)]
            self.table = torch.tensor([*rows, [t.numel() for t in sources]], device=sources[0].device)

    def amax(self) -> Tensor:
        """The largest |x| of each source, as the int32 bits of float32."""
        # Bits of numbers >= 0 are in the order of the numbers and those of NaN above all: a maximum over ranks, which
        # may lose a NaN among floats, loses nothing.
        if not self.fused:
            return torch.stack([source.abs().amax().float() for source in self.sources]).view(torch.int32)
        count, programs = len(self.sources), self.programs
        partial = self.table.new_empty((count, programs), dtype=torch.int32)
        launch = shards_amax_kernel[(programs, count)]
        launch(self.table, self.sources[0], partial, count, TILE=TILE, num_warps=WARPS)
        return partial.amax(1)

    def cast(self, amax: Tensor) -> None:
        """Fill ``data`` and ``inverses``. amax: as ``amax`` returned it, of the full weights."""
        if self.fused:
            count, top = len(self.sources), torch.finfo(E4M3).max
            constants = {"TILE": TILE, "SMALLEST": SMALLEST, "TOP": top, "BFLOAT16": self.dtype == torch.bfloat16}
            launch = shards_cast_kernel[(self.programs, count)]
            launch(self.table, self.sources[0], self.data[0], amax, count, **constants, num_warps=WARPS)
            return
        amaxes = amax.view(torch.float32).to(self.dtype).float().view(-1, 1, 1)
        for source, source_amax, data, inverse in zip(self.sources, amaxes, self.data, self.inverses, strict=True):
            rounded = source.to(self.dtype)
            copies = float8_cast(rounded, source_amax, dtype=E4M3, power_of_2=False, fused=False, transposed=False)
            assert copies.data_MK is not None and copies.inverse_M1 is not None
            data.copy_(copies.data_MK)
            inverse.copy_(copies.inverse_M1)


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
    """A weight in full precision, ``_tensor``, and its float8 copy. A view of all of it holds the same ``_tensor``."""

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

    @classmethod  # torch declares the method as a C function
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
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

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """The tensors to gather, and what else the gathered weight needs."""
        if self.owner.expired or self.version_at_cast != self.version:
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
        self.numbers, self.inverse_scale = numbers, inverse_scale

    def __repr__(self) -> str:  # type: ignore[override] # torch.compile calls it without arguments
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["numbers"], inner["inverse_scale"], dtype)

    @classmethod  # torch declares the method as a C function
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
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
    return view.is_contiguous() and (view.shape, view.storage_offset()) == (tensor.shape, tensor.storage_offset())


# ``like_ptr`` and ``data_like_ptr`` carry the types of what the table points to: an address is only an integer.
# ``multiple_of`` tells Triton of the alignment, without which it would not load 16 bytes at once.


@jit
def shards_amax_kernel(table_ptr, like_ptr, amax_ptr, count, TILE: tl.constexpr):
    """The largest |x| of a program's tiles of a shard, as bits; those of one shard lie beside each other."""
    shard = tl.program_id(1)
    x_ptr = tl.multiple_of(tl.load(table_ptr + shard).to(like_ptr.dtype), 16)
    size = tl.multiple_of(tl.load(table_ptr + 3 * count + shard), 16)
    bits = tl.zeros([TILE], tl.int32)
    for start in range(tl.program_id(0) * TILE, size, tl.num_programs(0) * TILE):
        offsets = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0)
        bits = tl.maximum(bits, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))
    tl.store(amax_ptr + shard * tl.num_programs(0) + tl.program_id(0), tl.max(bits, 0))


@jit
def shards_cast_kernel(
    table_ptr, like_ptr, data_like_ptr, amax_ptr, count, TILE: tl.constexpr, SMALLEST: tl.constexpr, TOP: tl.constexpr,
    BFLOAT16: tl.constexpr,
):  # fmt: skip
    shard = tl.program_id(1)
    x_ptr = tl.multiple_of(tl.load(table_ptr + shard).to(like_ptr.dtype), 16)
    data_ptr = tl.multiple_of(tl.load(table_ptr + count + shard).to(data_like_ptr.dtype), 16)
    size = tl.multiple_of(tl.load(table_ptr + 3 * count + shard), 16)
    amax = tl.load(amax_ptr + shard).to(tl.float32, bitcast=True)
    if BFLOAT16:  # rounding is monotone: the rounded amax is the amax of rounded numbers
        amax = amax.to(tl.bfloat16).to(tl.float32)
    scale = scale_of(amax, TOP, SMALLEST, False)
    if tl.program_id(0) == 0:
        inverse_ptr = tl.load(table_ptr + 2 * count + shard).to(tl.pointer_type(tl.float32))
        tl.store(inverse_ptr, tl.div_rn(1.0, scale))
    for start in range(tl.program_id(0) * TILE, size, tl.num_programs(0) * TILE):
        offsets = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)
        if BFLOAT16:
            x = x.to(tl.bfloat16).to(tl.float32)
        tl.store(data_ptr + offsets, (x * scale).to(data_ptr.dtype.element_ty), mask=offsets < size)
