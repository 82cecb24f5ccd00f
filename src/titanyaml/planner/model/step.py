"""From operators to a step: two streams with FSDP's prefetch, the pipeline's slowest rank, accumulation, the optimizer.

The forward and backward of one microbatch are simulated event by event (a compute stream and a network stream, the
weights of the next block gathered while one block runs), since what stays exposed depends on the first and last blocks
and on the ends of the model. Everything else multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import constants, operators
from titanyaml.planner.model.cost import Times, bandwidth, collective_seconds, times
from titanyaml.planner.model.inputs import Job, Stage
from titanyaml.planner.model.primitives import Collective

#: Idle time of a schedule in forwards-and-backwards of one microbatch, from ranks p and stages per rank v. The
#: schedules that split backward passes fill the pipe with weight gradients, a third of the work (Qi et al. 2023).
BUBBLES = {
    "GPipe": lambda p, v: p - 1,
    "1F1B": lambda p, v: p - 1,
    "Interleaved1F1B": lambda p, v: (p - 1) / v,
    "LoopedBFS": lambda p, v: (p - 1) / v,
    "InterleavedZeroBubble": lambda p, v: (p - 1) / 3 / v,
    "ZBVZeroBubble": lambda p, v: 0.0,
    "DualPipeV": lambda p, v: (p - 1) / 6,
}


@dataclass(frozen=True)
class Event:
    """Something on a stream: "compute" or "network"."""

    name: str
    stream: str
    start: float
    seconds: float


@dataclass
class Step:
    """A planned step.

    Args:
        times: seconds by class; they add up to ``seconds``. bubble: share of the step in which a pipeline rank waits.
        events: of one microbatch on the slowest rank, for the timeline.
    """

    times: Times
    seconds: float
    bubble: float
    events: list[Event] = field(default_factory=list)

    @property
    def classes(self) -> dict[str, float]:
        """Seconds by class, exposed communication in one."""
        exposed = sum(value for kind, value in self.times.seconds.items() if kind.startswith("exposed"))
        rest = {kind: value for kind, value in self.times.seconds.items() if not kind.startswith("exposed")}
        names = (
            "gemm",
            "attention",
            "elementwise",
            "recompute",
            "casts",
            "loss",
            "copies",
            "contention",
            "optimizer",
            "bubble",
            "straggler",
        )
        return {name: rest.get(name, 0.0) for name in names} | {"exposed_comm": exposed}


class _Streams:
    """Two clocks. What the compute stream waits for is exposed on the axis of the collective it waits for."""

    def __init__(self, job: Job) -> None:
        self.job, self.total = job, Times()
        self.compute = self.network = self.busy = 0.0
        self.events: list[Event] = []

    def run(self, name: str, done: Times, *, needs: float = 0.0, kind: str = "", mark: bool = True) -> float:
        """Compute after ``needs``. Returns when it started."""
        wait = max(0.0, needs - self.compute)
        self.total.add("exposed_shard", wait)
        start = self.compute + wait
        self.compute = start + done.total
        self.total.merge(done, under=kind)
        if mark:
            self.events.append(Event(name, "compute", start, done.total))
        return start

    def send(self, name: str, one: Collective, *, after: float) -> float:
        """Transfer no earlier than ``after``. Returns when it is done."""
        seconds = collective_seconds(self.job, one)
        start = max(self.network, after)
        self.network = start + seconds
        if seconds:
            self.total.send(one.axis, one.op, bytes=one.bytes, seconds=seconds, exposed=0.0)
            self.events.append(Event(f"{name} {one.op}", "network", start, seconds))
            # kernels of the library take some of the device's units and of its memory's bandwidth, byte by byte
            self.busy += one.bytes / (self.job.network.nvlink_gb_s * 1e9)
        return self.network


@dataclass(frozen=True)
class _Parts:
    forward: Times
    recompute: Times
    backward: Times


def _parts(job: Job, block: BlockKind, keeps: int) -> _Parts:
    made = (
        operators.block_forward(job, block),
        operators.block_recompute(job, block, keeps),
        operators.block_backward(job, block),
    )
    return _Parts(*(times(job, one) for one in made))


def _recomputed(job: Job, layer: int) -> bool:
    return job.ac != "none" and (job.ac != "selective_layer" or layer % job.ac_every == 0)


def _microbatch(job: Job, stages: tuple[Stage, ...], *, gathers: bool, regathers: bool, reduces: bool) -> _Streams:
    """One microbatch on a rank with these stages. gathers, regathers, reduces: whether FSDP acts in the forward, in the
    backward, at the end of a block's backward."""
    streams, blocks = _Streams(job), [block for stage in stages for block in stage.blocks]
    kinds = list(zip(blocks, kept_matmuls.block_levels(job.ac_keep, blocks=len(blocks)), strict=True))
    each = {kind: _parts(job, *kind) for kind in set(kinds)}
    parts = [each[kind] for kind in kinds]
    roots = [root for stage in stages if (root := job.root(stage))]
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    after_root = 0.0
    for root in roots * gathers:
        after_root = _gather(streams, "ends", (("shard", root),), after=0.0, block=False)
    if first:
        streams.run("embedding", times(job, operators.embedding_forward(job)), needs=after_root)
    begin = streams.compute
    for layer, block in enumerate(blocks):
        ready = _gather(streams, f"block {layer}", job.groups(block), after=begin) if gathers else 0.0
        begin = streams.run(f"block {layer}", parts[layer].forward, needs=max(ready, after_root))
    if last:
        streams.run("head and loss", times(job, operators.head(job)))

    def regather(layer: int, after: float) -> float:
        kept = job.reshard == "never" or (job.reshard == "auto" and layer == len(blocks) - 1)
        if layer < 0 or kept or not regathers:
            return 0.0
        return _gather(streams, f"block {layer}", job.groups(blocks[layer]), after=after)

    ready = regather(len(blocks) - 1, streams.compute)
    for layer in reversed(range(len(blocks))):
        # the gather of the next block goes out before the reduction of this one
        needs, ready = ready, regather(layer - 1, max(streams.compute, ready))
        if _recomputed(job, layer):
            streams.run(f"block {layer} recompute", parts[layer].recompute, needs=needs, kind="recompute")
        streams.run(f"block {layer} backward", parts[layer].backward, needs=needs)
        if reduces:
            _reduce(streams, f"block {layer}", job.groups(blocks[layer]))
    if first:
        streams.run("embedding backward", times(job, operators.embedding_backward(job)))
    for root in roots * reduces:
        _reduce(streams, "ends", (("shard", root),))
    streams.run("gradients", Times(), needs=streams.network, mark=False)
    if job.mesh.shard_degree > 1:
        share = 0.2 * gathers + 0.2 * (regathers and job.reshard != "never") + 0.6 * reduces
        copies = job.params_of(stages)[0] * constants.FSDP_COPY.value * share
        streams.total.add("copies", copies / bandwidth(job))
    streams.total.add("contention", constants.CONTENTION.value * streams.busy)
    return streams


def _gather(
    streams: _Streams, name: str, groups: tuple[tuple[str, float], ...], *, after: float, block: bool = True
) -> float:
    """FSDP's gathers of these parameters; when they are there."""
    job, ready = streams.job, 0.0
    for axis, params in groups:
        if job.mesh.size(axis) > 1:
            ready = streams.send(name, operators.shard_gather(job, params, axis=axis, block=block), after=after)
    return ready


def _reduce(streams: _Streams, name: str, groups: tuple[tuple[str, float], ...]) -> None:
    job = streams.job
    for axis, params in groups:
        if job.mesh.size(axis) > 1:
            streams.send(name, operators.shard_reduce(job, params, axis=axis), after=streams.compute)
        if job.mesh.dp_replicate > 1:
            streams.send(name, operators.replica_reduce(job, params, axis=axis), after=streams.compute)


def _optimizer(job: Job, stages: tuple[Stage, ...]) -> float:
    """Seconds of the update of this rank's shard, and of casts that one data rank has."""
    alone = job.mesh.token_degree == 1
    # the kernel reads 4 bytes of either master; with the weight it writes 4 where that is split, else 6
    moved = job.software.optimizer_bytes + 2 * (job.moment_bytes - 8) + (job.master_bytes - 4)
    whole, held = job.params_of(stages)
    seconds = held * moved / bandwidth(job)
    if alone and job.software.weights == "autocast":
        seconds += 12 * whole / bandwidth(job) * job.accumulation
    elif alone:
        seconds += job.software.recast_bytes * whole / bandwidth(job)
    return seconds


def plan_step(job: Job) -> Step:
    """The time of one optimizer step on the slowest rank."""
    return plan_rank(job, _slowest(job) if job.mesh.pp > 1 else 0)


def plan_rank(job: Job, rank: int) -> Step:
    """The time of one optimizer step on a pipeline rank that all others wait for."""
    mesh, stages = job.mesh, job.stages_of(rank)
    total = Times()
    if mesh.pp == 1:
        every = job.software.reduces_each
        run = _microbatch(job, stages, gathers=True, regathers=True, reduces=every or job.accumulation == 1)
        total.merge(run.total, job.accumulation)
        if not every and job.accumulation > 1:
            final = _microbatch(job, stages, gathers=True, regathers=True, reduces=True)
            total.merge(run.total, -1)
            total.merge(final.total)
    else:
        # weights stay whole unless told otherwise: gathered under the first microbatch, gradients reduced under the
        # last one's backward
        again = job.reshard == "always"
        run = _microbatch(job, stages, gathers=again, regathers=again, reduces=False)
        edges = _microbatch(job, stages, gathers=True, regathers=again, reduces=True)
        total.merge(run.total, job.microbatches - 1)
        total.merge(edges.total)
        idle = BUBBLES[job.schedule](mesh.pp, job.stages_per_rank) if job.bubble is None else job.bubble
        total.merge(total, job.accumulation - 1)
        total.add("bubble", idle * run.total.total * job.accumulation)
        _transfers(job, stages, total)
    total.add("optimizer", _optimizer(job, stages))
    hosts = max(1.0, mesh.world_size / job.network.gpus_per_host)
    total.add("straggler", total.total * constants.STRAGGLER.value * math.log2(hosts))
    seconds = total.total
    return Step(total, seconds, total.seconds.get("bubble", 0.0) / seconds, run.events)


def _transfers(job: Job, stages: tuple[Stage, ...], total: Times) -> None:
    """What a pipeline rank sends to its neighbours and gets from them: the stream forward, its gradient backward. It
    runs beside other microbatches, and is counted as hidden."""
    one = operators.stream(job)
    count = sum(stage.neighbours for stage in stages) * job.microbatches * job.accumulation
    for op in ("send", "receive"):
        total.send("pp", op, bytes=one.bytes, seconds=collective_seconds(job, one), exposed=0.0, count=count)


def least_seconds(job: Job) -> float:
    """A bound below ``plan_step(job).seconds``: an even share of the blocks, with nothing but what they compute and the
    transfers that they themselves wait for."""
    again = job.ac not in ("none", "selective_layer")
    seconds, keeps = {}, max(kept_matmuls.block_levels(job.ac_keep, blocks=len(job.shape.blocks)))
    for block in set(job.shape.blocks):
        parts = _parts(job, block, keeps)
        seconds[block] = parts.forward.total + parts.backward.total + (parts.recompute.total if again else 0.0)
    return sum(seconds[block] for block in job.shape.blocks) / job.mesh.pp * job.microbatches * job.accumulation


def _slowest(job: Job) -> int:
    """The pipeline rank that takes longest for a microbatch, without FSDP's transfers."""
    seen: dict[tuple[Stage, ...], float] = {}
    for rank in range(job.mesh.pp):
        stages = job.stages_of(rank)
        if stages not in seen:
            run = _microbatch(job, stages, gathers=False, regathers=False, reduces=False)
            seen[stages] = run.total.total
    return max(range(job.mesh.pp), key=lambda rank: (seen[job.stages_of(rank)], -rank))
