"""Seconds of one operator, and of a list of operators by class.

A GEMM runs at the device's sustained rate over 1 + s(1/m + 1/n + 1/k), and no faster than its operands come from
memory. Attention runs at its kernel's rate over 1 + half_length/seq_len. A memory-bound kernel moves its bytes at the
reached bandwidth; a collective at its link's rate, after a latency. ``constants.py`` holds what was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from titanyaml.errors import ConfigError
from titanyaml.planner.model import constants
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.primitives import AttentionKernel, Collective, Gemm, MemoryPass, Operator

#: Tokens at which attention kernels reach half of their rate, (forward, backward): measured on an H200, heads of 128.
HALF_LENGTH = {"flash": (220.0, 1086.0), "cudnn": (487.0, 287.0)}
_IN_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4, "fp64": 8}
_OUT_BYTES = {"bf16": 2, "fp8": 2, "fp32": 4, "fp64": 8}  # float8 GEMMs write bf16
#: How many times slower than bf16 tensor cores a GEMM in full precision is. No plan was held against a run with these.
_SLOWER = {"fp32": 8.0, "fp64": 16.0}

#: Rate of our float8 GEMMs over torchao's, to which ``gemm_fp8_tflops`` is fitted: all operands lie as the tensor core
#: reads them, and no second kernel scales the output. Measured: GEMMs of the blocks of 3B and 8B on an H200
#: (``benchmarks/results``) take 194 and 229 ms a step, of 228 and 274 at torchao's rate (1.17 and 1.20). A calibration
#: times our GEMMs, so it needs no factor.
OWN_GEMM_SPEEDUP = 1.17


@dataclass
class Times:
    """Seconds of the compute stream by class, and the collectives beside them."""

    # "exposed_<axis>": time that the compute stream waits for collectives of an axis
    seconds: dict[str, float] = field(default_factory=dict)
    # (axis, op) -> [count, bytes, seconds, exposed seconds]
    comm: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def send(self, axis: str, op: str, *, bytes: float, seconds: float, exposed: float, count: float = 1) -> None:
        """Add ``count`` collectives. The compute stream waits for the exposed seconds of each."""
        self._add_comm((axis, op), [count, count * bytes, count * seconds, count * exposed])
        self.add(f"exposed_{axis}", count * exposed)

    def merge(self, other: Times, factor: float = 1.0, *, under: str = "") -> None:
        """Add ``other`` times ``factor``; ``under`` is a class that takes all of its computing."""
        for kind, seconds in other.seconds.items():
            self.add(under if under and not kind.startswith("exposed") else kind, seconds * factor)
        for key, record in other.comm.items():
            self._add_comm(key, [value * factor for value in record])

    def _add_comm(self, key: tuple[str, str], values: list[float]) -> None:
        record = self.comm.setdefault(key, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate(values):
            record[i] += value

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def gemm_rate(job: Job, dtype: str) -> float:
    """Sustained FLOP/s of large GEMMs.

    Raises:
        ConfigError: the device has no rate for this dtype.
    """
    device = job.device
    rate = device.fp8_tflops if dtype == "fp8" else device.bf16_tflops
    if rate is None:
        problem, hint = f"{device.name} has no rate for float8 products", "quant=none or hardware=h200"
        raise ConfigError(problem, key="hardware.gemm_fp8_tflops", hint=hint)
    speedup = OWN_GEMM_SPEEDUP if job.own_float8 and dtype == "fp8" and device.basis != "calibrated" else 1.0
    return rate * 1e12 / _SLOWER.get(dtype, 1.0) * speedup * job.software.gemm_age


def gemm_seconds(job: Job, gemm: Gemm) -> float:
    rate = gemm_rate(job, gemm.dtype)
    shape = job.device.bf16_shape
    if gemm.dtype == "fp8":
        # unless it is known: edges cost the same time as in bf16, which is more elements of a faster GEMM
        assert job.device.fp8_tflops is not None, "gemm_rate refuses a device without float8"
        shape = job.device.fp8_shape or shape * job.device.fp8_tflops / job.device.bf16_tflops
    # each group of a grouped GEMM has its own rows (or summands), and a weight (or a result) of its own
    m, k = (gemm.m / gemm.groups, gemm.k) if gemm.split == "m" else (gemm.m, gemm.k / gemm.groups)
    computing = gemm.flops / rate * (1 + shape * (1 / m + 1 / gemm.n + 1 / k))
    operands, results = (m * k + k * gemm.n) * _IN_BYTES[gemm.dtype], m * gemm.n * _OUT_BYTES[gemm.dtype]
    return max(computing, gemm.groups * (operands + results) / bandwidth(job), _launch(job))


def _launch(job: Job) -> float:
    return job.device.launch_us * 1e-6


def bandwidth(job: Job) -> float:
    """Bytes per second that memory-bound kernels reach."""
    return job.device.memory_tb_s * 1e12 * job.device.memory_share


def attention_seconds(job: Job, attention: AttentionKernel) -> float:
    kernel, rates = "flash", job.device.flash_tflops
    if job.software.attention == "cudnn" and job.device.cudnn_tflops:
        kernel, rates = "cudnn", job.device.cudnn_tflops
    # narrow heads fill the tensor cores less. The exponent is an estimate: every row that is known has heads of 128
    narrow = math.pow(min(1.0, attention.head_dim / 128), 0.3)
    rate = rates[attention.backward] * 1e12 * job.software.attention_age * narrow
    slower = 1.0
    if job.mesh.cp > 1 and job.cp_method != "ulysses" and job.software.context_slows:
        slower += constants.CONTEXT_SLOWDOWN.value * (1 - 1 / job.mesh.cp)
    half_length = HALF_LENGTH[kernel][attention.backward]
    return max(attention.flops / rate * (1 + half_length / attention.seq_len) * slower, _launch(job))


def collective_seconds(job: Job, comm: Collective) -> float:
    """Seconds of a collective that runs alone."""
    mesh, network = job.mesh, job.network
    size, latency = mesh.size(comm.axis), network.latency(mesh, comm.axis)
    if size == 1:
        return 0.0
    in_host = network.ranks_in_host(mesh, comm.axis)
    if comm.op == "send":
        return comm.bytes / (network.nvlink_gb_s if in_host == size else network.rdma_gb_s) / 1e9 + latency
    # a real all-to-all: each rank keeps 1/n, and what leaves its host goes through a network card of its own.
    # Ring and all-gather cp send to one neighbour under that name; they fall through
    if comm.op == "all_to_all" and (comm.axis != "cp" or job.cp_method == "ulysses"):
        inside, outside = (in_host - 1) / size / network.nvlink_gb_s, (size - in_host) / size / network.rdma_gb_s
        return comm.bytes * (inside + outside) / 1e9 + latency
    # ring algorithms: an all-reduce is a reduce-scatter and an all-gather
    share = {"all_reduce": 2.0 * (size - 1) / size, "all_to_all": 1.0}.get(comm.op, (size - 1) / size)
    return comm.bytes * share / network.rate(mesh, comm.axis) + latency


def times(job: Job, operators: Iterable[Operator]) -> Times:
    """Seconds by class of operators on the compute stream.

    Collectives of tp and ep are exposed, less what async TP hides. Those of cp run beside attention; what does not fit
    there is exposed. Ulysses exchanges before and after attention, so its transfers are exposed.
    """
    total, cp_transfers, attention = Times(), [], 0.0
    for operator in operators:
        if isinstance(operator, Gemm):
            total.add("gemm", gemm_seconds(job, operator))
        elif isinstance(operator, AttentionKernel):
            seconds = attention_seconds(job, operator)
            attention += seconds
            total.add("attention", seconds)
        elif isinstance(operator, MemoryPass):
            total.add(operator.kind, max(operator.bytes / bandwidth(job), _launch(job)))
        elif operator.axis == "cp":
            cp_transfers.append(operator)
        else:
            seconds = collective_seconds(job, operator)
            hidden = constants.ASYNC_TP_HIDDEN.value if _overlaps(job, operator) else 0.0
            exposed = seconds * (1 - hidden)
            total.send(operator.axis, operator.op, bytes=operator.bytes, seconds=seconds, exposed=exposed)
    for transfer in cp_transfers:
        seconds = collective_seconds(job, transfer)
        beside = 0.0 if job.cp_method == "ulysses" else attention / len(cp_transfers)
        total.send("cp", transfer.op, bytes=transfer.bytes, seconds=seconds, exposed=max(0.0, seconds - beside))
    return total


def _overlaps(job: Job, comm: Collective) -> bool:
    """Async TP fuses this transfer with a GEMM."""
    # rowwise float8, gathered and multiplied in pieces, takes longer than one after the other (measured on H200)
    slower = comm.op == "all_gather" and "rowwise" in job.quant
    return comm.axis == "tp" and comm.op in job.async_tp and not comm.name and not slower
