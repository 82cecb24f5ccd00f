"""What a step is made of: products, attentions, passes over memory, collectives. Per rank, with local shapes."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.planner.model.inputs import Job


@dataclass(frozen=True)
class Gemm:
    """[m, k] x [k, n]; dtype: bf16, fp8 or fp32. groups: independent products into which m (or k, ``split``) is cut,
    one for each expert."""

    name: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    groups: int = 1
    split: str = "m"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """Fused causal attention; ``seq_len`` positions in all, of which this rank asks for ``share``."""

    batch: float
    heads: int
    head_dim: int
    seq_len: int
    share: float
    backward: bool

    @property
    def flops(self) -> float:
        """Half of the square; a backward pass has five products where a forward has two."""
        square = self.batch * self.heads * self.head_dim * float(self.seq_len) ** 2 * self.share
        return 2 * square * (2.5 if self.backward else 1.0)


@dataclass(frozen=True)
class Pass:
    """Kernels that only move memory. kind: elementwise, casts, loss, copies, optimizer."""

    name: str
    kind: str
    bytes: float


@dataclass(frozen=True)
class Collective:
    """bytes: of what is whole: a gather's output, a scatter's input, a reduction's tensor, what a rank sends to all."""

    axis: str
    op: str
    bytes: float
    name: str = ""


Operator = Gemm | Attention | Pass | Collective


def width(job: Job) -> str:
    """The dtype in which a run computes."""
    return {2: "bf16", 4: "fp32", 8: "fp64"}[job.compute_bytes]
