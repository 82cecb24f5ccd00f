"""The fitted numbers: what no datasheet gives, each with its unit, the interval in which it is plausible, its source.

Fitted together on torchtitan's published rows and one-GPU runs on an H200 (``benchmarks/planner_fit.py``, which also
fits them on random halves); the interval is what kernels of that kind can do. docs/planner.md shows the errors. Rates
belong to a device (``conf/hardware``) and to links (``conf/cluster``): of those, products in bf16 and in float8 and
NVLink are fitted, so that twelve fitted numbers stand behind a plan.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """value in unit, plausible in low .. high, and where it comes from."""

    value: float
    unit: str
    low: float
    high: float
    source: str


CAST_TENSORWISE = Fitted(11.2, "bytes per element", 8.3, 13, "fit; amax, read, write, transposed copy")
CAST_ROWWISE = Fitted(21.6, "bytes per element", 17, 28, "fit on H200 and tp rows; both sides have scales of their own")
CONTENTION = Fitted(0.18, "seconds of computing per second of overlapped transfer at NVLink rate", 0.10, 0.27, "fit")
ASYNC_TP_HIDDEN = Fitted(0.36, "of the tp transfers", 0.23, 0.50, "fit on published speed-ups of 4 to 16 %")
STRAGGLER = Fitted(0.0055, "of the step per doubling of hosts", 0.004, 0.014, "fit on 8, 64 and 128 GPUs")
CONTEXT_SLOWDOWN = Fitted(0.445, "of attention, times 1 - 1/cp", 0.3, 0.6, "fit; 405B at cp 2 to 8, 3B at cp 2 on H200")
FSDP_COPY = Fitted(19.6, "bytes per whole parameter and microbatch", 14, 24, "copies in and out of flat buffers")
TP_LEFTOVER = Fitted(0.71, "of the smaller of loss and block", 0.4, 1.0, "reserved memory of 70B at tp 8")
ALLOCATOR_GIB = Fitted(1.76, "GiB", 1.0, 2.5, "fit on reserved memory without pp")

ALL = {name: value for name, value in list(globals().items()) if isinstance(value, Fitted)}
