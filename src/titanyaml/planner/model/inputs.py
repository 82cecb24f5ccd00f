"""Inputs of a plan: the decoder's shape, the mesh, the device, the network, the program's habits, the work of a step.

Plain numbers without a configuration behind them, so that a row of a published table is planned like a run of ours.
No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from titanyaml.config.decoder_shape import BlockKind, DecoderShape, local_block_params
from titanyaml.config.degrees import Degrees


@dataclass(frozen=True)
class Mesh(Degrees):
    """Degrees, and where the ranks of a group lie.

    Ranks are ordered by pp, dp_replicate, dp_shard, cp, tp, outermost first. Three more axes exist: "shard" is
    dp_shard*cp, over which FSDP shards; "ep" reuses the innermost ranks; "expert_shard" are the ranks that hold the
    same experts.
    """

    def stride(self, axis: str) -> int:
        """Ranks between two neighbours on an axis."""
        inner = {"tp": 1, "ep": 1, "expert_shard": self.ep, "cp": self.tp, "shard": self.tp}
        inner["dp_replicate"] = self.tp * self.shard_degree
        return inner.get(axis, inner["dp_replicate"] * self.dp_replicate)

    def size(self, axis: str) -> int:
        if axis == "shard":
            return self.shard_degree
        if axis == "expert_shard":
            return self.shard_degree * self.tp // self.ep
        degree: int = getattr(self, axis)
        return degree


@dataclass(frozen=True)
class Device:
    """One accelerator in sustained rates, as in ``conf/hardware/``, where the first line says where each comes from."""

    name: str
    peak_tflops: float  # dense bf16 peak of the datasheet: MFU is a share of it
    memory_gib: float
    bf16_tflops: float  # rate of large GEMMs while everything else of a step runs too
    fp8_tflops: float | None  # None: the device has no float8
    memory_tb_s: float  # memory bandwidth of the datasheet
    flash_tflops: tuple[float, float]  # causal attention of long sequences, (forward, backward)
    cudnn_tflops: tuple[float, float] | None  # None: the device has no such kernel
    launch_us: float  # least time of a kernel
    reserve_gib: float  # CUDA context and NCCL buffers: outside the allocator
    bf16_shape: float = 110.0  # s of ``cost.gemm_seconds`` (elements): what short sides of a GEMM cost
    fp8_shape: float | None = None  # None: larger than bf16's by as much as the rate is
    memory_share: float = 0.88  # of the bandwidth, reached by memory-bound kernels (a copy on H200: 0.90)
    cast_bytes: tuple[float | None, float | None] = (None, None)  # per element, (tensorwise, rowwise); None: as fitted
    # measured, calibrated (by ``hardware.calibrate``), fitted (to published runs), datasheet (shares of it), given
    basis: str = "given"


@dataclass(frozen=True)
class Network:
    """Links. Rates are those that large collectives reach, per GPU."""

    name: str
    gpus_per_host: int  # that NVLink joins
    nvlink_gb_s: float
    rdma_gb_s: float
    nvlink_latency_us: float
    rdma_latency_us: float
    basis: str = "given"  # as of a device

    def rate(self, mesh: Mesh, axis: str) -> float:
        """Bytes per second and rank of a collective over an axis.

        A group within a host uses NVLink. A group over hosts uses one network card for each of its ranks in a host.
        """
        in_host = self.ranks_in_host(mesh, axis)
        rdma = min(self.nvlink_gb_s, in_host * self.rdma_gb_s)
        return (self.nvlink_gb_s if in_host == mesh.size(axis) else rdma) * 1e9

    def ranks_in_host(self, mesh: Mesh, axis: str) -> int:
        """Ranks of one group over ``axis`` that share a host."""
        return min(mesh.size(axis), max(1, self.gpus_per_host // mesh.stride(axis)))

    def latency(self, mesh: Mesh, axis: str) -> float:
        """Seconds before the first byte of a collective: a tree over the hosts, above one ring in each."""
        in_host = self.ranks_in_host(mesh, axis)
        hosts = max(1, mesh.size(axis) // in_host)
        return (self.nvlink_latency_us * (in_host > 1) + self.rdma_latency_us * math.ceil(math.log2(hosts))) * 1e-6


@dataclass(frozen=True)
class Software:
    """Habits in which training programs and their releases differ."""

    name: str
    # chunked: a chunk of tokens at a time; fused: the same in one kernel on bf16 logits; compiled: all logits at once,
    # in fused kernels; plain: all logits at once, eager
    loss: str = "chunked"
    optimizer_bytes: float = 40.0  # memory traffic of one parameter's update, gradient clipping included
    recast_bytes: float = 12.0  # traffic beside it where weights and gradients are bf16: two casts of 6 bytes
    attention: str = "cudnn"  # or flash
    keeps_even: bool = True  # selective recomputation keeps the 2nd, 4th, ... GEMM output; else the 1st, 3rd, ...
    keeps_scattered: bool = False  # ... and what tp ranks reduce-scatter
    keeps_exchanged: bool = False  # ... and what cp ranks exchange, but not the outputs of attention's parts
    context_slows: bool = True  # attention over cp ranks is slower than one rank's kernel (CONTEXT_SLOWDOWN)
    gathers_float8: bool = False  # tp ranks all-gather activations as tensorwise float8, not bf16
    frees_early: bool = False  # under tp, a dense block's backward frees gathered sequences as it goes
    root_copies: float = 2.0  # bytes gathered per parameter of embedding and head while blocks run
    weights: str = "masters"  # of one data rank: bf16 weights and fp32 masters in the optimizer; or autocast
    gemm_age: float = 1.0  # share of today's GEMM rate that the release reaches
    attention_age: float = 1.0  # the same of attention
    reduces_each: bool = True  # gradients are reduce-scattered after every microbatch; else after the last
    fused_norms: bool = True  # an eager norm is one kernel
    copies_sequence: bool = False  # tp transfers copy sequences so that they lie along the first dimension
    sums_gradients: bool = True  # one data rank sums gradients in fp32 even where a step has one backward pass

    @property
    def loss_in_chunks(self) -> bool:
        """The loss takes a chunk of tokens at a time and sums up the head's gradient."""
        return self.loss in ("chunked", "fused")


#: This project with plain PyTorch's kernels. On two H200, cp 2 of 2 x 16,384 tokens is within 2 % of one rank's kernel.
TITANYAML = Software(
    "titanyaml", copies_sequence=True, keeps_scattered=True, keeps_exchanged=True, frees_early=True, context_slows=False
)
#: This project with its own kernels.
FUSED = replace(TITANYAML, loss="fused", optimizer_bytes=32.0, recast_bytes=0.0, sums_gradients=False)


@dataclass(frozen=True)
class Job:
    """Everything a plan depends on."""

    shape: DecoderShape
    mesh: Mesh
    device: Device
    network: Network
    software: Software
    seq_len: int
    local_batch: int  # sequences per data rank and forward; under pp those of all microbatches together
    accumulation: int = 1  # forwards per step and data rank
    microbatches: int = 1  # of one forward, under pp
    schedule: str = "1F1B"  # of the pipeline, as ``parallel.pp_schedule`` spells it
    stages_per_rank: int = 1
    bubble: float | None = None  # idle time in forward-backwards of a microbatch; None: as ``step.BUBBLES`` says
    max_in_flight: tuple[int, ...] = ()  # of a schedule from a file: the most forwards that each rank holds
    stage_layers: tuple[int, ...] = ()  # layers of each stage; (): as even as possible
    owners: tuple[int, ...] = ()  # pipeline rank of each stage; (): stages go round the ranks
    ac: str = "none"  # activation checkpointing: none, full, selective_op, selective_layer or memory_budget
    ac_every: int = 2  # selective_layer recomputes one block in so many
    ac_budget: float = 1.0  # memory_budget: share of activations to keep
    ac_keep: float = 0.5  # selective_op: share of GEMM outputs to keep
    quant: str = "none"  # or a recipe of ``quant.recipe``
    float8_gather: bool = False  # FSDP all-gathers float8
    own_float8: bool = False  # our casts and GEMMs, which save their inputs in float8 for the backward
    keeps_float8_weights: bool = False  # ... and the weights
    compiled: bool = True
    async_tp: tuple[str, ...] = ()  # tp collectives overlapped with GEMMs: all_gather, reduce_scatter
    chunk_tokens: int = 1024  # of a loss in chunks
    sequence_parallel: bool = True  # tp ranks hold slices of the sequence between the split matrices
    cp_method: str = "allgather"  # gather keys and values; ring: pass them around; ulysses: trade sequence for heads
    reshard: str = "auto"  # FSDP frees a block's weights after its forward: auto (but the last's), always, never
    reuses_memory: bool = False  # FSDP's reduced gradients take memory that activations had
    moment_bytes: float = 8.0  # optimizer moments of a parameter
    master_bytes: int = 4  # what turns a bf16 parameter into a float32 one, where that is stored beside it
    compute_bytes: int = 2  # of an element of the compute dtype

    @property
    def uses_float8(self) -> bool:
        """The blocks' linear layers multiply in 8 bits."""
        return self.quant != "none"

    @property
    def uses_fsdp(self) -> bool:
        """Several ranks hold different tokens: FSDP shards, or at least reduces gradients."""
        return self.mesh.token_degree > 1

    @property
    def dtype(self) -> str:
        """In which the run computes."""
        return {2: "bf16", 4: "fp32", 8: "fp64"}[self.compute_bytes]

    @property
    def full_bytes(self) -> int:
        """Bytes of a parameter in full precision, and of a summed gradient: 4, or 8 where the run computes in fp64."""
        return max(4, self.compute_bytes)

    @property
    def tokens(self) -> int:
        """Tokens of a rank in one forward of a microbatch, before sequence parallelism slices them."""
        return self.local_batch // self.microbatches * self.seq_len // self.mesh.cp

    @property
    def slice_tokens(self) -> int:
        """Tokens of one tp rank between the split matrices."""
        return self.tokens // (self.mesh.tp if self.sequence_parallel else 1)

    @property
    def slices_stream(self) -> bool:
        """Tp ranks hold slices of the residual stream, and all-gather what attention and the feed-forward read."""
        return self.mesh.tp > 1 and self.sequence_parallel

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        return self.local_batch * self.accumulation * self.mesh.data_degree * self.seq_len

    @property
    def stream_bytes(self) -> int:
        """Bytes of an element of the residual stream."""
        # autocast leaves the embedding's output in fp32, and with it every sum of the stream
        autocast = not self.uses_fsdp and self.software.weights == "autocast"
        return 4 if autocast else self.compute_bytes

    def stages_of(self, rank: int) -> tuple[PipelineStage, ...]:
        pp, count = self.mesh.pp, self.mesh.pp * self.stages_per_rank
        layers = self.stage_layers or _split_evenly(self.shape.num_layers, count)
        owners = self.owners or tuple(stage % pp for stage in range(count))
        blocks, stages, start = self.shape.blocks, [], 0
        for i, num_layers in enumerate(layers):
            if owners[i] == rank:
                neighbours = sum(owners[j] != rank for j in (i - 1, i + 1) if 0 <= j < count)
                stages.append(PipelineStage(blocks[start : start + num_layers], i == 0, i + 1 == count, neighbours))
            start += num_layers
        return tuple(stages)

    @property
    def layers_of_ranks(self) -> tuple[int, ...]:
        return tuple(sum(len(stage.blocks) for stage in self.stages_of(rank)) for rank in range(self.mesh.pp))

    def groups(self, block: BlockKind) -> tuple[tuple[str, float], ...]:
        """What FSDP all-gathers for a block: (axis, parameters on a tp and ep rank). Experts spread by ep have an axis
        of their own."""
        common = local_block_params(self.shape, block, self.mesh.tp)
        experts = self.shape.experts.num_experts * self.shape.expert_params if block.mixture else 0
        if not block.mixture or self.mesh.ep == 1:
            return (("shard", common + experts),)
        return ("shard", common), ("expert_shard", experts / self.mesh.ep)

    def block_params(self, block: BlockKind) -> float:
        """Parameters of a block on a tp and ep rank, unsharded."""
        return sum(params for _, params in self.groups(block))

    def root_params(self, stage: PipelineStage) -> float:
        """Parameters of embedding, head and final norm in a stage, on a tp rank."""
        return self.shape.local_root(self.mesh.tp, first=stage.first, last=stage.last)

    def params_of(self, stages: tuple[PipelineStage, ...]) -> tuple[float, float]:
        """Parameters of stages on a tp and ep rank: (unsharded, FSDP's shard of them)."""
        groups = [("shard", self.root_params(stage)) for stage in stages]
        groups += [group for stage in stages for block in stage.blocks for group in self.groups(block)]
        return sum(params for _, params in groups), sum(params / self.mesh.size(axis) for axis, params in groups)


@dataclass(frozen=True)
class PipelineStage:
    """Consecutive blocks on a pipeline rank; without pp, all of them."""

    blocks: tuple[BlockKind, ...]
    first: bool  # has the embedding
    last: bool  # has final norm and head
    neighbours: int  # stages before and after it that lie on other ranks


def _split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """As evenly as possible; the shorter stages at both ends, where embedding and head are."""
    from_middle = sorted(range(stages), key=lambda i: min(i, stages - 1 - i), reverse=True)
    longer = from_middle[: layers % stages]
    return tuple(layers // stages + (i in longer) for i in range(stages))
