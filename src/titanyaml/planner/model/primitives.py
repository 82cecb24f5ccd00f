"""The operators of which a step consists: GEMMs, attention, memory-bound kernels, collectives.

All sizes are those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gemm:
    """[m, k] x [k, n]."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"  # bf16, fp8, fp32 or fp64
    groups: int = 1  # independent GEMMs, one per expert, in one grouped kernel ...
    split: str = "m"  # ... which divide m among them, or k

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def gradients(self, weight_dtype: str) -> list[Gemm]:
        """The backward: GEMMs of the input's gradient (dx) and of the weight's (dw)."""
        dx = Gemm(f"{self.name}.dx", self.m, self.k, self.n, self.dtype, self.groups)
        # dw sums over the rows that each group has
        return [dx, Gemm(f"{self.name}.dw", self.n, self.k, self.m, weight_dtype, self.groups, split="k")]


@dataclass(frozen=True)
class AttentionKernel:
    """Fused causal attention."""

    batch: float
    heads: int
    head_dim: int
    seq_len: int  # of the whole sequence
    share: float  # of its queries that are on this rank (1/cp)
    backward: bool

    @property
    def flops(self) -> float:
        """Two GEMMs over half of the square, since attention is causal."""
        square = self.batch * self.heads * self.head_dim * float(self.seq_len) ** 2 * self.share
        # the backward has five GEMMs where the forward has two: it computes the scores again
        return 2 * square * (2.5 if self.backward else 1.0)


@dataclass(frozen=True)
class MemoryPass:
    """Kernels bound by memory bandwidth."""

    name: str
    kind: str  # class of time: elementwise, casts, loss, copies or optimizer
    bytes: float  # read and written


@dataclass(frozen=True)
class Collective:
    """Communication over one axis of the mesh."""

    axis: str
    op: str
    bytes: float  # of the whole tensor: all-gather's output, reduce-scatter's input; all that a rank sends to others
    name: str = ""  # named transfers are not fused with a GEMM by async TP


Operator = Gemm | AttentionKernel | MemoryPass | Collective
