"""From operators to a step: two streams with FSDP's prefetch, the slowest pipeline rank, accumulation, the optimizer.

Forward and backward of one microbatch are simulated event by event on a compute stream and a network stream: the next
block's weights are gathered while one block runs. What stays exposed depends on the first and last blocks and on the
ends of the model, which no closed form over all blocks would see. The rest multiplies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import constants, operators
from titanyaml.planner.model.cost import Times, bandwidth, collective_seconds, times
from titanyaml.planner.model.inputs import Job, PipelineStage
from titanyaml.planner.model.primitives import Collective

#: Idle time of a schedule in forward-backwards of one microbatch, from ranks p and stages per rank v. Schedules that
#: split backwards fill the pipeline with weight gradients, a third of the work (Qi et al. 2023, arXiv 2401.10241).
BUBBLES: dict[str, Callable[[int, int], float]] = {
    "GPipe": lambda p, v: p - 1,
    "1F1B": lambda p, v: p - 1,
    "Interleaved1F1B": lambda p, v: (p - 1) / v,
    "LoopedBFS": lambda p, v: (p - 1) / v,
    "InterleavedZeroBubble": lambda p, v: (p - 1) / 3 / v,
    "ZBVZeroBubble": lambda p, v: 0.0,
    "DualPipeV": lambda p, v: (p - 1) / 6,
}
#: Classes of a step's time, in the order of reports; exposed communication of all axes is one more.
_CLASSES = (
    *("gemm", "attention", "elementwise", "recompute", "casts", "loss", "copies", "contention"),
    *("optimizer", "bubble", "straggler"),
)
#: Shares of FSDP's copies: all-gather outputs in the forward and in the backward, reduce-scatter inputs.
_FORWARD_COPIES, _BACKWARD_COPIES, _GRADIENT_COPIES = 0.2, 0.2, 0.6


@dataclass(frozen=True)
class Event:
    """Something on a stream, "compute" or "network". Times in seconds."""

    name: str
    stream: str
    start: float
    seconds: float


@dataclass
class Step:
    """A planned optimizer step."""

    times: Times  # by class; they add up to ``seconds``
    seconds: float
    bubble: float  # share of the step in which a pipeline rank waits
    events: list[Event] = field(default_factory=list)  # of one microbatch on the slowest rank

    @property
    def classes(self) -> dict[str, float]:
        """Seconds by class, exposed communication in one."""
        seconds = self.times.seconds
        exposed = sum(value for kind, value in seconds.items() if kind.startswith("exposed"))
        return {name: seconds.get(name, 0.0) for name in _CLASSES} | {"exposed_comm": exposed}


class _Streams:
    """Clocks of the compute and the network stream. A wait of the compute stream is exposed communication."""

    def __init__(self, job: Job) -> None:
        self.job, self.total = job, Times()
        self.compute = self.network = 0.0  # seconds until each is free
        self.nvlink_seconds = 0.0  # time that all transfers would take at NVLink's rate
        self.events: list[Event] = []

    def run(self, name: str, work: Times, *, after: float = 0.0, kind: str = "") -> float:
        """Compute, no earlier than ``after``, under one class ``kind`` if given. Returns when it started."""
        start = self.wait(after)
        self.compute = start + work.total
        self.total.merge(work, under=kind)
        self.events.append(Event(name, "compute", start, work.total))
        return start

    def wait(self, until: float) -> float:
        """Let the compute stream wait. Returns when it goes on."""
        wait = max(0.0, until - self.compute)
        self.total.add("exposed_shard", wait)
        self.compute += wait
        return self.compute

    def send(self, name: str, comm: Collective, *, after: float) -> float:
        """Transfer, no earlier than ``after``. Returns when it is complete."""
        seconds = collective_seconds(self.job, comm)
        start = max(self.network, after)
        self.network = start + seconds
        if seconds:
            self.total.send(comm.axis, comm.op, bytes=comm.bytes, seconds=seconds, exposed=0.0)
            self.events.append(Event(f"{name} {comm.op}", "network", start, seconds))
            # collective kernels take multiprocessors and memory bandwidth from others by bytes, not by time
            self.nvlink_seconds += comm.bytes / (self.job.network.nvlink_gb_s * 1e9)
        return self.network

    def gather(self, name: str, groups: tuple[tuple[str, float], ...], *, after: float, block: bool = True) -> float:
        """FSDP's all-gathers of (axis, parameters). Returns when the weights are there."""
        ready = 0.0
        for axis, params in groups:
            if self.job.mesh.size(axis) > 1:
                # experts and the ends stay in the compute dtype
                float8 = block and self.job.float8_gather and axis == "shard"
                size = params * (1 if float8 else self.job.compute_bytes)
                ready = self.send(name, Collective(axis, "all_gather", size), after=after)
        return ready

    def reduce(self, name: str, groups: tuple[tuple[str, float], ...]) -> None:
        """FSDP's reduce-scatters of gradients in full precision, and HSDP's all-reduces of their results."""
        mesh = self.job.mesh
        for axis, params in groups:
            if mesh.size(axis) > 1:
                scatter = Collective(axis, "reduce_scatter", params * self.job.full_bytes)
                self.send(name, scatter, after=self.compute)
            if mesh.dp_replicate > 1:
                shard = params / mesh.size(axis) * self.job.full_bytes
                self.send(name, Collective("dp_replicate", "all_reduce", shard), after=self.compute)


def _block_times(job: Job, block: BlockKind, level: int) -> tuple[Times, Times, Times]:
    """(forward, recomputation, backward)."""
    recompute = operators.block_recompute(job, block, level)
    forward, backward = operators.block_forward(job, block), operators.block_backward(job, block)
    return times(job, forward), times(job, recompute), times(job, backward)


def recomputes(job: Job, layer: int) -> bool:
    """Whether the backward recomputes this layer of a rank."""
    return job.ac != "none" and (job.ac != "selective_layer" or layer % job.ac_every == 0)


def _microbatch(
    job: Job, stages: tuple[PipelineStage, ...], *, gathers: bool, regathers: bool, reduces: bool
) -> _Streams:
    """One microbatch on a rank with these stages.

    FSDP ``gathers`` in the forward, ``regathers`` in the backward, and ``reduces`` after each block's backward.
    """
    streams, blocks = _Streams(job), [block for stage in stages for block in stage.blocks]
    kinds = list(zip(blocks, kept_matmuls.block_levels(job.ac_keep, blocks=len(blocks)), strict=True))
    times_of_kind = {kind: _block_times(job, *kind) for kind in set(kinds)}
    roots = [root for stage in stages if (root := job.root_params(stage))]
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    root_ready = 0.0
    for root in roots if gathers else []:
        root_ready = streams.gather("ends", (("shard", root),), after=0.0, block=False)
    if first:
        streams.run("embedding", times(job, operators.embedding_forward(job)), after=root_ready)
    begin = streams.compute
    for layer, block in enumerate(blocks):
        # prefetch: a block's gather starts with the block before
        ready = streams.gather(f"block {layer}", job.groups(block), after=begin) if gathers else 0.0
        begin = streams.run(f"block {layer}", times_of_kind[kinds[layer]][0], after=max(ready, root_ready))
    if last:
        streams.run("head and loss", times(job, operators.head(job)))

    def regather(layer: int, after: float) -> float:
        still_there = job.reshard == "never" or (job.reshard == "auto" and layer == len(blocks) - 1)
        if layer < 0 or still_there or not regathers:
            return 0.0
        return streams.gather(f"block {layer}", job.groups(blocks[layer]), after=after)

    ready = regather(len(blocks) - 1, streams.compute)
    for layer in reversed(range(len(blocks))):
        # the gather of the next block goes out before the reduction of this one
        after, ready = ready, regather(layer - 1, max(streams.compute, ready))
        _, recompute, backward = times_of_kind[kinds[layer]]
        if recomputes(job, layer):
            streams.run(f"block {layer} recompute", recompute, after=after, kind="recompute")
        streams.run(f"block {layer} backward", backward, after=after)
        if reduces:
            streams.reduce(f"block {layer}", job.groups(blocks[layer]))
    if first:
        streams.run("embedding backward", times(job, operators.embedding_backward(job)))
    for root in roots if reduces else []:
        streams.reduce("ends", (("shard", root),))
    streams.wait(streams.network)
    if job.mesh.shard_degree > 1:
        gathers_again = regathers and job.reshard != "never"
        share = _FORWARD_COPIES * gathers + _BACKWARD_COPIES * gathers_again + _GRADIENT_COPIES * reduces
        copied = job.params_of(stages)[0] * constants.FSDP_COPY.value * share
        streams.total.add("copies", copied / bandwidth(job))
    streams.total.add("contention", constants.CONTENTION.value * streams.nvlink_seconds)
    return streams


def _optimizer(job: Job, stages: tuple[PipelineStage, ...]) -> float:
    """Seconds of the update of this rank's shard, and of the casts of one data rank."""
    software = job.software
    # beside 8 bytes of moments that are read and written, the kernel reads 4 bytes of either kind of master; with the
    # weight it writes 4 where that is split, else 6
    moved = software.optimizer_bytes + 2 * (job.moment_bytes - 8) + (job.master_bytes - 4)
    unsharded, shard = job.params_of(stages)
    seconds = shard * moved / bandwidth(job)
    if not job.uses_fsdp and software.weights == "autocast":
        # every forward casts all weights (6 bytes), and every backward their gradients (6)
        seconds += 12 * unsharded / bandwidth(job) * job.accumulation
    elif not job.uses_fsdp:
        seconds += software.recast_bytes * unsharded / bandwidth(job)
    return seconds


def plan_step(job: Job) -> Step:
    """The time of one optimizer step on the slowest rank.

    That is the pipeline rank that takes longest for a microbatch without FSDP's transfers; the first of equals.
    """
    if job.mesh.pp == 1:
        return plan_rank(job, 0)
    stages = [job.stages_of(rank) for rank in range(job.mesh.pp)]
    seconds = {  # by stages: ranks in the middle are alike
        key: _microbatch(job, key, gathers=False, regathers=False, reduces=False).total.total for key in set(stages)
    }
    return plan_rank(job, max(range(job.mesh.pp), key=lambda rank: seconds[stages[rank]]))


def plan_rank(job: Job, rank: int) -> Step:
    """The time of one optimizer step on a pipeline rank, as if it were the slowest."""
    mesh, stages = job.mesh, job.stages_of(rank)
    total = Times()
    if mesh.pp == 1:
        reduces_each = job.software.reduces_each
        run = _microbatch(job, stages, gathers=True, regathers=True, reduces=reduces_each or job.accumulation == 1)
        total.merge(run.total, job.accumulation)
        if not reduces_each and job.accumulation > 1:
            last = _microbatch(job, stages, gathers=True, regathers=True, reduces=True)
            total.merge(run.total, -1)
            total.merge(last.total)
    else:
        # torch's stages keep weights unless resharding is "always": the first microbatch gathers them, and the last
        # one's backward reduces gradients. Both are counted on one microbatch
        regathers = job.reshard == "always"
        run = _microbatch(job, stages, gathers=regathers, regathers=regathers, reduces=False)
        edges = _microbatch(job, stages, gathers=True, regathers=regathers, reduces=True)
        total.merge(run.total, job.microbatches - 1)
        total.merge(edges.total)
        idle = BUBBLES[job.schedule](mesh.pp, job.stages_per_rank) if job.bubble is None else job.bubble
        total.merge(total, job.accumulation - 1)
        total.add("bubble", idle * run.total.total * job.accumulation)
        # the stream and its gradient, counted as hidden behind other microbatches: below 1 % of published steps
        transfer = Collective("pp", "send", job.slice_tokens * job.shape.dim * job.compute_bytes)
        count = sum(stage.neighbours for stage in stages) * job.microbatches * job.accumulation
        seconds = collective_seconds(job, transfer)
        for op in ("send", "receive"):
            total.send("pp", op, bytes=transfer.bytes, seconds=seconds, exposed=0.0, count=count)
    total.add("optimizer", _optimizer(job, stages))
    hosts = max(1.0, mesh.world_size / job.network.gpus_per_host)
    total.add("straggler", total.total * constants.STRAGGLER.value * math.log2(hosts))
    seconds = total.total
    return Step(total, seconds, total.seconds.get("bubble", 0.0) / seconds, run.events)


def least_seconds(job: Job) -> float:
    """A lower bound of ``plan_step(job).seconds``: an even share of the blocks' own work, with the transfers that they
    themselves wait for. A search prunes with it."""
    recompute = job.ac not in ("none", "selective_layer")
    # the level of the least recomputation
    level = max(kept_matmuls.block_levels(job.ac_keep, blocks=len(job.shape.blocks)))
    seconds = {}
    for block in set(job.shape.blocks):
        forward, repeated, backward = _block_times(job, block, level)
        seconds[block] = forward.total + backward.total
        seconds[block] += repeated.total if recompute else 0.0
    return sum(seconds[block] for block in job.shape.blocks) / job.mesh.pp * job.microbatches * job.accumulation
