"""From operators to a step: two streams with FSDP's prefetch, the pipeline's slowest rank, accumulation, the optimizer.

The forward and backward of one microbatch are simulated event by event (a compute stream and a network stream, the
weights of the next block gathered while one block runs), since what stays exposed depends on the first and last blocks
and on the ends of the model. Everything else multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanyaml.planner import constants, operators
from titanyaml.planner.cost import Times, bandwidth, collective_seconds, times
from titanyaml.planner.inputs import Job
from titanyaml.planner.operators import Collective

#: Idle time of a schedule in forwards-and-backwards of one microbatch, from ranks p and stages per rank v. The
#: schedules that split backward passes fill the pipe with weight gradients, a third of the work (Qi et al. 2023).
BUBBLES = {
    "GPipe": lambda p, v: p - 1, "1F1B": lambda p, v: p - 1, "Interleaved1F1B": lambda p, v: (p - 1) / v,
    "LoopedBFS": lambda p, v: (p - 1) / v, "InterleavedZeroBubble": lambda p, v: (p - 1) / 3 / v,
    "ZBVZeroBubble": lambda p, v: 0.0, "DualPipeV": lambda p, v: (p - 1) / 6,
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
        names = ("gemm", "attention", "elementwise", "recompute", "casts", "loss", "copies", "contention", "optimizer",
                 "bubble", "straggler")
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


def _parts(job: Job) -> _Parts:
    return _Parts(*(times(job, make(job)) for make in
                    (operators.block_forward, operators.block_recompute, operators.block_backward)))


def _recomputed(job: Job, layer: int) -> bool:
    return job.ac != "none" and (job.ac != "selective_layer" or layer % job.ac_every == 0)


def _microbatch(
    job: Job, layers: int, *, gathers: bool, regathers: bool, reduces: bool, first: bool, last: bool
) -> _Streams:
    """One microbatch on a rank with ``layers`` blocks. gathers, regathers, reduces: whether FSDP acts in the forward,
    in the backward, at the end of a block's backward. first, last: whether the rank has the embedding, the head."""
    streams, parts, shape = _Streams(job), _parts(job), job.shape
    sharded = job.mesh.shards > 1
    block, root = shape.local_block(job.mesh.tp), _root(job, first, last)
    gather = operators.shard_gather(job, block, block=True)
    after_root = 0.0
    if sharded and gathers and root:
        after_root = streams.send("ends", operators.shard_gather(job, root, block=False), after=0.0)
    if first:
        streams.run("embedding", times(job, operators.embedding_forward(job)), needs=after_root)
    begin = streams.compute
    for layer in range(layers):
        ready = streams.send(f"block {layer}", gather, after=begin) if sharded and gathers else 0.0
        begin = streams.run(f"block {layer}", parts.forward, needs=max(ready, after_root))
    if last:
        streams.run("head and loss", times(job, operators.head(job)))

    def regather(layer: int, after: float) -> float:
        kept = job.reshard == "never" or (job.reshard == "auto" and layer == layers - 1)
        if layer < 0 or kept or not (sharded and regathers):
            return 0.0
        return streams.send(f"block {layer}", gather, after=after)

    ready = regather(layers - 1, streams.compute)
    for layer in reversed(range(layers)):
        # the gather of the next block goes out before the reduction of this one
        needs, ready = ready, regather(layer - 1, max(streams.compute, ready))
        if _recomputed(job, layer):
            streams.run(f"block {layer} recompute", parts.recompute, needs=needs, kind="recompute")
        streams.run(f"block {layer} backward", parts.backward, needs=needs)
        if reduces:
            _reduce(streams, f"block {layer}", block)
    if first:
        streams.run("embedding backward", times(job, operators.embedding_backward(job)))
    if reduces and root:
        _reduce(streams, "ends", root)
    streams.run("gradients", Times(), needs=streams.network, mark=False)
    params = layers * block + root
    if sharded:
        share = (0.2 * gathers + 0.2 * (regathers and job.reshard != "never") + 0.6 * reduces)
        copies = params * constants.FSDP_COPY.value * share
        streams.total.add("copies", copies / bandwidth(job))
    streams.total.add("contention", constants.CONTENTION.value * streams.busy)
    return streams


def _root(job: Job, first: bool, last: bool) -> float:
    """Parameters of embedding and head on a rank that has one of them, both or none; a tied weight is on both."""
    root = job.shape.local_root(job.mesh.tp)
    return root if first and last else root / (1 if job.shape.tied else 2) * (first or last)


def _reduce(streams: _Streams, name: str, params: float) -> None:
    job = streams.job
    if job.mesh.shards > 1:
        streams.send(name, operators.shard_reduce(job, params), after=streams.compute)
    if job.mesh.dp_replicate > 1:
        streams.send(name, operators.replica_reduce(job, params), after=streams.compute)


def _optimizer(job: Job, params: float) -> float:
    """Seconds of the update of this rank's shard, and of casts that one data rank has."""
    alone = job.mesh.shards * job.mesh.dp_replicate == 1
    # the kernel reads 4 bytes of either master; with the weight it writes 4 where that is split, else 6
    moved = job.software.optimizer_bytes + 2 * (job.moment_bytes - 8) + (job.master_bytes - 4)
    seconds = params / job.mesh.shards * moved / bandwidth(job)
    if alone and job.software.weights == "autocast":
        seconds += 12 * params / bandwidth(job) * job.accumulation
    return seconds


def plan_step(job: Job) -> Step:
    """The time of one optimizer step on the slowest rank."""
    mesh, ranks = job.mesh, job.layers_of_ranks
    whole = mesh.pp == 1
    slowest, rank = _slowest(job) if not whole else (None, 0)
    layers = ranks[rank]
    ends = dict(zip(("first", "last"), job.ends_of(rank), strict=True))
    if whole:
        every = job.software.reduces_each
        run = _microbatch(job, layers, gathers=True, regathers=True, reduces=every or job.accumulation == 1, **ends)
        total = Times()
        total.merge(run.total, job.accumulation)
        if not every and job.accumulation > 1:
            final = _microbatch(job, layers, gathers=True, regathers=True, reduces=True, **ends)
            total.merge(run.total, -1)
            total.merge(final.total)
    else:
        # weights stay whole: gathered under the first microbatch, gradients reduced under the last one's backward
        run = slowest
        total = Times()
        total.merge(run.total, job.microbatches)
        edges = _microbatch(job, layers, gathers=True, regathers=False, reduces=True, **ends)
        total.merge(edges.total)
        total.merge(run.total, -1)
        idle = BUBBLES[job.schedule](mesh.pp, job.stages_per_rank) if job.bubble is None else job.bubble
        pipe = idle * run.total.total
        total.merge(total, job.accumulation - 1)
        total.add("bubble", pipe * job.accumulation)
    params = layers * job.shape.local_block(mesh.tp) + _root(job, **ends)
    total.add("optimizer", _optimizer(job, params))
    hosts = max(1.0, mesh.world_size / job.network.gpus_per_host)
    total.add("straggler", total.total * constants.STRAGGLER.value * math.log2(hosts))
    seconds = total.total
    return Step(total, seconds, total.seconds.get("bubble", 0.0) / seconds, run.events)


def _slowest(job: Job) -> tuple[_Streams, int]:
    """The pipeline rank that takes longest for a microbatch, without FSDP's transfers."""
    runs, seen = [], {}
    for rank, layers in enumerate(job.layers_of_ranks):
        ends = job.ends_of(rank)
        if (layers, ends) not in seen:
            seen[layers, ends] = _microbatch(job, layers, gathers=False, regathers=False, reduces=False, first=ends[0],
                                             last=ends[1])
        runs.append((seen[layers, ends].total.total, -rank, seen[layers, ends]))
    _, rank, run = max(runs, key=lambda one: one[:2])
    return run, -rank
