"""What a plan is made from: a decoder's sizes, a mesh, a program's habits, a device, a network, and the work of a step.

Plain numbers, so that a row of somebody else's table can be planned like a configuration of ours. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from titanyaml.config.degrees import Degrees
from titanyaml.planner.model.shape import Block, Shape

FLOAT8 = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8")


@dataclass(frozen=True)
class Mesh(Degrees):
    """Degrees, and where groups of ranks lie: pp, dp_replicate, dp_shard, cp, tp, outermost first. ``ep`` reuses the
    innermost ranks; "shard" is dp_shard*cp, "expert_shard" the axis of those ranks that hold the same experts."""

    def stride(self, axis: str) -> int:
        """Distance between neighbours on an axis."""
        inner = {
            "tp": 1,
            "ep": 1,
            "expert_shard": self.ep,
            "cp": self.tp,
            "shard": self.tp,
            "dp_replicate": self.tp * self.shard_degree,
        }
        return inner.get(axis, self.tp * self.shard_degree * self.dp_replicate)

    def size(self, axis: str) -> int:
        """Ranks on an axis."""
        sizes = {"shard": self.shard_degree, "expert_shard": self.shard_degree * self.tp // self.ep}
        return sizes.get(axis) or getattr(self, axis)


@dataclass(frozen=True)
class Device:
    """One accelerator, in sustained rates. ``conf/hardware/`` says where each comes from.

    Args:
        peak_tflops: dense bf16 datasheet peak, of which MFU is a share. memory_gib: of the device.
        bf16_tflops, fp8_tflops: GEMM of large matrices while everything else of a step runs too.
        memory_tb_s: datasheet bandwidth.
        flash_tflops, cudnn_tflops: causal attention forward and backward, long sequences; None where it is missing.
        launch_us: least time of a kernel. reserve_gib: CUDA context and NCCL, outside the allocator.
        bf16_shape, fp8_shape: s of ``cost.gemm_seconds`` (elements); that of float8 is as many times larger as its
            rate is, where it was not measured. memory_share: of the bandwidth, reached by passes over memory.
        cast_bytes: moved to cast an element to float8: (tensorwise, rowwise); None: as fitted.
        basis: where the rates come from: measured, calibrated (by a command, on one), fitted (to published runs),
            datasheet (shares of it), given.
    """

    name: str
    peak_tflops: float
    memory_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    memory_tb_s: float
    flash_tflops: tuple[float, float]
    cudnn_tflops: tuple[float, float] | None
    launch_us: float
    reserve_gib: float
    bf16_shape: float = 110.0
    fp8_shape: float | None = None
    memory_share: float = 0.88
    cast_bytes: tuple[float | None, float | None] = (None, None)
    basis: str = "given"


@dataclass(frozen=True)
class Network:
    """Links. gpus_per_host: that NVLink joins. nvlink_gb_s, rdma_gb_s: reached by large collectives, a GPU. basis: as
    of a device."""

    name: str
    gpus_per_host: int
    nvlink_gb_s: float
    rdma_gb_s: float
    nvlink_latency_us: float
    rdma_latency_us: float
    basis: str = "given"

    def rate(self, mesh: Mesh, axis: str) -> float:
        """Bytes per second and rank of a collective over an axis.

        A group that has several ranks in a host has a network card for each of them; one that lies wholly in a host
        has NVLink alone.
        """
        local = self.local(mesh, axis)
        return (self.nvlink_gb_s if local == mesh.size(axis) else min(self.nvlink_gb_s, local * self.rdma_gb_s)) * 1e9

    def local(self, mesh: Mesh, axis: str) -> int:
        """Ranks of a group over ``axis`` in one host."""
        return min(mesh.size(axis), max(1, self.gpus_per_host // mesh.stride(axis)))

    def latency(self, mesh: Mesh, axis: str) -> float:
        """Seconds before the first byte of a collective: a tree over hosts above a ring in each."""
        local = self.local(mesh, axis)
        hosts = max(1, mesh.size(axis) // local)
        return (self.nvlink_latency_us * (local > 1) + self.rdma_latency_us * math.ceil(math.log2(hosts))) * 1e-6


@dataclass(frozen=True)
class Software:
    """Habits in which training programs and their releases differ.

    Args:
        loss: ``chunked``: a chunk of tokens at a time; ``fused``: the same in one kernel on bf16 logits; ``compiled``:
            all logits, fused; ``plain``: all logits, eager.
        optimizer_bytes: moved for a parameter by one update, clipping included. recast_bytes: moved beside it where
            weights and gradients are in bf16: the gradient's cast (6), the weight's (6).
        attention: ``flash`` or ``cudnn``.
        keeps_even: selective recomputation keeps the 2nd, 4th, ... product; else the 1st, 3rd, ...
        keeps_exchanged: it keeps the output of context attention, not of its parts, and what cp ranks exchange.
        context_slows: attention over cp ranks takes longer than the same work on one.
        keeps_scattered: it keeps what the tp ranks reduce-scatter. gathers_float8: the tp ranks gather tensorwise
            float8 instead of bf16.
        frees_early: under tp a dense block's backward holds what it kept and its gradients, no gathered sequence more.
        root_copies: bytes gathered for a parameter of embedding and head while blocks run.
        weights: on one data rank: ``masters`` (bf16 parameters, fp32 copy in the optimizer) or ``autocast``.
        gemm_age, attention_age: share of today's kernel rates.
        reduces_each: gradients are reduced after every microbatch, else after the last.
        fused_norms: an eager norm is one kernel. copies_sequence: what tp ranks send along the sequence is copied once
            to lie along the first dimension, where there is more than one sequence. sums_gradients: one data rank adds
            gradients up in float32 also where a step has one backward pass.
    """

    name: str
    loss: str = "chunked"
    optimizer_bytes: float = 40.0
    recast_bytes: float = 12.0
    attention: str = "cudnn"
    keeps_even: bool = True
    keeps_scattered: bool = False
    keeps_exchanged: bool = False
    context_slows: bool = True
    gathers_float8: bool = False
    frees_early: bool = False
    root_copies: float = 2.0
    weights: str = "masters"
    gemm_age: float = 1.0
    attention_age: float = 1.0
    reduces_each: bool = True
    fused_norms: bool = True
    copies_sequence: bool = False
    sums_gradients: bool = True

    @property
    def in_chunks(self) -> bool:
        """Whether the loss takes a chunk of tokens at a time, and adds up the head's gradient."""
        return self.loss in ("chunked", "fused")


#: This project: with plain PyTorch's kernels, and with its own.
TITANYAML = Software(
    "titanyaml", copies_sequence=True, keeps_scattered=True, keeps_exchanged=True, frees_early=True, context_slows=False
)  # 2 x 16,384 tokens on two H200: within 2 % of the whole sequence's kernels
FUSED = replace(TITANYAML, loss="fused", optimizer_bytes=32.0, recast_bytes=0.0, sums_gradients=False)


@dataclass(frozen=True)
class Job:
    """Everything a plan depends on.

    Args:
        local_batch: sequences per data rank and forward; under pp those of all microbatches together.
        accumulation: forwards per step and data rank. microbatches: of one forward under pp.
        schedule: of the pipeline. stages_per_rank: of it. bubble: its idle time in forwards-and-backwards of one
            microbatch; None: as ``step.BUBBLES`` says. held: of a schedule from a file, forwards whose activations
            each rank keeps at most.
        stage_layers: layers of each stage; () where they are as even as can be. owners: the pipeline rank of each
            stage; () where stages go round the ranks.
        ac: none, full, selective_op, selective_layer, memory_budget. ac_every: of selective_layer. ac_budget: share of
            activations kept. ac_keep: share of products kept by selective_op.
        quant: none or one of FLOAT8. float8_gather: FSDP gathers float8. own_float8: our own casts and products, which
            keep their inputs for the backward pass; keeps_float8_weights: and the weights.
        async_tp: collectives overlapped with products: "all_gather", "reduce_scatter".
        chunk_tokens: of a chunked loss. sequence_parallel: tp ranks hold slices of the sequence. ring: cp passes keys
            around; else gathers them. ulysses: trades sequence for heads.
        reshard: FSDP frees a block after its forward: auto (all but the last), always, never.
        reuses: its gradients take memory that activations had.
        moment_bytes: of the optimizer's state for a parameter. master_bytes: of what makes a bf16 parameter a float32
            one, where that is stored beside it.
    """

    shape: Shape
    mesh: Mesh
    device: Device
    network: Network
    software: Software
    seq_len: int
    local_batch: int
    accumulation: int = 1
    microbatches: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    bubble: float | None = None
    held: tuple[int, ...] = ()
    stage_layers: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    ac: str = "none"
    ac_every: int = 2
    ac_budget: float = 1.0
    ac_keep: float = 0.5
    quant: str = "none"
    float8_gather: bool = False
    own_float8: bool = False
    keeps_float8_weights: bool = False
    compiled: bool = True
    async_tp: tuple[str, ...] = ()
    chunk_tokens: int = 1024
    sequence_parallel: bool = True
    cp_method: str = "allgather"
    reshard: str = "auto"
    reuses: bool = False
    moment_bytes: float = 8.0
    master_bytes: int = 4
    compute_bytes: int = 2

    @property
    def tokens(self) -> int:
        """Of one rank and one forward of a microbatch, before tensor parallelism slices them."""
        return self.local_batch // self.microbatches * self.seq_len // self.mesh.cp

    @property
    def slice_tokens(self) -> int:
        """Tokens between the split matrices on one tp rank."""
        return self.tokens // (self.mesh.tp if self.sequence_parallel else 1)

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.local_batch * self.accumulation * self.mesh.data_degree * self.seq_len

    @property
    def stream_bytes(self) -> int:
        """Of an element of the residual stream: autocast, which one data rank has in some programs, leaves what the
        embedding looks up in float32."""
        alone = self.mesh.token_degree == 1 and self.software.weights == "autocast"
        return 4 if alone else self.compute_bytes

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages of a pipeline rank."""
        pp, count = self.mesh.pp, self.mesh.pp * self.stages_per_rank
        layers = self.stage_layers or _even(self.shape.num_layers, count)
        owners = self.owners or tuple(stage % pp for stage in range(count))
        blocks, found, start = self.shape.blocks, [], 0
        for stage, held in enumerate(layers):
            before, after = stage and owners[stage - 1] != rank, stage + 1 < count and owners[stage + 1] != rank
            if owners[stage] == rank:
                found.append(Stage(blocks[start : start + held], stage == 0, stage + 1 == count, before + after))
            start += held
        return tuple(found)

    @property
    def layers_of_ranks(self) -> tuple[int, ...]:
        """Layers on each pipeline rank."""
        return tuple(sum(len(stage.blocks) for stage in self.stages_of(rank)) for rank in range(self.mesh.pp))

    def ends_of(self, rank: int) -> tuple[bool, bool]:
        """Whether a pipeline rank has the embedding, and the head."""
        stages = self.stages_of(rank)
        return any(stage.first for stage in stages), any(stage.last for stage in stages)

    def groups(self, block: Block) -> tuple[tuple[str, float], ...]:
        """(axis, parameters on a tp and ep rank) of what FSDP gathers for a block: experts that are spread by
        themselves."""
        mesh, shape = self.mesh, self.shape
        common = shape.local_block(block, mesh.tp)
        if not block.mixture:
            return (("shard", common),)
        experts = shape.mixture.num_experts * shape.expert_params
        if mesh.ep == 1:
            return (("shard", common + experts),)
        return ("shard", common), ("expert_shard", experts / mesh.ep)

    def root(self, stage: Stage) -> float:
        """Parameters of the ends of the model in a stage, on a tp rank."""
        return self.shape.local_root(self.mesh.tp, first=stage.first, last=stage.last)

    def params_of(self, stages: tuple[Stage, ...]) -> tuple[float, float]:
        """Parameters of stages on a tp and ep rank: (gathered, of which a rank keeps under FSDP)."""
        groups = [("shard", self.root(stage)) for stage in stages]
        groups += [group for stage in stages for block in stage.blocks for group in self.groups(block)]
        return sum(size for _, size in groups), sum(size / self.mesh.size(axis) for axis, size in groups)


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks of a pipeline rank. first, last: with the embedding, with final norm and head. neighbours:
    stages before and after it that other ranks have."""

    blocks: tuple[Block, ...]
    first: bool
    last: bool
    neighbours: int


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """As even as can be with the shorter stages at both ends, where embedding and head are."""
    counts = [layers // stages] * stages
    order = sorted(range(stages), key=lambda i: min(i, stages - 1 - i), reverse=True)
    for i in order[: layers % stages]:
        counts[i] += 1
    return tuple(counts)
