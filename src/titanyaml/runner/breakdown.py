"""Where the time of a step goes: a profiler's kernels by class, and the time in which none runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

#: The first pattern found in a kernel's name decides (lower case). On a CPU the names are operators ("aten::mm").
CLASSES = {
    "communication": r"nccl|gloo|c10d|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast_kernel|symm_mem",
    "attention": r"flash|fmha|sdpa|attention|flex_",
    # torch's copies of many tensors are FSDP's into its buffers; those of an update are known by their time
    "optimizer": r"adam|multi_tensor(?!.*(?:copyfunctor|\bcopy<))|_foreach_(?!copy)|optimizer|clip_grad",
    "gemm": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|matmul|(?:^|[:_])(?:add|b|scaled_|grouped_)?mm(?:$|_|:)|linear",
    "casts": r"float8|fp8|e4m3|e5m2|amax|cast|quant|copy|chunk_cat|memcpy|::to$|convert",
}
OTHER = "elementwise"
#: Name of the range of a step in which weights are updated: what runs there is the optimizer, whatever it is called.
UPDATE = "titanyaml update"


def classify(name: str) -> str:
    """The class of a kernel or operator by its name; what no pattern knows is elementwise: norms, SwiGLU, loss."""
    lower = name.lower()
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, lower)), OTHER)


def breakdown(trace: profile, *, steps: int, wall_s: float, device: torch.device) -> dict[str, Any]:
    """Milliseconds per step by class of kernel, and the largest kernels.

    Args:
        trace: a stopped profiler over ``steps`` steps that took ``wall_s`` together.

    Returns:
        ``ms``: class to time; ``communication`` is the whole of it and ``exposed_communication`` the part during
        which no other kernel ran, so that all but ``communication`` add up to the step. ``idle``: no kernel ran.
        ``step_ms``: of the profiled steps, which the profiler itself slows down. ``top``: name, class, ms and calls.
    """
    spans = _device_spans(trace) if device.type == "cuda" else _host_spans(trace)
    updates = _updates(trace, device)
    sums: dict[str, float] = dict.fromkeys([*CLASSES, OTHER], 0.0)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for name, own_us, begin, _ in spans:
        kind = classify(name)
        if kind != "communication" and any(start <= begin < end for start, end in updates):
            kind = "optimizer"
        sums[kind] += own_us
        by_name[name, kind][0] += own_us
        by_name[name, kind][1] += 1
    busy = _covered((start, end) for _, _, start, end in spans)
    computing = _covered((start, end) for name, _, start, end in spans if classify(name) != "communication")
    sums["exposed_communication"] = busy - computing
    sums["idle"] = max(1e6 * wall_s - busy, 0.0)
    top = sorted(by_name.items(), key=lambda item: -item[1][0])[:30]
    return {
        "ms": {kind: us / 1e3 / steps for kind, us in sums.items()},
        "step_ms": 1e3 * wall_s / steps,
        "top": [
            {"name": name[:120], "class": kind, "ms": us / 1e3 / steps, "calls": calls / steps}
            for (name, kind), (us, calls) in top
        ],
    }


def _updates(trace: profile, device: torch.device) -> list[tuple[float, float]]:
    """(start, end) of the ranges ``UPDATE``: on a GPU, of the kernels that were launched in them (microseconds)."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    return [
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.name == UPDATE and event.device_type == kind
    ]


def _device_spans(trace: profile) -> list[tuple[str, float, float, float]]:
    """(name, own time, start, end) of every kernel and copy on the GPU (microseconds)."""
    return [
        (event.name, event.time_range.elapsed_us(), event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def _host_spans(trace: profile) -> list[tuple[str, float, float, float]]:
    """The same for operators on the CPU, where one calls others: its own time is what it does not spend in those."""
    return [
        (event.name, event.self_cpu_time_total, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CPU and "::" in event.name and not event.name.startswith("autograd::")
    ]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
