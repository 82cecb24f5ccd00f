"""Shards of many weights cast to float8 by two launches, each at the scale of its whole weight.

Between the two stands what the ranks must agree on: one maximum a weight. A model has hundreds of shards, and a host
takes longer to launch a kernel for each than a GPU to run it; so a kernel finds them all, by a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanyaml.kernels.float8_cast import SMALLEST, float8_cast, scale_of
from titanyaml.kernels.triton_support import jit, tl

E4M3 = torch.float8_e4m3fn
PROGRAMS, TILE, WARPS = 256, 4096, 8  # programs a shard at most, and numbers that each takes at once


class Float8Shards:
    """The float8 copies of some tensors, and their inverse scales; they keep their memory from cast to cast.

    Args:
        sources: contiguous, float32, of a multiple of 16 numbers, on one device. None may be empty.
        dtype: float32 or bfloat16: the sources count as rounded to it, maxima included.
        fused: the Triton kernels; else plain PyTorch.
    """

    def __init__(self, sources: Sequence[Tensor], *, dtype: torch.dtype, fused: bool) -> None:
        assert all(s.is_contiguous() and s.numel() and s.numel() % 16 == 0 for s in sources)
        self.sources, self.dtype, self.fused = list(sources), dtype, fused
        self.data = [torch.empty_like(source, dtype=E4M3) for source in sources]
        # 16 bytes each: a compiler copies what is aligned worse than what it has seen
        self.inverses = list(sources[0].new_empty((len(sources), 1, 4), dtype=torch.float32)[:, :, :1])
        if fused:
            assert all(source.data_ptr() % 16 == 0 for source in sources), "the kernels read 16 bytes at once"
            rows = [
                [t.data_ptr() for t in sources],
                [t.data_ptr() for t in self.data],
                [t.data_ptr() for t in self.inverses],
                [t.numel() for t in sources],
            ]
            self.table = torch.tensor(rows, device=sources[0].device)

    @property
    def _programs(self) -> int:
        return min(PROGRAMS, -(-max(source.numel() for source in self.sources) // TILE))

    def largest(self) -> Tensor:
        """The largest |x| of each source: float32 as its bits, int32. They are in the order of the numbers >= 0, and
        those of NaN are above any: whoever takes a maximum of them loses nothing."""
        if not self.fused:
            return torch.stack([source.abs().amax().float() for source in self.sources]).view(torch.int32)
        found = self.table.new_empty((len(self.sources), self._programs), dtype=torch.int32)
        shards_largest_kernel[(self._programs, len(self.sources))](
            self.table, self.sources[0], found, len(self.sources), TILE=TILE, num_warps=WARPS
        )
        return found.amax(1)

    def cast(self, largest: Tensor) -> None:
        """Fill ``data`` and ``inverses``, given the maxima of the whole weights."""
        if self.fused:
            shards_cast_kernel[(self._programs, len(self.sources))](
                self.table,
                self.sources[0],
                self.data[0],
                largest,
                len(self.sources),
                TILE=TILE,
                SMALLEST=SMALLEST,
                TOP=torch.finfo(E4M3).max,
                BFLOAT16=self.dtype == torch.bfloat16,
                num_warps=WARPS,
            )
            return
        wholes = largest.view(torch.float32).to(self.dtype).float().view(-1, 1, 1)
        for source, whole, data, inverse in zip(self.sources, wholes, self.data, self.inverses, strict=True):
            made = float8_cast(source.to(self.dtype), whole, dtype=E4M3, power_of_2=False, fused=False, turned=False)
            data.copy_(made.data_MK)
            inverse.copy_(made.inverse_M1)


@jit
def shards_largest_kernel(table_ptr, like_ptr, largest_ptr, count, TILE: tl.constexpr):
    """The largest |x| of a program's tiles of a shard, as bits; a shard's stand beside each other."""
    shard = tl.program_id(1)
    x_ptr = tl.multiple_of(tl.load(table_ptr + shard).to(like_ptr.dtype), 16)
    size = tl.multiple_of(tl.load(table_ptr + 3 * count + shard), 16)
    bits = tl.zeros([TILE], tl.int32)
    for start in range(tl.program_id(0) * TILE, size, tl.num_programs(0) * TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + place, mask=place < size, other=0.0)
        bits = tl.maximum(bits, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))
    tl.store(largest_ptr + shard * tl.num_programs(0) + tl.program_id(0), tl.max(bits, 0))


@jit
def shards_cast_kernel(
    table_ptr, like_ptr, made_ptr, largest_ptr, count, TILE: tl.constexpr, SMALLEST: tl.constexpr, TOP: tl.constexpr,
    BFLOAT16: tl.constexpr,
):  # fmt: skip
    """A program's tiles of a shard; ``like_ptr`` and ``made_ptr`` tell the types of what the table points to."""
    shard = tl.program_id(1)
    x_ptr = tl.multiple_of(tl.load(table_ptr + shard).to(like_ptr.dtype), 16)
    data_ptr = tl.multiple_of(tl.load(table_ptr + count + shard).to(made_ptr.dtype), 16)
    size = tl.multiple_of(tl.load(table_ptr + 3 * count + shard), 16)
    whole = tl.load(largest_ptr + shard).to(tl.float32, bitcast=True)
    if BFLOAT16:
        whole = whole.to(tl.bfloat16).to(tl.float32)
    scale = scale_of(whole, TOP, SMALLEST, False)
    if tl.program_id(0) == 0:
        inverse_ptr = tl.load(table_ptr + 2 * count + shard).to(tl.pointer_type(tl.float32))
        tl.store(inverse_ptr, tl.div_rn(1.0, scale))
    for start in range(tl.program_id(0) * TILE, size, tl.num_programs(0) * TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
        if BFLOAT16:
            x = x.to(tl.bfloat16).to(tl.float32)
        tl.store(data_ptr + place, (x * scale).to(data_ptr.dtype.element_ty), mask=place < size)
