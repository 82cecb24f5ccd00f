"""Measure the rates that the planner reckons with, and write them as options of ``hardware`` and ``cluster``.

All kernels of a round take turns, and are timed only after seconds of the same: a device at its power limit, as in a
training step, runs slower than one that does a GEMM now and then.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
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
_Call = Callable[[], Any]
#: What is timed, by name.
Calls = dict[str, _Call]
FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    linears: tuple[tuple[int, int, int], ...]  # (tokens, inputs, outputs) of layers, three GEMMs each
    attention: tuple[tuple[int, int, int, int, int], ...]  # (batch, heads, key heads, positions, head size)
    cast: tuple[int, int]  # (rows, columns) of a cast matrix
    copy_bytes: int
    gather_bytes: int  # of a large all-gather, as a whole
    warm_s: float  # a round is repeated so long before it is timed
    run_s: float  # and so long while it is


#: Layers of models of 1B to 70B, one rank's share under tp 8 among them.
GPU = Sizes(
    linears=(
        (8192, 4096, 4096), (8192, 4096, 1024), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 3072, 8192),
        (16384, 2048, 2048), (16384, 8192, 3584), (16384, 8192, 1024), (8192, 8192, 8192),
    ),
    attention=((1, 32, 8, 8192, 128), (4, 24, 8, 4096, 128)),
    cast=(16384, 8192), copy_bytes=2**30, gather_bytes=2**29,
    warm_s=3.0, run_s=4.0,
)  # fmt: skip
#: As small as can be: every line runs, and no rate means anything.
CPU = Sizes(((64, 64, 64), (64, 32, 128)), ((1, 2, 2, 64, 16),), (64, 64), 2**20, 2**16, warm_s=0.0, run_s=0.02)


def calibrate(run: RunDir, env: Env) -> None:
    """Measure, and write ``hardware/<name>_calibrated.yaml`` into the run's folder; with several ranks of one host also
    ``cluster/<name>_calibrated.yaml``. Use: ``--config-dir <run folder> hardware=<name>_calibrated``.
    """
    device = env.device
    sizes = GPU if device.type == "cuda" else CPU
    name = hardware.detect(device) or "gpu"
    rates = measure_rates(device, sizes)
    links = _measure_links(env, sizes) if env.world_size > 1 else {}
    hardware.forget_peaks(device)  # or the run's own peak of memory would be this one
    if not env.is_main:
        return
    shipped, cluster = devices.shipped_device(name)
    datasheet = {key: value for key in ("peak_bf16_tflops", "power_w") if (value := getattr(shipped, key))}
    option = f"{name}_calibrated"
    values: dict[str, Any] = {"name": option, "basis": "calibrated", **datasheet, **rates}
    cluster_option = next(iter(devices.shipped("hardware", name).get("defaults", [{}])[0].values()), None)
    if links:
        cluster_values = {key: value for key, value in vars(cluster).items() if value is not None}
        gpus_per_host = max(cluster.gpus_per_host, env.world_size)
        cluster_values |= {"name": option, "basis": "calibrated", "gpus_per_host": gpus_per_host}
        _write_option(run, "cluster", option, cluster_values | links, "links between the ranks of one host measured")
        cluster_option = option
    if cluster_option:
        values = {"defaults": [{"override /cluster@_global_.cluster": cluster_option}, "_self_"], **values}
    path = _write_option(run, "hardware", option, values, f"rates measured with torch {torch.__version__}")
    log.info("rates of this device: %s (--config-dir %s hardware=%s)", path, run.path, option)


def _write_option(run: RunDir, group: str, option: str, values: dict[str, Any], content: str) -> Path:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    origin = f"{device}: {content} on {utc_now()[:10]}, by runner=bench hardware.calibrate=true."
    usage = f"titanyaml --config-dir <this run's folder> runner=plan hardware={option}"
    path = run.path / group / f"{option}.yaml"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, f"# {origin}\n# {usage}\n{yaml.safe_dump(values, sort_keys=False, width=110)}")
    return path


def measure_rates(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The keys of ``hardware`` that can be measured, with their values."""
    rates: dict[str, Any] = {}
    if device.type == "cuda":
        rates["memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / hardware.GIB, 1)
        rates["launch_us"] = _launch_us(device)
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    untyped = _attention(sizes, device) | {"copy": lambda: target.copy_(source)}
    gemms = _gemms(sizes, device, "bf16")
    seconds = time_in_turns(gemms | untyped, device, sizes)
    rates |= fit_gemm_rate(sizes, seconds, "bf16") | _attention_rates(sizes, seconds)
    bytes_per_s = 2 * sizes.copy_bytes / seconds["copy"]  # read and written
    # a copy is what passes over memory reach: no share of a datasheet's bandwidth on top
    rates |= {"memory_tb_s": _round(bytes_per_s / 1e12), "memory_share": 1.0}
    del gemms  # frees their operands before those in float8 are made
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        torch.cuda.empty_cache()
        casts = _casts(sizes, device)
        seconds = time_in_turns(_gemms(sizes, device, "fp8") | casts | untyped, device, sizes)
        rates |= fit_gemm_rate(sizes, seconds, "fp8")
        rates |= {f"{name}_bytes": _round(seconds[name] * bytes_per_s / math.prod(sizes.cast)) for name in casts}
    return rates


def time_in_turns(calls: Calls, device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Median seconds of each call while all of them take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for limit_s, is_timed in ((sizes.warm_s, False), (sizes.run_s, True)):
        begin = time.perf_counter()
        while True:
            for name, seconds in _time_once(calls, device).items():
                if is_timed:
                    times[name].append(seconds)
            if time.perf_counter() - begin >= limit_s:
                break
    return {name: statistics.median(many) for name, many in times.items()}


def _time_once(calls: Calls, device: torch.device) -> dict[str, float]:
    """Seconds of each call, one after the other; on a GPU by events, without a wait in between."""
    if device.type != "cuda":
        times = {}
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name] = time.perf_counter() - begin
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for event, call in zip(events[1:], calls.values(), strict=True):
        call()
        event.record()
    torch.cuda.synchronize(device)
    return {name: start.elapsed_time(end) / 1e3 for name, (start, end) in zip(calls, pairwise(events), strict=True)}


def _gemm_sides(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """[m, n, k] of each GEMM by name: forward, gradient of the input, gradient of the weight of every layer."""
    sides = {}
    for tokens, inputs, outputs in sizes.linears:
        layer = f"{tokens}x{inputs}x{outputs}"
        sides[f"{layer} forward"] = (tokens, outputs, inputs)
        sides[f"{layer} dx"] = (tokens, inputs, outputs)
        sides[f"{layer} dw"] = (outputs, inputs, tokens)
    return sides


def _gemms(sizes: Sizes, device: torch.device, dtype: str) -> Calls:
    make = {"bf16": _bf16_gemm, "fp8": _fp8_gemm}[dtype]
    return {
        name: make(device, name.rpartition(" ")[2], *sides)
        for name, sides in _gemm_sides(sizes).items()
        # float8 GEMMs take no other sides
        if dtype == "bf16" or not any(side % FLOAT8_ALIGNMENT for side in sides)
    }


def _bf16_gemm(device: torch.device, kind: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """In the layouts that autograd uses, which cuBLAS runs at different rates."""

    def make(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    if kind == "forward":
        x_MK, weight_NK = make(m, k), make(n, k)
        return lambda: F.linear(x_MK, weight_NK)
    left_MK, right_KN = (make(m, k) if kind == "dx" else make(k, m).t()), make(k, n)
    return lambda: left_MK @ right_KN


def _fp8_gemm(device: torch.device, kind: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    """Operands are cast already, and lie as tensor cores want them; one scale each, the short accumulator."""
    left_MK, right_NK = (torch.randn(side, k, device=device).to(torch.float8_e4m3fn) for side in (m, n))
    scale = torch.ones((), device=device)
    return lambda: compat.scaled_mm(left_MK, right_NK.t(), scale, scale)


def fit_gemm_rate(sizes: Sizes, seconds: dict[str, float], dtype: str) -> dict[str, float]:
    """Rate R and shape constant s of GEMMs that take flops / R * (1 + s(1/m + 1/n + 1/k)) seconds (``cost.py``).

    Seconds per FLOP are a line in 1/m + 1/n + 1/k, fitted by least squares of relative errors.
    """
    names = [name for name in _gemm_sides(sizes) if name in seconds]
    sides = np.array([_gemm_sides(sizes)[name] for name in names], dtype=np.float64)
    costs = np.array([seconds[name] for name in names]) / (2 * sides.prod(axis=1))
    inverse_sides = (1 / sides).sum(axis=1)
    slope, _ = np.polyfit(inverse_sides, costs, 1, w=1 / costs)
    weights = costs**-2
    mean_x, mean_y = np.average(inverse_sides, weights=weights), np.average(costs, weights=weights)
    # noise may tilt the line: no rate is negative, and at least a tenth of the mean cost is left to large matrices
    slope = min(max(slope, 0.0), 0.9 * mean_y / mean_x)
    least_cost = mean_y - slope * mean_x  # the line goes through the weighted mean
    return {f"gemm_{dtype}_tflops": _round(1e-12 / least_cost), f"gemm_{dtype}_shape": _round(slope / least_cost)}


def _attention(sizes: Sizes, device: torch.device) -> Calls:
    """Forward and backward of FlashAttention and, on a GPU, cuDNN's; a backend that is not built in is left out."""
    calls: Calls = {}
    backends = {"flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
    for kernel, backend in backends.items():
        for number, size in enumerate(sizes.attention):
            forward, backward = _attention_calls(backend, size, device)
            try:
                forward()
                backward()
            except RuntimeError:
                log.info("%s attention is not available here", kernel)
                break
            calls |= {f"{kernel} forward {number}": forward, f"{kernel} backward {number}": backward}
    return calls


def _attention_calls(backend: SDPBackend, size: tuple[int, ...], device: torch.device) -> tuple[_Call, _Call]:
    batch, heads, key_heads, length, head_dim = size
    query, key, value = (
        torch.randn(batch, count, length, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, key_heads, key_heads)
    )

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)

    graph: list[Tensor] = []  # output and its gradient, made by the first call: a backend may refuse

    def backward() -> Any:
        if not graph:
            graph.extend([output := forward(), torch.randn_like(output)])
        return torch.autograd.grad(graph[0], (query, key, value), graph[1], retain_graph=True)

    return forward, backward


def _attention_rates(sizes: Sizes, seconds: dict[str, float]) -> dict[str, float]:
    """Rates at endless length: the measured one times 1 + (half length) / length; the mean of several sizes."""
    rates: dict[str, list[float]] = {}
    for number, (batch, heads, _, length, head_dim) in enumerate(sizes.attention):
        flops = 2.0 * batch * heads * head_dim * length**2  # causal: half of the scores, two GEMMs
        for kernel, half_lengths in HALF_LENGTH.items():
            # a backward has five GEMMs where a forward has two
            for name, half_length, times in zip(("forward", "backward"), half_lengths, (1.0, 2.5), strict=True):
                if (measured_s := seconds.get(f"{kernel} {name} {number}")) is not None:
                    rate = times * flops / measured_s * (1 + half_length / length) / 1e12
                    rates.setdefault(f"{kernel}_{name}_tflops", []).append(rate)
    return {name: _round(statistics.fmean(values)) for name, values in rates.items()}


def _casts(sizes: Sizes, device: torch.device) -> Calls:
    """Both float8 copies of a matrix, as it is and transposed, by kernels of the compiler."""
    x_MN = torch.randn(sizes.cast, device=device, dtype=torch.bfloat16)
    tensorwise, rowwise = torch.compile(_cast_tensorwise), torch.compile(_cast_rowwise)
    return {"cast_tensorwise": lambda: tensorwise(x_MN), "cast_rowwise": lambda: rowwise(x_MN)}


def _scaled(x_MN: Tensor, scale: Tensor) -> Tensor:
    return (x_MN.float() * scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


def _cast_tensorwise(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    cast_MN = _scaled(x_MN, FLOAT8_MAX / x_MN.abs().amax().float())
    return cast_MN, cast_MN.t().contiguous()


def _cast_rowwise(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    by_row, by_column = (_scaled(x_MN, FLOAT8_MAX / x_MN.abs().amax(dim, keepdim=True).float()) for dim in (1, 0))
    return by_row, by_column.t().contiguous()


def _launch_us(device: torch.device) -> float:
    """Least time of a kernel: of many small ones in one CUDA graph, so that the host's launches do not show."""
    number, count = torch.zeros(1, device=device), 200
    graph = torch.cuda.CUDAGraph()
    number.add_(1)  # compiled and loaded before it is captured
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for _ in range(count):
            number.add_(1)
    times = [_time_once({"graph": graph.replay}, device)["graph"] for _ in range(20)]
    return _round(1e6 * statistics.median(times) / count)


def _measure_links(env: Env, sizes: Sizes) -> dict[str, float]:
    """Keys of ``cluster``: the rate of a large all-gather and reduce-scatter, and the latency of a small all-gather."""
    ranks, device = env.world_size, env.device

    def median_seconds(num_bytes: int) -> dict[str, float]:
        gathered = torch.zeros(num_bytes // 2 // ranks * ranks, device=device, dtype=torch.bfloat16)
        shard = torch.zeros(len(gathered) // ranks, device=device, dtype=torch.bfloat16)
        calls: Calls = {"all_gather": lambda: dist.all_gather_into_tensor(gathered, shard)}
        if device.type == "cuda":  # gloo has none
            calls["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(shard, gathered)
        rounds = [_time_once(calls, device) for _ in range(30)]  # a number, not seconds: the same on every rank
        # the first ten warm up
        return {name: statistics.median(times[name] for times in rounds[10:]) for name in calls}

    # a rate needs a transfer whose latency is lost in it, a latency one that has nothing else
    large, small = median_seconds(sizes.gather_bytes), median_seconds(4096)
    moved = sizes.gather_bytes * (ranks - 1) / ranks
    return {
        "nvlink_gb_s": _round(moved / statistics.fmean(large.values()) / 1e9),
        "nvlink_latency_us": _round(1e6 * small["all_gather"]),
    }


def _round(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")
