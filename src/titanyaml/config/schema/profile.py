"""Keys of what is measured in a run. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import key

_ON = ["trace", "memory", "both"]


@dataclass
class Profile:
    """Traces and memory snapshots of chosen steps. A window is wait + warmup + active steps."""

    kind: str = key("none", "trace: kernels over time; memory: CUDA allocations", choices=["none", *_ON])
    # compilation and the allocator's growth lie in the first steps
    wait: int = key(4, "steps of a window that are left alone", low=0, when=("kind", _ON))
    warmup: int = key(1, "steps after them in which the profiler runs and records nothing", low=0, when=("kind", _ON))
    active: int = key(2, "steps after these that are recorded, in one file per rank", low=1, when=("kind", _ON))
    repeat: int = key(1, "windows; 0: as many as there are steps for", low=0, when=("kind", _ON))
    ranks: list[int] = key([0], "ranks that record", when=("kind", _ON))
    shapes: bool = key(False, "record the operators' input shapes", when=("kind", ["trace", "both"]))
    stacks: bool = key(False, "record the Python lines that called them (slow)", when=("kind", ["trace", "both"]))
    max_allocations: int = key(
        200_000, "newest allocations and frees that a snapshot keeps", low=1, when=("kind", ["memory", "both"])
    )
