"""Seconds of one operator, and of lists of them by class.

A product runs at the device's sustained rate over 1 + s(1/m + 1/n + 1/k), and no faster than its operands come from
memory; attention at its kernel's rate over 1 + (half length)/seq; a pass at the reached memory bandwidth; a collective
at its link's rate after a latency. ``constants.py`` holds what was fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from titanyaml.errors import ConfigError
from titanyaml.planner.model import constants
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.primitives import Attention, Collective, Gemm, Operator, Pass

#: Sequence length at which attention kernels reach half of their rate, forward and backward (H200, heads of 128).
HALF_LENGTH = {"flash": (220.0, 1086.0), "cudnn": (487.0, 287.0)}
_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4, "fp64": 8}
_OUT_BYTES = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}


@dataclass
class Times:
    """Seconds by class. ``tp`` and ``cp`` are what stays exposed of their collectives; comm: (axis, op) to [count,
    bytes, seconds, exposed seconds]."""

    seconds: dict[str, float] = field(default_factory=dict)
    comm: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        """Add to a class."""
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def send(self, axis: str, op: str, *, bytes: float, seconds: float, exposed: float, count: float = 1) -> None:
        """Note a collective; what is exposed of it takes time."""
        record = self.comm.setdefault((axis, op), [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((count, count * bytes, count * seconds, count * exposed)):
            record[i] += value
        self.add(f"exposed_{axis}", count * exposed)

    def merge(self, other: Times, factor: float = 1.0, *, under: str = "") -> None:
        """Add ``other`` times ``factor``; under: one class that takes all of its computing."""
        for kind, seconds in other.seconds.items():
            self.add(under if under and not kind.startswith("exposed") else kind, seconds * factor)
        for key, record in other.comm.items():
            mine = self.comm.setdefault(key, [0.0, 0.0, 0.0, 0.0])
            for i, value in enumerate(record):
                mine[i] += value * factor

    @property
    def total(self) -> float:
        """Seconds of the compute stream."""
        return sum(self.seconds.values())


#: Rate of our own float8 products over that of torchao's, to which ``gemm_fp8_tflops`` is fitted: all operands lie
#: as the tensor core reads them, and no output is scaled by a kernel of its own. Measured: profiled products of the
#: blocks of 3B and 8B on an H200 (``benchmarks/results``) take 194 and 229 ms a step, of 228 and 274 at that rate
#: (1.17 and 1.20). A calibration times such products themselves.
OWN_PRODUCT = 1.17


def gemm_rate(job: Job, dtype: str) -> float:
    """Sustained FLOP/s of large products.

    Raises:
        ConfigError: the device has no rate for this dtype.
    """
    device = job.device
    rate = device.fp8_tflops if dtype == "fp8" else device.bf16_tflops
    if rate is None:
        raise ConfigError(
            f"{device.name} has no rate for float8 products",
            key="hardware.gemm_fp8_tflops",
            hint="quant=none or hardware=h200",
        )
    slow = {"fp32": 8.0, "fp64": 16.0}.get(dtype, 1.0)  # of tensor cores at 16 bits, where a run computes wider
    own = OWN_PRODUCT if job.own_float8 and dtype == "fp8" and device.basis != "calibrated" else 1.0
    return rate * 1e12 / slow * own * job.software.gemm_age


def gemm_seconds(job: Job, one: Gemm) -> float:
    """Seconds of a product."""
    rate = gemm_rate(job, one.dtype)
    shape = _shape_constant(job) if one.dtype == "fp8" else job.device.bf16_shape
    # what groups do not share: each has as many rows (or summands), and a matrix (or a result) of its own
    m, k = (one.m / one.groups, one.k) if one.split == "m" else (one.m, one.k / one.groups)
    computing = one.flops / rate * (1 + shape * (1 / m + 1 / one.n + 1 / k))
    moved = one.groups * ((m * k + k * one.n) * _BYTES[one.dtype] + m * one.n * _OUT_BYTES[one.dtype])
    return max(computing, moved / bandwidth(job), job.device.launch_us * 1e-6)


def _shape_constant(job: Job) -> float:
    """Of float8: what a product loses at its edges is the same time, counted in faster products."""
    device = job.device
    return device.fp8_shape or device.bf16_shape * device.fp8_tflops / device.bf16_tflops


def bandwidth(job: Job) -> float:
    """Reached bytes per second of memory."""
    return job.device.memory_tb_s * 1e12 * job.device.memory_share


def attention_seconds(job: Job, one: Attention) -> float:
    """Seconds of fused attention."""
    kernel = job.software.attention if job.device.cudnn_tflops else "flash"
    rates = job.device.cudnn_tflops if kernel == "cudnn" else job.device.flash_tflops
    rate = rates[one.backward] * 1e12 * job.software.attention_age * min(1.0, one.head_dim / 128) ** 0.3
    slow = 1.0
    if job.mesh.cp > 1 and job.cp_method != "ulysses" and job.software.context_slows:
        slow += constants.CONTEXT_SLOWDOWN.value * (1 - 1 / job.mesh.cp)
    return max(
        one.flops / rate * (1 + HALF_LENGTH[kernel][one.backward] / one.seq_len) * slow, job.device.launch_us * 1e-6
    )


def collective_seconds(job: Job, one: Collective) -> float:
    """Seconds of a collective that runs alone.

    A reduction of all is a scatter and a gather; an exchange keeps 1/n, and each rank sends what leaves its host
    through a card of its own; the ring's goes to one neighbour, as a pipeline's.
    """
    mesh, network = job.mesh, job.network
    size, latency = mesh.size(one.axis), network.latency(mesh, one.axis)
    if size == 1:
        return 0.0
    if one.op == "send":
        inside = network.local(mesh, one.axis) == size
        return one.bytes / (network.nvlink_gb_s if inside else network.rdma_gb_s) / 1e9 + latency
    if one.op == "all_to_all" and (one.axis != "cp" or job.cp_method == "ulysses"):
        here = network.local(mesh, one.axis)
        return (
            one.bytes * ((here - 1) / size / network.nvlink_gb_s + (size - here) / size / network.rdma_gb_s) / 1e9
            + latency
        )
    share = {"all_reduce": 2.0 * (size - 1) / size, "all_to_all": 1.0}.get(one.op, (size - 1) / size)
    return one.bytes * share / network.rate(mesh, one.axis) + latency


def times(job: Job, operators: Iterable[Operator]) -> Times:
    """Classes of a list that runs on the compute stream. Collectives of tp and ep wait, less what async TP hides; those
    of cp run beside attention and wait for what is left."""
    total, beside = Times(), []
    attention = 0.0
    for one in operators:
        if isinstance(one, Gemm):
            total.add("gemm", gemm_seconds(job, one))
        elif isinstance(one, Attention):
            seconds = attention_seconds(job, one)
            attention += seconds
            total.add("attention", seconds)
        elif isinstance(one, Pass):
            total.add(one.kind, max(one.bytes / bandwidth(job), job.device.launch_us * 1e-6))
        elif one.axis == "cp":
            beside.append(one)
        else:
            seconds = collective_seconds(job, one)
            overlaps = one.axis == "tp" and one.op in job.async_tp and not one.name
            # gathered and multiplied in pieces, float8 with scales by row takes longer than one after the other (H200)
            overlaps &= not (one.op == "all_gather" and "rowwise" in job.quant)
            hidden = constants.ASYNC_TP_HIDDEN.value if overlaps else 0.0
            total.send(one.axis, one.op, bytes=one.bytes, seconds=seconds, exposed=seconds * (1 - hidden))
    for one in beside:
        seconds = collective_seconds(job, one)
        exposed = seconds if job.cp_method == "ulysses" else max(0.0, seconds - attention / len(beside))
        total.send("cp", one.op, bytes=one.bytes, seconds=seconds, exposed=exposed)
    return total
