"""Shards of many weights cast to float8 by two launches, each at the scale of its full weight.

Between the two the ranks agree on one amax a weight. A model has hundreds of shards, and the host takes longer to
launch a kernel for each than a GPU to run it. So one kernel handles them all, by a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanyaml.kernels.float8_cast import SMALLEST, float8_cast, scale_of
from titanyaml.kernels.triton_support import ceil_div, jit, tl

E4M3 = torch.float8_e4m3fn
PROGRAMS, TILE, WARPS = 256, 4096, 8  # programs a shard at most, and elements that each takes at once


class Float8Shards:
    """The float8 copies of some tensors, and their inverse scales, in memory that is reused by every cast.

    Args:
        sources: contiguous, float32, not empty, of a multiple of 16 elements, on one device.
        dtype: float32 or bfloat16: sources count as rounded to it, their amax included.
        fused: the Triton kernels, else plain PyTorch.
    """

    def __init__(self, sources: Sequence[Tensor], *, dtype: torch.dtype, fused: bool) -> None:
        assert all(s.is_contiguous() and s.numel() and s.numel() % 16 == 0 for s in sources)
        self.sources, self.dtype, self.fused = list(sources), dtype, fused
        self.data = [torch.empty_like(source, dtype=E4M3) for source in sources]
        # 16 bytes each: Inductor copies an input that is aligned otherwise than the one it compiled for
        self.inverses = list(sources[0].new_empty((len(sources), 1, 4), dtype=torch.float32)[:, :, :1])
        if fused:
            assert all(source.data_ptr() % 16 == 0 for source in sources), "the kernels read 16 bytes at once"
            rows = [[t.data_ptr() for t in tensors] for tensors in (self.sources, self.data, self.inverses)]
            self.table = torch.tensor([*rows, [t.numel() for t in sources]], device=sources[0].device)

    @property
    def _programs(self) -> int:
        return min(PROGRAMS, ceil_div(max(source.numel() for source in self.sources), TILE))

    def amax(self) -> Tensor:
        """The largest |x| of each source, as the int32 bits of float32."""
        # Bits of numbers >= 0 are in the order of the numbers and those of NaN above all: a maximum over ranks, which
        # may lose a NaN among floats, loses nothing.
        if not self.fused:
            return torch.stack([source.abs().amax().float() for source in self.sources]).view(torch.int32)
        count, programs = len(self.sources), self._programs
        partial = self.table.new_empty((count, programs), dtype=torch.int32)
        launch = shards_amax_kernel[(programs, count)]
        launch(self.table, self.sources[0], partial, count, TILE=TILE, num_warps=WARPS)
        return partial.amax(1)

    def cast(self, amax: Tensor) -> None:
        """Fill ``data`` and ``inverses``. amax: as ``amax`` returned it, of the full weights."""
        if self.fused:
            count, top = len(self.sources), torch.finfo(E4M3).max
            constants = {"TILE": TILE, "SMALLEST": SMALLEST, "TOP": top, "BFLOAT16": self.dtype == torch.bfloat16}
            launch = shards_cast_kernel[(self._programs, count)]
            launch(self.table, self.sources[0], self.data[0], amax, count, **constants, num_warps=WARPS)
            return
        amaxes = amax.view(torch.float32).to(self.dtype).float().view(-1, 1, 1)
        for source, source_amax, data, inverse in zip(self.sources, amaxes, self.data, self.inverses, strict=True):
            rounded = source.to(self.dtype)
            copies = float8_cast(rounded, source_amax, dtype=E4M3, power_of_2=False, fused=False, transposed=False)
            assert copies.data_MK is not None and copies.inverse_M1 is not None
            data.copy_(copies.data_MK)
            inverse.copy_(copies.inverse_M1)


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
