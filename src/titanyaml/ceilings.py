"""Ceilings: how fast this device computes a model's exact shapes, and the floor of a training step that follows.

The floor is the time of what cannot be left out of a step: the GEMMs of forward, input gradient (dgrad) and weight
gradient (wgrad) at their exact shapes, the best attention kernel at its shape, and one AdamW pass over float32 state.
It leaves out recomputation, elementwise kernels, casts and communication, so no real step reaches it. Each part is
measured alone on random data; in a sustained step the device is warmer and power-limited, so that on a GPU the floor is
another 5 to 8 % optimistic.

Shapes: M tokens, K input features, N output features of a linear layer; attention: B batch, N heads, S sequence, H head
size.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.adamw import adamw

from titanyaml import hardware
from titanyaml.distributed import compat
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.models.protocol import ModelFacts
from titanyaml.pipeline.protocol import dtype_name

PASSES = ("forward", "dgrad", "wgrad")
#: cuBLAS takes float8 GEMMs only where both sides are multiples of this.
FLOAT8_ALIGNMENT = 16
#: A recipe whose passes differ in precision: the measured precision of each pass; None: the compute dtype.
_MIXED_RECIPES: dict[str, tuple[str | None, ...]] = {
    "float8_rowwise_with_gw_hp": ("float8_rowwise", "float8_rowwise", None)
}
#: Seconds of measurement per figure, where three calls take less.
BUDGET_S = 0.1
#: Bytes that AdamW moves per float32 parameter: weight, gradient and two moments read; all but the gradient written.
ADAMW_BYTES = 28


@dataclass(frozen=True)
class GemmShape:
    """Equal linear layers of one rank: M tokens, K inputs, N outputs, and the names of the layers."""

    tokens: int
    inputs: int
    outputs: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class RankWork:
    """The work of one rank in a step, by shapes."""

    linears: tuple[GemmShape, ...]  # of the blocks
    head: GemmShape  # the output projection, apart since it stays in the compute dtype
    batch: int  # this and the next four: shape of attention
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    attentions: int  # calls per forward
    shares: int  # ranks that divide one causal attention (context parallelism)
    forwards: float  # per step, times the pipeline rank's share of the blocks: with 2 stages each does half
    parameters: int  # updated by this rank's optimizer
    left_out: tuple[str, ...] = ()  # matrices of the model that are not counted above; with any there is no floor


def rank_work(
    model: nn.Module, facts: ModelFacts, dims: ParallelDims, *, seq_len: int, local_batch: int, accumulation: int
) -> RankWork:
    """Count the work of one rank of the mesh ``dims``.

    ``model`` is the decoder on meta, before any plugin changed it. A step has ``accumulation`` forwards, each of
    ``local_batch`` sequences on a data rank.
    """
    tokens = local_batch * seq_len // dims.cp  # cp ranks each hold a slice of every sequence; tp ranks all of it
    layers_by_shape: dict[tuple[int, int], list[str]] = {}
    counted = {f"{facts.embedding}.weight", f"{facts.head}.weight"}
    for block, layout in zip(facts.blocks, facts.layouts, strict=True):
        for name, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Linear):
                outputs = module.out_features // (dims.tp if name in layout.column else 1)
                inputs = module.in_features // (dims.tp if name in layout.row else 1)
                layers_by_shape.setdefault((inputs, outputs), []).append(f"{block}.{name}")
                counted.add(f"{block}.{name}.weight")
    return RankWork(
        linears=tuple(GemmShape(tokens, *shape, tuple(layers)) for shape, layers in layers_by_shape.items()),
        head=GemmShape(tokens, facts.dim, facts.vocab_size // dims.tp, (facts.head,)),
        batch=local_batch,
        heads=facts.num_heads // dims.tp,
        kv_heads=max(facts.num_kv_heads // dims.tp, 1),
        seq_len=seq_len,
        head_dim=facts.head_dim,
        attentions=facts.num_layers,
        shares=dims.cp,
        forwards=accumulation / dims.pp,
        # cp ranks are FSDP ranks: they divide the parameters too
        parameters=facts.num_params // (dims.tp * dims.pp * dims.cp * dims.dp_shard),
        left_out=tuple(name for name, p in model.named_parameters() if p.dim() > 1 and name not in counted),
    )


@dataclass(frozen=True)
class GemmTimes:
    """Measured times of one shape in seconds: precision -> pass -> time. The first precision is the compute dtype."""

    shape: GemmShape
    seconds: dict[str, dict[str, float]]

    def total(self, precision: str) -> float:
        """The three passes of one layer; in the compute dtype where this shape was not measured in ``precision``."""
        compute_dtype = next(iter(self.seconds))
        precisions = _MIXED_RECIPES.get(precision, (precision,) * len(PASSES))
        return sum(
            self.seconds.get(pass_precision or compute_dtype, self.seconds[compute_dtype])[name]
            for pass_precision, name in zip(precisions, PASSES, strict=True)
        )

    def record(self) -> dict[str, Any]:
        """JSON-ready: the shape, how many layers have it, and ms and TFLOP/s by precision."""
        sides = {name: getattr(self.shape, name) for name in ("tokens", "inputs", "outputs")}
        flops = 2 * math.prod(sides.values())
        return {
            **sides,
            "layers": len(self.shape.layers),
            "example": self.shape.layers[0],
            "ms": {kind: {name: 1e3 * s for name, s in times.items()} for kind, times in self.seconds.items()},
            "tflops": {kind: len(times) * flops / sum(times.values()) / 1e12 for kind, times in self.seconds.items()},
        }


@dataclass(frozen=True)
class Ceilings:
    """What was measured on one device; times in seconds."""

    work: RankWork
    device: str
    precisions: list[str]  # of the blocks' GEMMs. The first is the compute dtype, that of head and attention
    linears: list[GemmTimes]
    head: GemmTimes
    attention: dict[str, tuple[float, float]]  # backend -> (forward, backward) of one call
    copy: float  # bytes read and written per second
    adamw: float  # seconds per parameter of a fused update

    @property
    def best_attention(self) -> str:
        """The backend whose forward and backward together are fastest."""
        return min(self.attention, key=lambda name: sum(self.attention[name]))

    def floor(self, precision: str, *, quantised: Collection[str] | None = None) -> dict[str, float] | None:
        """Seconds of a step by part, and their sum ``step``; None where ``why_no_floor`` gives a reason.

        ``quantised`` names the linear layers in ``precision``, where the others use the compute dtype; None: all.
        """
        if self.why_no_floor(precision):
            return None
        work, compute_dtype = self.work, self.precisions[0]
        linear = 0.0
        for gemm in self.linears:
            num_layers = len(gemm.shape.layers)
            num_quantised = sum(quantised is None or name in quantised for name in gemm.shape.layers)
            linear += num_quantised * gemm.total(precision)
            linear += (num_layers - num_quantised) * gemm.total(compute_dtype)
        attention = work.attentions * sum(self.attention[self.best_attention]) / work.shares
        forward_parts = {"linear": linear, "head": self.head.total(compute_dtype), "attention": attention}
        parts = {name: work.forwards * part for name, part in forward_parts.items()}
        parts["optimizer"] = self.adamw * work.parameters
        return {**parts, "step": sum(parts.values())}

    def why_no_floor(self, precision: str) -> str:
        """Why ``floor`` gives None; "" where it does not."""
        if self.work.left_out:
            return f"no floor: it does not count {', '.join(self.work.left_out)}"
        if {kind for kind in _MIXED_RECIPES.get(precision, (precision,)) if kind} <= set(self.precisions):
            return ""
        return f"no floor: this device has no fast products in {precision} to measure"

    def record(self) -> dict[str, Any]:
        """JSON-ready: everything measured, and the floor of a step in each precision (ms)."""
        work = self.work
        floors = {kind: self.floor(kind) for kind in [*self.precisions, *_MIXED_RECIPES]}
        shape = {name: getattr(work, name) for name in ("batch", "heads", "kv_heads", "seq_len", "head_dim")}
        attention_ms = {name: {"forward": 1e3 * f, "backward": 1e3 * b} for name, (f, b) in self.attention.items()}
        return {
            "device": self.device,
            "gemm": [gemm.record() for gemm in [*self.linears, self.head]],
            "attention": {**shape, "best": self.best_attention, "ms": attention_ms},
            "copy_tb_s": self.copy / 1e12,
            "adamw": {"ns_per_parameter": 1e9 * self.adamw, "tb_s": ADAMW_BYTES / self.adamw / 1e12},
            "floor_ms": {kind: {part: 1e3 * s for part, s in parts.items()} for kind, parts in floors.items() if parts},
            "left_out": list(work.left_out),
        }


def measure(work: RankWork, *, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure this device in the compute dtype. Takes seconds on a GPU and frees its memory afterwards."""
    precisions = [dtype_name(dtype)]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        precisions += ["float8_tensorwise", "float8_rowwise"]
    measured = Ceilings(
        work=work,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precisions=precisions,
        linears=[_time_gemms(shape, precisions, device=device, dtype=dtype) for shape in work.linears],
        head=_time_gemms(work.head, precisions[:1], device=device, dtype=dtype),
        attention=_time_attention(work, device=device, dtype=dtype),
        copy=_copy_rate(device),
        adamw=_adamw_seconds(work.parameters, device=device),
    )
    hardware.forget_peaks(device)  # otherwise the run's peak memory would include the operands of these measurements
    return measured


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call, of at least three calls and as many as fit into ``BUDGET_S``."""
    for _ in range(2):  # loads libraries, chooses algorithms, warms the allocator
        call()
    hardware.synchronize(device)
    begin = time.perf_counter()
    call()
    hardware.synchronize(device)
    # one more call tells how many fit into the budget; 50 are enough for a median
    count = int(min(max(BUDGET_S / (time.perf_counter() - begin), 3), 50))
    clock = _cuda_times if device.type == "cuda" else _host_times
    return statistics.median(clock(call, count))


def _cuda_times(call: Callable[[], Any], count: int) -> list[float]:
    # CUDA events between calls that are all queued at once: launch time on the host does not show
    event_type: Callable[..., Any] = torch.cuda.Event
    events = [event_type(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in zip(events, events[1:], strict=False)]


def _host_times(call: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def _time_gemms(shape: GemmShape, precisions: list[str], *, device: torch.device, dtype: torch.dtype) -> GemmTimes:
    times = {precisions[0]: _time_in_dtype(shape, device=device, dtype=dtype)}
    if not any(side % FLOAT8_ALIGNMENT for side in (shape.tokens, shape.inputs, shape.outputs)):
        times |= {kind: _time_in_float8(shape, kind == "float8_rowwise", device=device) for kind in precisions[1:]}
    return GemmTimes(shape, times)


def _time_in_dtype(shape: GemmShape, *, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    m, k, n = shape.tokens, shape.inputs, shape.outputs
    x_MK, weight_NK, grad_MN = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (n, k), (m, n)))
    # the layouts of autograd: a GEMM's speed depends on which operands are transposed
    calls: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: F.linear(x_MK, weight_NK),
        "dgrad": lambda: grad_MN @ weight_NK,
        "wgrad": lambda: grad_MN.t() @ x_MK,
    }
    return {name: seconds(call, device) for name, call in calls.items()}


def _time_in_float8(shape: GemmShape, rowwise: bool, *, device: torch.device) -> dict[str, float]:
    # e4m3 with fast accumulation and bfloat16 results; operands are cast beforehand, as a floor counts no casts
    m, k, n = shape.tokens, shape.inputs, shape.outputs

    def gemm(rows: int, inner: int, columns: int) -> float:
        a, b = (torch.randn(size, inner, device=device).to(torch.float8_e4m3fn) for size in (rows, columns))
        scale_shapes: tuple[tuple[int, ...], ...] = ((rows, 1), (1, columns)) if rowwise else ((), ())
        scales = [torch.ones(scale_shape, device=device) for scale_shape in scale_shapes]
        return seconds(lambda: compat.scaled_mm(a, b.t(), *scales), device)

    return {"forward": gemm(m, k, n), "dgrad": gemm(m, n, k), "wgrad": gemm(n, m, k)}


def _time_attention(work: RankWork, *, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """(forward, backward) seconds of causal attention by backend; one that refuses the shape is left out."""
    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    times = {}
    for backend in backends:
        # a RuntimeError: how scaled_dot_product_attention says that no allowed backend takes the inputs
        with contextlib.suppress(RuntimeError):
            name = backend.name.removesuffix("_ATTENTION").lower()
            times[name] = _time_backend(work, backend, device=device, dtype=dtype)
    return times or {"math": _time_backend(work, SDPBackend.MATH, device=device, dtype=dtype)}


def _time_backend(
    work: RankWork, backend: SDPBackend, *, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    q_BNSH, k_BNSH, v_BNSH = inputs = [
        torch.randn(work.batch, heads, work.seq_len, work.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    ]
    grouped = work.heads != work.kv_heads

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True, enable_gqa=grouped)

    with sdpa_kernel(backend):
        out_BNSH = forward()
        grad_BNSH = torch.randn_like(out_BNSH)
        backward = seconds(lambda: torch.autograd.grad(out_BNSH, inputs, grad_BNSH, retain_graph=True), device)
        return seconds(forward, device), backward


def _copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    size = 2**30 if device.type == "cuda" else 2**26  # far larger than any cache
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def _adamw_seconds(parameters: int, *, device: torch.device) -> float:
    """Seconds per parameter of torch's fused AdamW over float32 weights, gradients and moments."""
    # capped: time grows linearly with the count, and a rank's whole state need not fit into memory twice
    count = min(parameters, 2**26 if device.type == "cuda" else 2**22)
    weight, grad, exp_avg, exp_avg_sq = ([torch.zeros(count, device=device)] for _ in range(4))
    steps = [torch.zeros((), device=device)]
    settings: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False}
    settings |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "lr": 1e-4, "weight_decay": 0.1}

    def update() -> None:
        adamw(weight, grad, exp_avg, exp_avg_sq, [], steps, **settings)

    return seconds(update, device) / count
