"""Measure what the planner reckons with, under load, and write it as options of ``hardware`` and ``cluster``.

Everything of a round takes turns, round after round, and is timed only after seconds of the same: a device that is
held at its power limit runs slower than one that does a product now and then.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanyaml import hardware
from titanyaml.ceilings import FLOAT8_ALIGNMENT
from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.planner.model import devices
from titanyaml.planner.model.cost import HALF_LENGTH
from titanyaml.rundir import RunDir, atomic_write, utc_now

log = logging.getLogger("titanyaml")
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Args:
        linears: (tokens, inputs, outputs) of layers, three products each. attention: (batch, heads, key heads,
            positions, width of a head). casts: (rows, columns). copied, sent: bytes. warm_s, run_s: how long a round is
            repeated before it is timed, and while it is.
    """

    linears: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int, int], ...]
    casts: tuple[int, int]
    copied: int
    sent: int
    warm_s: float
    run_s: float


#: Layers of models of 1B to 70B, one rank's share under tp 8 among them.
GPU = Sizes(
    linears=(
        (8192, 4096, 4096),
        (8192, 4096, 1024),
        (8192, 4096, 14336),
        (8192, 14336, 4096),
        (16384, 3072, 8192),
        (16384, 2048, 2048),
        (16384, 8192, 3584),
        (16384, 8192, 1024),
        (8192, 8192, 8192),
    ),
    attention=((1, 32, 8, 8192, 128), (4, 24, 8, 4096, 128)),
    casts=(16384, 8192),
    copied=2**30,
    sent=2**29,
    warm_s=3.0,
    run_s=4.0,
)
CPU = Sizes(
    linears=((64, 64, 64), (64, 32, 128)),
    attention=((1, 2, 2, 64, 16),),
    casts=(64, 64),
    copied=2**20,
    sent=2**16,
    warm_s=0.0,
    run_s=0.02,
)


def calibrate(run: RunDir, env: Env) -> None:
    """Measure, and write ``hardware/<name>_calibrated.yaml`` (and, with several ranks of one host,
    ``cluster/<name>_calibrated.yaml``) into the run's folder: ``--config-dir <run folder> hardware=<name>_calibrated``.
    """
    device = env.device
    sizes = GPU if device.type == "cuda" else CPU
    name = hardware.detect(device) or "gpu"
    found = rates(device, sizes)
    links = _links(env, sizes) if env.world_size > 1 else {}
    hardware.forget_peaks(device)
    if not env.is_main:
        return
    spec, cluster = devices.shipped_device(name)
    known = {key: value for key, value in vars(spec).items() if key in ("peak_bf16_tflops", "power_w") and value}
    values: dict[str, Any] = {"name": f"{name}_calibrated", "basis": "calibrated", **known, **found}
    chosen = next(iter(devices.shipped("hardware", name).get("defaults", [{}])[0].values()), None)
    option = f"{name}_calibrated"
    if links:
        joined = {key: value for key, value in vars(cluster).items() if value is not None}
        hosts = {"name": option, "basis": "calibrated", "gpus_per_host": max(cluster.gpus_per_host, env.world_size)}
        _write(run, "cluster", option, joined | hosts | links, "links between the ranks of one host measured")
        chosen = option
    if chosen:
        values = {"defaults": [{"override /cluster@_global_.cluster": chosen}, "_self_"], **values}
    path = _write(run, "hardware", option, values, f"rates measured with torch {torch.__version__}")
    log.info("rates of this device: %s (--config-dir %s hardware=%s)", path, run.path, option)


def _write(run: RunDir, group: str, option: str, values: dict[str, Any], what: str) -> Any:
    folder = run.path / group
    folder.mkdir(exist_ok=True)
    head = (
        f"# {_device_name()}: {what} on {utc_now()[:10]}, by runner=bench hardware.calibrate=true.\n"
        f"# titanyaml --config-dir <this run's folder> runner=plan hardware={option}\n"
    )
    atomic_write(folder / f"{option}.yaml", head + yaml.safe_dump(values, sort_keys=False, width=110))
    return folder / f"{option}.yaml"


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def rates(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Keys of ``hardware`` that were measured, with their values."""
    found: dict[str, Any] = {}
    if device.type == "cuda":
        found["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / hardware.GIB, 1)
        found["launch_us"] = _launch_us(device)
    products, other = _products(sizes, device, "bf16"), _attention(sizes, device) | _copy(sizes, device)
    seconds = sustained(products | other, device, sizes)
    found |= fit(sizes, seconds, "bf16") | _attention_rates(sizes, seconds)
    copied = 2 * sizes.copied / seconds["copy"]
    found |= {"memory_tb_s": _round(copied / 1e12), "memory_share": 1.0}
    del products
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        torch.cuda.empty_cache()
        casts = _casts(sizes, device)
        seconds = sustained(_products(sizes, device, "fp8") | casts | other, device, sizes)
        found |= fit(sizes, seconds, "fp8")
        rows, columns = sizes.casts
        found |= {f"{name}_bytes": _round(seconds[name] * copied / (rows * columns)) for name in casts}
    return found


def sustained(calls: Calls, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Median seconds of each call while all of them take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for limit, counts in ((sizes.warm_s, False), (sizes.run_s, True)):
        begin = time.perf_counter()
        while True:
            for name, seconds in _turn(calls, device).items():
                if counts:
                    times[name].append(seconds)
            if time.perf_counter() - begin >= limit:
                break
    return {name: statistics.median(found) for name, found in times.items()}


def _turn(calls: Calls, device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        found = {}
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            found[name] = time.perf_counter() - begin
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for mark, call in zip(marks[1:], calls.values(), strict=True):
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return {
        name: before.elapsed_time(after) / 1e3 for name, before, after in zip(calls, marks, marks[1:], strict=False)
    }


def _sides(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """Name of a product to its [m, n, k]: forward, gradient of the input, gradient of the weight."""
    return {
        f"{t}x{i}x{o} {kind}": sides
        for t, i, o in sizes.linears
        for kind, sides in (("forward", (t, o, i)), ("dx", (t, i, o)), ("dw", (o, i, t)))
    }


def _products(sizes: Sizes, device: torch.device, dtype: str) -> Calls:
    make = {"bf16": _bf16_product, "fp8": _fp8_product}[dtype]
    return {
        name: make(device, name.rpartition(" ")[2], *sides)
        for name, sides in _sides(sizes).items()
        if dtype == "bf16" or not any(side % FLOAT8_ALIGNMENT for side in sides)
    }


def _bf16_product(device: torch.device, kind: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """In the layouts that autograd uses."""
    make = lambda *size: torch.randn(size, device=device, dtype=torch.bfloat16)  # noqa: E731
    if kind == "forward":
        x_MK, weight_NK = make(m, k), make(n, k)
        return lambda: F.linear(x_MK, weight_NK)
    left, right = (make(m, k) if kind == "dx" else make(k, m).t()), make(k, n)
    return lambda: left @ right


def _fp8_product(device: torch.device, kind: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """Operands are cast already, and lie as the tensor cores want them; one scale each, the short accumulator."""
    left, right = (torch.randn(side, k, device=device).to(torch.float8_e4m3fn) for side in (m, n))
    scale = torch.ones((), device=device)
    return lambda: compat.scaled_mm(left, right.t(), scale, scale)


def fit(sizes: Sizes, seconds: dict[str, float], dtype: str) -> dict[str, float]:
    """Rate R and shape constant s of products that take flops / R * (1 + s(1/m + 1/n + 1/k)) seconds: the line through
    seconds per FLOP over that sum, by least squares of relative errors."""
    points = [
        (sum(1 / side for side in sides), seconds[name] / (2 * math.prod(sides)))
        for name, sides in _sides(sizes).items()
        if name in seconds
    ]
    weights = [1 / cost**2 for _, cost in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    slope = min(max(slope, 0.0), 0.9 * mean_y / mean_x)
    least = mean_y - slope * mean_x
    return {f"gemm_{dtype}_tflops": _round(1e-12 / least), f"gemm_{dtype}_shape": _round(slope / least)}


def _attention(sizes: Sizes, device: torch.device) -> Calls:
    """``flash`` and, where there is one, ``cudnn``, forward and backward, of each size; what a backend refuses is left
    out."""
    calls: Calls = {}
    backends = {"flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
    for kernel, backend in backends.items():
        for number, size in enumerate(sizes.attention):
            forward, backward = _one_attention(backend, size, device)
            try:
                forward()
                backward()
            except RuntimeError:
                log.info("%s attention is not available here", kernel)
                break
            calls |= {f"{kernel} forward {number}": forward, f"{kernel} backward {number}": backward}
    return calls


def _one_attention(
    backend: SDPBackend, size: tuple[int, int, int, int, int], device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    batch, heads, key_heads, length, width = size
    inputs = [
        torch.randn(batch, count, length, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    ]

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=heads != key_heads)

    kept: list[Tensor] = []  # made at the first call: a backend may refuse

    def backward() -> Any:
        if not kept:
            kept.extend([out := forward(), torch.randn_like(out)])
        return torch.autograd.grad(kept[0], inputs, kept[1], retain_graph=True)

    return forward, backward


def _attention_rates(sizes: Sizes, seconds: dict[str, float]) -> dict[str, float]:
    """Rates at endless length: what was reached, times 1 + (half length) / length; of several sizes the mean."""
    found: dict[str, list[float]] = {}
    for number, (batch, heads, _, length, width) in enumerate(sizes.attention):
        flops = 2.0 * batch * heads * width * length**2
        for kernel, halves in HALF_LENGTH.items():
            for way, half, products in zip(("forward", "backward"), halves, (1.0, 2.5), strict=True):
                if (taken := seconds.get(f"{kernel} {way} {number}")) is not None:
                    rate = products * flops / taken * (1 + half / length) / 1e12
                    found.setdefault(f"{kernel}_{way}_tflops", []).append(rate)
    return {name: _round(statistics.fmean(values)) for name, values in found.items()}


def _copy(sizes: Sizes, device: torch.device) -> Calls:
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source)}


def _casts(sizes: Sizes, device: torch.device) -> Calls:
    """Both float8 copies of a matrix, row by row and turned, by kernels of the compiler."""
    x_MN = torch.randn(sizes.casts, device=device, dtype=torch.bfloat16)
    calls = {"cast_tensorwise": torch.compile(_tensorwise), "cast_rowwise": torch.compile(_rowwise)}
    return {name: (lambda call=call: call(x_MN)) for name, call in calls.items()}


def _tensorwise(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448.0 / x_MN.abs().amax().float()
    cast_MN = (x_MN.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return cast_MN, cast_MN.t().contiguous()


def _rowwise(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (448.0 / x_MN.abs().amax(dim, keepdim=True).float() for dim in (1, 0))
    cast_MN, turned = ((x_MN.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn) for scale in (rows, columns))
    return cast_MN, turned.t().contiguous()


def _launch_us(device: torch.device) -> float:
    """Least time of a kernel: of many small ones in one graph, so that the host does not show."""
    one, count = torch.zeros(1, device=device), 200
    graph = torch.cuda.CUDAGraph()
    one.add_(1)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(count):
            one.add_(1)
    times = [_turn({"graph": graph.replay}, device)["graph"] for _ in range(20)]
    return _round(1e6 * statistics.median(times) / count)


def _links(env: Env, sizes: Sizes) -> dict[str, float]:
    """Keys of ``cluster``: what a large gather and a large reduction reach, and what a small gather takes."""
    ranks, device = env.world_size, env.device

    def rate(count: int) -> dict[str, float]:
        whole = torch.zeros(count // 2 // ranks * ranks, device=device, dtype=torch.bfloat16)
        part = torch.zeros(len(whole) // ranks, device=device, dtype=torch.bfloat16)
        calls = {"gather": lambda: dist.all_gather_into_tensor(whole, part)}
        if device.type == "cuda":  # gloo has none
            calls["scatter"] = lambda: dist.reduce_scatter_tensor(part, whole)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(30):  # the same number on every rank
            for name, seconds in _turn(calls, device).items():
                times[name].append(seconds)
        return {name: statistics.median(found[10:]) for name, found in times.items()}

    large, small = rate(sizes.sent), rate(4096)
    moved = sizes.sent * (ranks - 1) / ranks
    return {
        "nvlink_gb_s": _round(moved / statistics.fmean(large.values()) / 1e9),
        "nvlink_latency_us": _round(1e6 * small["gather"]),
    }


def _round(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
