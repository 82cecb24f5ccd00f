"""Peak memory of a rank by part, in bytes: what CUDA's allocator will have reserved.

Without a pipeline the peak is at the start of the backward, when all activations are there, or, on one data rank, at
its end, when all gradients are. Under FSDP both count at once: reduce-scatter returns gradients in another stream's
memory pool, which never reuses freed activations (torch's CUDACachingAllocator has a pool per stream).

A pipeline rank is planned at its fullest instant (``in_flight.py``). That is a lower bound: cached, fragmented blocks
of many microbatches are not modelled.

Symbols: d width of the residual stream, V vocabulary, b bytes of the compute dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import constants, in_flight
from titanyaml.planner.model.in_flight import MAX_GATHERED_STAGES, PipelineInstant
from titanyaml.planner.model.inputs import Job, PipelineStage
from titanyaml.planner.model.saved_activations import saved_by_kind, saved_per_token

GIB = 2**30
#: Measured pipeline runs use up to 25 % more memory than the lower bound (405B on 512 H100, docs/planner.md); a search
#: and ac=auto make room for a little more.
PIPELINE_MARGIN = 1.28
#: Bytes per logit that are alive at once. plain: bf16 and three float32 copies; compiled: as measured rows reserve;
#: chunked: bf16, float32 and its log-softmax, of one chunk; fused: bf16, overwritten by its gradient.
_LOGIT_BYTES = {"plain": 14.0, "compiled": 4.0, "chunked": 10.0, "fused": 2.0}

Stages = tuple[PipelineStage, ...]


@dataclass(frozen=True)
class Memory:
    """Planned peak memory."""

    parts: dict[str, float]  # bytes of the fullest rank
    stages: list[float] = field(default_factory=list)  # bytes of each pipeline rank
    lower_bound: bool = False  # more may be needed

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def with_margin(self) -> float:
        """Bytes to make room for: a lower bound grows by what measured runs were above theirs."""
        return self.total * (PIPELINE_MARGIN if self.lower_bound else 1.0)


def plan_memory(job: Job) -> Memory:
    saved = saved_by_kind(job)
    if job.mesh.pp == 1:
        parts = _rank_parts(job, saved)
        return Memory(parts, [sum(parts.values())])
    per_rank = [_pipeline_parts(job, saved, rank=rank) for rank in range(job.mesh.pp)]
    totals = [sum(parts.values()) for parts in per_rank]
    return Memory(per_rank[totals.index(max(totals))], totals, lower_bound=True)


def _rank_parts(job: Job, saved: dict[BlockKind, float]) -> dict[str, float]:
    stages = job.stages_of(0)
    blocks = stages[0].blocks
    logits, head_gradients, freed = _loss(job)
    block = max(_block_backward(job, kind) for kind in set(blocks))
    parts = states(job, stages) | {
        "activations": _saved_by_stage(job, saved, stages[0]) + _saved_float8_weights(job, blocks),
        # the block's backward reuses what the loss has freed
        "recompute peak": max(0.0, block - logits - freed) + _tp_leftover(job, logits, block),
        "logits": logits + head_gradients,
        "gathered weights": _gathered_weights(job, stages),
        "allocator": _allocator_gib(job) * GIB,
    }
    if not job.uses_fsdp:
        return _peak_of_one_data_rank(job, parts)
    return _peak_with_reuse(job, parts) if job.reuses_memory else parts


def _pipeline_parts(job: Job, saved: dict[BlockKind, float], *, rank: int) -> dict[str, float]:
    """A pipeline rank at its fullest instant. Forwards in flight count alike over its stages."""
    stages = job.stages_of(rank)
    blocks = [block for stage in stages for block in stage.blocks]
    logits, head_gradients, freed = _loss(job)
    # a loss over all logits returns them for every microbatch, and torch's schedule keeps them
    output = 0.0 if job.software.loss_in_chunks else 2 * job.tokens * job.shape.vocab_size / job.mesh.tp
    saved_by_forward = sum(_saved_by_stage(job, saved, stage) for stage in stages) / len(stages)
    float8_weights = _saved_float8_weights(job, blocks)
    backwards = [max(_block_backward(job, kind) for kind in dict.fromkeys(stage.blocks)) for stage in stages]
    unsharded = UnshardedOnPipelineRank(job, stages)
    fixed = states(job, stages)
    fixed |= {"allocator": _allocator_gib(job) * GIB, "stream buffers": stream_buffers(job, stages)}
    candidates = []
    for instant in in_flight.instants(job, rank):
        block = backwards[instant.stage]
        at_loss = stages[instant.stage].last and not instant.at_first_block
        gradients = unsharded.gradients(instant)
        parts = fixed | {
            "activations": instant.in_flight * saved_by_forward + float8_weights,
            "recompute peak": max(0.0, block - logits - freed) + _tp_leftover(job, logits, block) if at_loss else block,
            "logits": at_loss * (logits + head_gradients) + stages[-1].last * output * instant.outputs,
            "gathered weights": unsharded.weights(instant),
            "unsharded gradients": gradients,
        }
        if not job.uses_fsdp:  # nothing is sharded: gradients stay as they grow
            reduced = sum(unsharded.params[i] for i in instant.reduced)
            parts |= {"gradients": gradients + job.full_bytes * reduced, "unsharded gradients": 0.0}
        candidates.append(parts)
    return _fullest(candidates)


def _fullest(candidates: Sequence[dict[str, float]]) -> dict[str, float]:
    return max(candidates, key=lambda parts: sum(parts.values()))


def _block_backward(job: Job, block: BlockKind) -> float:
    """Bytes alive while one block runs backward, beyond what all blocks have saved."""
    saved = saved_per_token(job, block, mode="none")
    if job.mesh.tp > 1 and job.software.frees_early and not block.mixture:
        sums = not job.uses_fsdp and job.software.sums_gradients
        weight_bytes = job.full_bytes if sums else job.compute_bytes
        return job.tokens * saved + gradients_at_work(job, block, weight_bytes=weight_bytes)
    # gradients of what the block saved, and under a checkpoint that itself, filled anew. A compiled backward frees as
    # it goes: at a 3B's proportions it held 7 of 14.7 residual streams (traced on a CPU)
    share = 2.0 if job.ac not in ("none", "memory_budget") else 0.5 if job.compiled else 1.0
    gathered = 0.0
    if job.mesh.tp > 1:
        # nine tensors of whole sequences: gathered inputs, summands before and after the scatter. Each fused kind of
        # transfer spares 1.5; what is saved has two of them
        counted = share * 2 * (1 - 1 / job.mesh.tp) * job.sequence_parallel
        gathered = (9 - 1.5 * len(job.async_tp) - counted) * job.shape.dim * job.compute_bytes
    return job.tokens * (share * saved + gathered)


def gradients_at_work(job: Job, block: BlockKind, *, weight_bytes: int) -> float:
    """Bytes of gradients in a dense block's backward at their fullest: in the feed-forward.

    Of gate, up and product, whose own activation makes room for one; and of w2, at ``weight_bytes`` an element, which
    comes first. The gradient of the block's output is that of the stream, counted elsewhere.
    """
    features = job.shape.width(block) / job.mesh.tp
    return features * (2 * job.tokens * job.compute_bytes + weight_bytes * job.shape.dim)


def _loss(job: Job) -> tuple[float, float, float]:
    """Bytes of (logits; the head's own gradients, in a loss over chunks; of these, what is freed before the blocks)."""
    rows = job.shape.vocab_size / job.mesh.tp
    if not job.software.loss_in_chunks:
        return _LOGIT_BYTES[job.software.loss] * job.tokens * rows, 0.0, 0.0
    chunk = min(job.chunk_tokens, job.tokens)
    # the weight's gradient is summed over chunks in float32, and the stream's gradient is written chunk by chunk
    gradients = 4 * rows * job.shape.dim + job.compute_bytes * job.tokens * job.shape.dim
    # over tp, the next chunk's logits are formed while maxima and sums of this one travel
    buffers = 2 if job.software.loss == "fused" and job.mesh.tp > 1 and chunk < job.tokens else 1
    logits = _LOGIT_BYTES[job.software.loss] * chunk * rows * buffers
    rounded = max(0, 4 - job.compute_bytes) * rows * job.shape.dim  # the float32 sum is rounded, its upper bytes go
    return logits, gradients, rounded


def _tp_leftover(job: Job, logits: float, block: float) -> float:
    """Bytes of the smaller of loss and block backward that the larger one cannot reuse, under tp."""
    return constants.TP_LEFTOVER.value * min(logits, block) if job.mesh.tp > 1 else 0.0


def _allocator_gib(job: Job) -> float:
    """GiB reserved beyond what is in use."""
    # FSDP and autocast copy weights on streams of their own, and each stream caches blocks. One stream that computes on
    # weights that stay has workspaces and rounded blocks alone: 0.04 to 0.8 GiB above what was active (H200)
    one_stream = not job.uses_fsdp and job.mesh.pp == 1 and job.software.weights == "masters"
    return 0.4 if one_stream else constants.ALLOCATOR_GIB.value


def _saved_by_stage(job: Job, saved: dict[BlockKind, float], stage: PipelineStage) -> float:
    """Bytes that a stage saves of one microbatch."""
    return job.tokens * sum(saved[kind] * stage.blocks.count(kind) for kind in dict.fromkeys(stage.blocks))


def _saved_float8_weights(job: Job, blocks: Sequence[BlockKind]) -> float:
    """Bytes of float8 weights that blocks save for their backward; a checkpointed block casts them again."""
    saves_weights = job.keeps_float8_weights and job.ac in ("none", "memory_budget")
    return _linear_params(job, blocks) if saves_weights else 0.0


def _linear_params(job: Job, blocks: Sequence[BlockKind]) -> float:
    """Parameters in the linear layers of blocks, on a tp rank."""
    return sum(linear.params for block in blocks for linear in job.shape.linears_of(block)) / job.mesh.tp


def stream_buffers(job: Job, stages: Stages) -> float:
    """Bytes into which torch's pipeline stages receive: a buffer for each microbatch and neighbour."""
    stream = job.slice_tokens * job.shape.dim * job.compute_bytes
    return job.microbatches * sum(stage.neighbours for stage in stages) * stream


def states(job: Job, stages: Stages) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state of a rank."""
    full, narrow, moments = job.full_bytes, job.compute_bytes, job.moment_bytes
    unsharded, shard = job.params_of(stages)
    if not job.uses_fsdp and job.software.weights == "masters":
        # weights are stored as they compute, the optimizer has what makes them full; gradients are summed in full
        masters = job.master_bytes if narrow < 4 else 0
        optimizer = (masters + moments) * unsharded
        return {"parameters": narrow * unsharded, "gradients": full * unsharded, "optimizer": optimizer}
    if job.own_float8 and job.float8_gather:
        # each shard of a linear layer has a float8 copy, which is what FSDP gathers
        copies = sum(_linear_params(job, stage.blocks) for stage in stages) / job.mesh.size("shard")
        return {"parameters": full * shard + copies, "gradients": full * shard, "optimizer": moments * shard}
    if job.master_bytes == 2 and narrow == 2:
        # split masters: shards are bf16. FSDP rounds the gradient of a single backward to the shard's dtype
        summed = job.accumulation * job.microbatches > 1 or job.software.sums_gradients
        gradients = (full if summed else narrow) * shard
        optimizer = (job.master_bytes + moments) * shard
        return {"parameters": narrow * shard, "gradients": gradients, "optimizer": optimizer}
    return {"parameters": full * shard, "gradients": full * shard, "optimizer": moments * shard}


def _gathered_weights(job: Job, stages: Stages) -> float:
    """Bytes of unsharded weights under FSDP: the model's ends, three blocks, and the gradients of one.

    Gathering in float8 was seen to save nothing where blocks come and go (8B on 8 H100: 77.0 and 76.8 GiB; 3B on two
    H200: 53.3 GiB both).
    """
    if not job.uses_fsdp:
        return 0.0
    block = max(job.block_params(kind) for stage in stages for kind in stage.blocks)
    if job.reshard == "never":
        # all weights; one block's gradients in the compute dtype and in float32
        return job.params_of(stages)[0] * job.compute_bytes + 6 * block
    root = sum(map(job.root_params, stages))
    # three blocks of weights and one of gradients in the compute dtype; these once more in float32
    return job.software.root_copies * root + block * (4 * job.compute_bytes + 4)


class UnshardedOnPipelineRank:
    """Bytes of unsharded weights and gradients on a pipeline rank.

    A backward of torch's stages leaves the weights that it gathered, and sums gradients in float32 until the last
    backward reduces them. With ``reshard=always`` a forward frees its weights block by block: then there are the
    weights of backwards that no forward followed, and two blocks at work.
    """

    def __init__(self, job: Job, stages: Stages) -> None:
        self.job, self.stages = job, stages
        self.params = [job.params_of((stage,))[0] for stage in stages]
        self._first_block, self._all, self._two_blocks = [], [], []
        weight_bytes = 1 if job.float8_gather else job.compute_bytes
        for stage in stages:
            blocks, root = [job.block_params(kind) for kind in stage.blocks], job.root_params(stage)
            # parameters of the first block and the embedding: the last gradients of a backward
            self._first_block.append(blocks[0] + root * stage.first)
            # bytes of all weights, and of the largest two blocks; the ends are never gathered in float8
            self._all.append(weight_bytes * sum(blocks) + job.compute_bytes * root)
            self._two_blocks.append(weight_bytes * sum(sorted(blocks)[-2:]) + job.compute_bytes * root)

    def gradients(self, instant: PipelineInstant) -> float:
        """Gradients that wait for the last backward of their stage."""
        unreduced = sum(self.params[i] for i in instant.unreduced)
        return self.job.full_bytes * (unreduced - self._first_block[instant.stage] * instant.first_backward)

    def weights(self, instant: PipelineInstant) -> float:
        """Gathered weights."""
        if not self.job.uses_fsdp:
            return 0.0
        if self.job.reshard != "always":
            return sum(sorted(self._all)[-MAX_GATHERED_STAGES:])
        at_work = 0.0 if instant.stage in instant.unfreed else self._two_blocks[instant.stage]
        return at_work + sum(self._all[i] for i in instant.unfreed)


def _peak_with_reuse(job: Job, parts: dict[str, float]) -> dict[str, float]:
    """FSDP whose reduced gradients take freed activations' memory (``parallel.fsdp_reuse_memory``)."""
    # while they are reduced, gradients of the model's ends exist in the compute dtype and as float32 sums
    ends = (job.compute_bytes + job.full_bytes) * sum(map(job.root_params, job.stages_of(0)))
    start = parts | {"gradients": 0.0}
    end = parts | {"activations": 0.0, "logits": 0.0, "recompute peak": 0.0, "unsharded gradients": ends}
    return _fullest((start, end))


def _peak_of_one_data_rank(job: Job, parts: dict[str, float]) -> dict[str, float]:
    """No FSDP: the backward's start, with gradients of earlier forwards alone, or its end, with all gradients."""
    summed = job.accumulation > 1
    start = parts | {"gradients": parts["gradients"] if summed else 0.0}
    end = parts | {"activations": 0.0, "logits": 0.0, "recompute peak": 0.0}
    if job.software.weights == "masters":
        if not summed and not job.software.sums_gradients:  # our optimizer's kernel reads the backward's own gradients
            end["gradients"] *= job.compute_bytes / job.full_bytes
    else:
        # autocast: bf16 copies of embedding and head, and their gradients, live through the step
        start["gathered weights"] = 4 * job.shape.local_root(job.mesh.tp)
    return _fullest((start, end))
