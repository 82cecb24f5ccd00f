"""What this device can do with the exact shapes of a model, and the floor of a training step that follows.

The floor of a step is the time of what cannot be left out: the matrix products of forward, input gradient and weight
gradient at their exact shapes, the best attention kernel at its shape, and one AdamW sweep over full-precision state.
Nothing is recomputed in it, no elementwise kernel, no cast and no communication is counted. Each part is measured
alone, on random data; a sustained step meets a warmer, power-limited device, so that a floor is 5 to 8 % optimistic
on a GPU.

Shapes: M tokens, K input features, N output features of a linear layer.
"""

from __future__ import annotations

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
#: Both sides of a float8 product are multiples of this.
FLOAT8_ALIGNMENT = 16
#: A recipe whose passes are not all of one kind: the measured precision of each pass, None: the compute dtype.
_MIXED = {"float8_rowwise_with_gw_hp": ("float8_rowwise", "float8_rowwise", None)}
#: Time spent on one figure (seconds), where three calls take less.
BUDGET_S = 0.1
#: Bytes that AdamW moves per parameter of 4 bytes: weight, gradient and two moments read, all but the gradient written.
ADAMW_BYTES = 28


@dataclass(frozen=True)
class Linear:
    """Equal linear layers of one rank: M tokens, K inputs, N outputs, and the names of the layers."""

    tokens: int
    inputs: int
    outputs: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """What one rank does in a step, by shapes.

    Args:
        linears: of the blocks. head: the output projection; its own group, since it stays in the compute dtype.
        batch, heads, kv_heads, seq_len, head_dim: of attention. attentions: how often, per forward.
        shares: ranks among which one causal attention is divided (context parallelism).
        forwards: per step, counted by the pipeline's share: of 2 stages each does half the blocks.
        parameters: that this rank's optimizer updates.
        left_out: matrices of the model that are none of these: with them there is no floor.
    """

    linears: tuple[Linear, ...]
    head: Linear
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    attentions: int
    shares: int
    forwards: float
    parameters: int
    left_out: tuple[str, ...] = ()


def work_of(
    model: nn.Module, facts: ModelFacts, dims: ParallelDims, *, seq_len: int, local_batch: int, accumulation: int
) -> Work:
    """The work of one rank of the mesh ``dims``.

    Args:
        model: the decoder before any plugin changed it (on meta). local_batch: sequences per forward and data rank.
        accumulation: forwards per step.
    """
    tokens = local_batch * seq_len // dims.cp
    shapes: dict[tuple[int, int], list[str]] = {}
    counted = {f"{facts.embedding}.weight", f"{facts.head}.weight"}
    for block, layout in zip(facts.blocks, facts.layouts, strict=True):
        for name, module in model.get_submodule(block).named_modules():
            if isinstance(module, nn.Linear):
                outputs = module.out_features // (dims.tp if name in layout.column else 1)
                inputs = module.in_features // (dims.tp if name in layout.row else 1)
                shapes.setdefault((inputs, outputs), []).append(f"{block}.{name}")
                counted.add(f"{block}.{name}.weight")
    left_out = [name for name, p in model.named_parameters() if p.dim() > 1 and name not in counted]
    return Work(
        linears=tuple(Linear(tokens, *shape, tuple(layers)) for shape, layers in shapes.items()),
        head=Linear(tokens, facts.dim, facts.vocab_size // dims.tp, (facts.head,)),
        batch=local_batch,
        heads=facts.num_heads // dims.tp,
        kv_heads=max(facts.num_kv_heads // dims.tp, 1),
        seq_len=seq_len,
        head_dim=facts.head_dim,
        attentions=facts.num_layers,
        shares=dims.cp,
        forwards=accumulation / dims.pp,
        parameters=facts.num_params // (dims.tp * dims.pp * dims.cp * dims.dp_shard),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True)
class Product:
    """Measured times of one shape (seconds): precision to pass to time."""

    shape: Linear
    seconds: dict[str, dict[str, float]]

    def total(self, precision: str) -> float:
        """The three passes of one layer; in the compute dtype where this shape has no time in ``precision``."""
        high = next(iter(self.seconds))
        kinds = _MIXED.get(precision, (precision,) * len(PASSES))
        return sum(
            self.seconds.get(kind or high, self.seconds[high])[step] for kind, step in zip(kinds, PASSES, strict=True)
        )

    def record(self) -> dict[str, Any]:
        """JSON-ready: the shape, how many layers have it, and ms and TFLOP/s by precision."""
        flops = 2 * self.shape.tokens * self.shape.inputs * self.shape.outputs
        return {
            "tokens": self.shape.tokens,
            "inputs": self.shape.inputs,
            "outputs": self.shape.outputs,
            "layers": len(self.shape.layers),
            "example": self.shape.layers[0],
            "ms": {kind: {step: 1e3 * s for step, s in times.items()} for kind, times in self.seconds.items()},
            "tflops": {kind: len(times) * flops / sum(times.values()) / 1e12 for kind, times in self.seconds.items()},
        }


@dataclass(frozen=True)
class Ceilings:
    """What was measured on one device; times in seconds.

    Args:
        precisions: in which the blocks' products were measured; the first is the compute dtype, in which the head and
            attention were.
        attention: backend to (forward, backward) of one call. copy: bytes read and written per second.
        adamw: seconds per parameter of a fused sweep.
    """

    work: Work
    device: str
    precisions: list[str]
    linears: list[Product]
    head: Product
    attention: dict[str, tuple[float, float]]
    copy: float
    adamw: float

    @property
    def best_attention(self) -> str:
        """The backend whose forward and backward together are fastest."""
        return min(self.attention, key=lambda name: sum(self.attention[name]))

    def floor(self, precision: str, *, quantised: Collection[str] | None = None) -> dict[str, float] | None:
        """Seconds of a step by part, and their sum ``step``.

        Args:
            precision: of the blocks' linear layers. quantised: names of those layers that compute in it, where the
                others compute in the compute dtype; None: all.

        Returns:
            None where the model has matrices that are not counted, or ``precision`` was not measured.
        """
        if self.why_no_floor(precision):
            return None
        linear = 0.0
        for product in self.linears:
            fast = [name for name in product.shape.layers if quantised is None or name in quantised]
            linear += len(fast) * product.total(precision)
            linear += (len(product.shape.layers) - len(fast)) * product.total(self.precisions[0])
        parts = {
            "linear": self.work.forwards * linear,
            "head": self.work.forwards * self.head.total(self.precisions[0]),
            "attention": self.work.forwards
            * self.work.attentions
            * sum(self.attention[self.best_attention])
            / self.work.shares,
            "optimizer": self.adamw * self.work.parameters,
        }
        return {**parts, "step": sum(parts.values())}

    def why_no_floor(self, precision: str) -> str:
        """Why ``floor`` gives None; "" where it does not."""
        if self.work.left_out:
            return f"no floor: it does not count {', '.join(self.work.left_out)}"
        used = [precision] if precision not in _MIXED else [kind for kind in _MIXED[precision] if kind]
        if set(used) <= set(self.precisions):
            return ""
        return f"no floor: this device has no fast products in {precision} to measure"

    def record(self) -> dict[str, Any]:
        """JSON-ready: everything measured, and the floor of a step in each precision (ms)."""
        floors = {kind: self.floor(kind) for kind in [*self.precisions, *_MIXED]}
        return {
            "device": self.device,
            "gemm": [product.record() for product in [*self.linears, self.head]],
            "attention": {
                "batch": self.work.batch,
                "heads": self.work.heads,
                "kv_heads": self.work.kv_heads,
                "seq_len": self.work.seq_len,
                "head_dim": self.work.head_dim,
                "best": self.best_attention,
                "ms": {name: {"forward": 1e3 * f, "backward": 1e3 * b} for name, (f, b) in self.attention.items()},
            },
            "copy_tb_s": self.copy / 1e12,
            "adamw": {"ns_per_parameter": 1e9 * self.adamw, "tb_s": ADAMW_BYTES / self.adamw / 1e12},
            "floor_ms": {kind: {part: 1e3 * s for part, s in parts.items()} for kind, parts in floors.items() if parts},
            "left_out": list(self.work.left_out),
        }


def measure(work: Work, *, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure this device; takes seconds on a GPU, and its memory is free again afterwards.

    Args:
        dtype: the compute dtype.
    """
    precisions = [dtype_name(dtype), *(("float8_tensorwise", "float8_rowwise") if _has_float8(device) else ())]
    measured = Ceilings(
        work=work,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precisions=precisions,
        linears=[_product(shape, precisions, device=device, dtype=dtype) for shape in work.linears],
        head=_product(work.head, precisions[:1], device=device, dtype=dtype),
        attention=_attention(work, device=device, dtype=dtype),
        copy=_copy_rate(device),
        adamw=_adamw(work.parameters, device=device),
    )
    hardware.forget_peaks(device)
    return measured


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call after two that do not count; at least three, and as many as fit into ``BUDGET_S``."""
    for _ in range(2):
        call()
    hardware.synchronize(device)
    begin = time.perf_counter()
    call()
    hardware.synchronize(device)
    count = int(min(max(BUDGET_S / (time.perf_counter() - begin), 3), 50))
    clock = _cuda_times if device.type == "cuda" else _host_times
    return statistics.median(clock(call, count))


def _cuda_times(call: Callable[[], Any], count: int) -> list[float]:
    """By events, all calls queued at once: the host's own time does not show."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in zip(marks, marks[1:], strict=False)]


def _host_times(call: Callable[[], Any], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _product(shape: Linear, precisions: list[str], *, device: torch.device, dtype: torch.dtype) -> Product:
    times = {precisions[0]: _high_precision(shape, device=device, dtype=dtype)}
    if not (shape.tokens % FLOAT8_ALIGNMENT or shape.inputs % FLOAT8_ALIGNMENT or shape.outputs % FLOAT8_ALIGNMENT):
        times |= {kind: _float8(shape, rowwise=kind == "float8_rowwise", device=device) for kind in precisions[1:]}
    return Product(shape, times)


def _high_precision(shape: Linear, *, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of the three products of a linear layer, in the layouts that autograd uses."""
    make = lambda *size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    x_MK, weight_NK, grad_MN = (
        make(shape.tokens, shape.inputs),
        make(shape.outputs, shape.inputs),
        make(shape.tokens, shape.outputs),
    )
    calls = {
        "forward": lambda: F.linear(x_MK, weight_NK),
        "dgrad": lambda: grad_MN @ weight_NK,
        "wgrad": lambda: grad_MN.t() @ x_MK,
    }
    return {name: seconds(call, device) for name, call in calls.items()}


def _float8(shape: Linear, *, rowwise: bool, device: torch.device) -> dict[str, float]:
    """The same in float8 (e4m3, fast accumulation, bfloat16 out), with operands that are cast already."""
    m, k, n = shape.tokens, shape.inputs, shape.outputs

    def product(rows: int, inner: int, columns: int) -> float:
        left, right = (torch.randn(size, inner, device=device).to(torch.float8_e4m3fn) for size in (rows, columns))
        scales = (
            (torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device))
            if rowwise
            else (torch.ones((), device=device), torch.ones((), device=device))
        )
        return seconds(lambda: compat.scaled_mm(left, right.t(), *scales), device)

    return {"forward": product(m, k, n), "dgrad": product(m, n, k), "wgrad": product(n, m, k)}


def _attention(work: Work, *, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """(forward, backward) seconds of causal attention by backend; one that refuses the shape is left out."""
    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    found = {}
    for backend in backends:
        try:
            found[backend.name.removesuffix("_ATTENTION").lower()] = _one_attention(
                work, backend, device=device, dtype=dtype
            )
        except RuntimeError:
            continue
    return found or {"math": _one_attention(work, SDPBackend.MATH, device=device, dtype=dtype)}


def _one_attention(work: Work, backend: SDPBackend, *, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    q_BNSH, k_BNSH, v_BNSH = (
        torch.randn(work.batch, heads, work.seq_len, work.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    )
    grouped = work.heads != work.kv_heads

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True, enable_gqa=grouped)

    with sdpa_kernel(backend):
        out_BNSH = forward()
        grad_BNSH = torch.randn_like(out_BNSH)
        inputs = (q_BNSH, k_BNSH, v_BNSH)
        backward = seconds(lambda: torch.autograd.grad(out_BNSH, inputs, grad_BNSH, retain_graph=True), device)
        return seconds(forward, device), backward


def _copy_rate(device: torch.device) -> float:
    """Bytes per second of a copy within the device's memory, read and written."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def _adamw(parameters: int, *, device: torch.device) -> float:
    """Seconds per parameter of a fused sweep over float32 weights, gradients and moments."""
    count = min(parameters, 2**26 if device.type == "cuda" else 2**22)
    weight, grad, first, second = (torch.zeros(count, device=device) for _ in range(4))
    step = torch.zeros((), device=device)
    sweep = lambda: adamw(  # noqa: E731
        [weight],
        [grad],
        [first],
        [second],
        [],
        [step],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        lr=1e-4,
        weight_decay=0.1,
    )
    return seconds(sweep, device) / count
