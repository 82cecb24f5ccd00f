"""Where the time of a step goes: a profiler's kernels by class, and the time in which none runs.

A kernel's name is all that a trace has of it. One that the compiler fused has one name, and so one class.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

#: The first pattern that is in a kernel's name, in lower case, decides. On a CPU the names are operators ("aten::mm").
CLASSES = {
    "communication": r"nccl|gloo|c10d|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast_kernel|symm_mem",
    "attention": r"flash|fmha|sdpa|attention|flex_",
    # torch's copies of many tensors are FSDP's into its buffers; an update's are known by when they run
    "optimizer": r"adam|multi_tensor(?!.*(?:copyfunctor|\bcopy<))|_foreach_(?!copy)|optimizer|clip_grad",
    "gemm": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|matmul|(?:^|[:_])(?:add|b|scaled_|grouped_)?mm(?:$|_|:)|linear",
    "casts": r"float8|fp8|e4m3|e5m2|amax|cast|quant|copy|chunk_cat|memcpy|::to$|convert",
}
OTHER = "elementwise"
#: Name of the range in which a step updates its weights: what runs there is the optimizer, whatever its name.
UPDATE = "titanyaml update"


class Span(NamedTuple):
    """A kernel, copy or operator: times in microseconds, ``own_us`` without what it called."""

    name: str
    own_us: float
    start: float
    end: float


def classify(name: str) -> str:
    """The class of a kernel or operator; what no pattern knows is elementwise: norms, SwiGLU, loss."""
    lower = name.lower()
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, lower)), OTHER)


def breakdown(trace: profile, *, steps: int, wall_s: float, device: torch.device) -> dict[str, Any]:
    """Milliseconds per step by class, and the largest kernels, of a stopped ``trace`` of ``steps`` in ``wall_s``.

    ``ms``: class to time. ``communication`` is all of it, ``exposed_communication`` the part during which no other
    kernel ran, ``idle`` the time without a kernel; all but ``communication`` add up to the step. ``step_ms``: of the
    profiled steps, which the profiler itself slows down. ``top``: name, class, ms and calls.
    """
    spans = _device_spans(trace) if device.type == "cuda" else _host_spans(trace)
    updates = _updates(trace, device)
    sums: dict[str, float] = dict.fromkeys([*CLASSES, OTHER], 0.0)
    by_name: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for span in spans:
        kind = classify(span.name)
        if kind != "communication" and any(start <= span.start < end for start, end in updates):
            kind = "optimizer"
        sums[kind] += span.own_us
        by_name[span.name, kind][0] += span.own_us
        by_name[span.name, kind][1] += 1
    # kernels of several streams overlap: their times may add up to more than the step, the union of them may not
    busy = _covered((span.start, span.end) for span in spans)
    computing = _covered((span.start, span.end) for span in spans if classify(span.name) != "communication")
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
    """(start, end) of the ranges ``UPDATE``; on a GPU those of the kernels that were launched in them."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    return [
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.name == UPDATE and event.device_type == kind
    ]


def _device_spans(trace: profile) -> list[Span]:
    return [
        Span(event.name, event.time_range.elapsed_us(), event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def _host_spans(trace: profile) -> list[Span]:
    """Operators on the CPU. One calls others: its own time is what it does not spend in those."""
    return [
        Span(event.name, event.self_cpu_time_total, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CPU and "::" in event.name and not event.name.startswith("autograd::")
    ]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, covered_until), 0.0)
        covered_until = max(covered_until, end)
    return total
