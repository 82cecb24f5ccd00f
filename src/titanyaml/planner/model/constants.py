"""The fitted constants: what no datasheet gives, each with its unit, plausible interval and source.

They were fitted together on torchtitan's published rows and on one-GPU runs of an H200 (``benchmarks/planner_fit.py``,
which also fits random halves); the interval is what kernels of that kind can do. docs/planner.md shows the errors.
Rates belong to a device (``conf/hardware``) and to links (``conf/cluster``). Of those the GEMM rates in bf16 and
float8 and NVLink's rate are fitted too: twelve fitted numbers stand behind a plan.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """A fitted value in ``unit``, plausible from ``low`` to ``high``."""

    value: float
    unit: str
    low: float
    high: float
    source: str


# Casts to float8 in both layouts. By count 9: amax reads 2, the cast reads 2 and writes 1, a transposed copy takes 4
CAST_TENSORWISE = Fitted(11.2, "bytes per element", 8.3, 13, "fit; amax, read, write, transposed copy")
CAST_ROWWISE = Fitted(21.6, "bytes per element", 17, 28, "fit on H200 and tp rows; both sides have scales of their own")
# NCCL's kernels hold up to 24 of 132 multiprocessors (0.18) while they run. A term per second of a collective would be
# wrong for slow networks, where the kernels mostly wait: it goes by bytes at NVLink's rate
CONTENTION = Fitted(0.18, "seconds of computing per second of overlapped transfer at NVLink rate", 0.10, 0.27, "fit")
ASYNC_TP_HIDDEN = Fitted(0.36, "of the tp transfers", 0.23, 0.50, "fit on published speed-ups of 4 to 16 %")
STRAGGLER = Fitted(0.0055, "of the step per doubling of hosts", 0.004, 0.014, "fit on 8, 64 and 128 GPUs")
CONTEXT_SLOWDOWN = Fitted(0.445, "of attention, times 1 - 1/cp", 0.3, 0.6, "fit; 405B at cp 2 to 8, 3B at cp 2 on H200")
# By count 14: two gathers (forward, backward) are copied out of a flat buffer (4 each), gradients into one (6)
FSDP_COPY = Fitted(19.6, "bytes per whole parameter and microbatch", 14, 24, "copies in and out of flat buffers")
# Under tp, memory of the smaller of loss and block backward that the larger one cannot reuse: other block sizes
TP_LEFTOVER = Fitted(0.71, "of the smaller of loss and block", 0.4, 1.0, "reserved memory of 70B at tp 8")
# Workspaces, rounding, and blocks that the allocator caches for each stream
ALLOCATOR_GIB = Fitted(1.76, "GiB", 1.0, 2.5, "fit on reserved memory without pp")

ALL = {name: value for name, value in list(globals().items()) if isinstance(value, Fitted)}
