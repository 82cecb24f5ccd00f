"""Peak memory of a rank by part (bytes): what CUDA's allocator will have reserved.

The peak is at the start of the backward pass, or, on one data rank, where it ends. Under FSDP gradients count in full
at that peak: what a reduce-scatter returns lives in another stream's pool, which does not reuse freed activations. With
a pipeline it is the fullest of the moments of ``moments.py``, and a lower bound: cached, fragmented blocks of many
microbatches are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titanyaml.planner.model import constants, experts
from titanyaml.planner.model import in_flight as moments_of
from titanyaml.planner.model.in_flight import ACTIVE, Moment
from titanyaml.planner.model.inputs import Job, Stage
from titanyaml.planner.model.operators import CHEAP_BUDGET, float8, keeps_norms, repeats_attention
from titanyaml.planner.model.shape import Block

GIB = 2**30
#: What pipelines were seen to need over the bound that their memory is planned with.
_PIPELINE = 1.28
#: Bytes of a logit that are alive at one time.
_LOGIT = {"plain": 14.0, "compiled": 4.0, "chunked": 10.0, "fused": 2.0}


@dataclass(frozen=True)
class Memory:
    """parts: bytes of the fullest rank. stages: its sum for each pipeline rank. lower_bound: more may be needed."""

    parts: dict[str, float]
    stages: list[float] = field(default_factory=list)
    lower_bound: bool = False

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())

    @property
    def with_margin(self) -> float:
        """Bytes to make room for: a lower bound is exceeded by what pipelines were seen to need over it."""
        return self.total * (_PIPELINE if self.lower_bound else 1.0)


def plan_memory(job: Job) -> Memory:
    """Of the fullest rank; ``selective_op`` keeps every second product here. ``kept.plan_memory`` knows any share."""
    assert job.ac != "selective_op" or job.ac_keep == Job.ac_keep, job.ac_keep
    if job.mesh.pp == 1:
        parts = _parts(job, rank=0)
        return Memory(parts, [sum(parts.values())])
    per_rank = [_parts(job, rank=rank) for rank in range(job.mesh.pp)]
    sums = [sum(parts.values()) for parts in per_rank]
    return Memory(per_rank[sums.index(max(sums))], sums, lower_bound=True)


def saved_per_token(job: Job, block: Block, *, mode: str | None = None) -> float:
    """Bytes that a block keeps of a token for its backward pass, on one rank: its output and what its operators keep,
    but for its input, which is the output of the block before.

    Numbers of a head or a row (log-sum-exps, roots of norms) are left to ``live.py``: what is reserved has them in its
    fitted constant. Compiled blocks keep inputs of products and what the partitioner does not recompute; with float8 it
    recomputes norms, product and casts. Under sequence parallelism everything is a tp-th, but what is gathered for
    attention and feed-forward, and what the output projection gives before it is scattered.
    """
    shape, b, tp = job.shape, job.compute_bytes, job.mesh.tp
    d, q, k, f = shape.dim, shape.query_dim, shape.kv_dim, shape.width(block)
    apart, eager = tp > 1 and job.sequence_parallel, not job.compiled
    even, cp = job.software.keeps_even, job.mesh.cp > 1
    stream = d if not tp > 1 or apart else 0  # what of the residual stream is a tp-th
    whole = d - stream
    modes = {"full": stream / tp + whole}
    # two of the stream and two of its norms (not with float8); eager kernels keep the activation's output too, and
    # norms in pieces what they read
    streams, wide = 2 if float8(job) else 4, (3 if shape.gated else 2) - float8(job) + eager
    pieces = 2 * d * (eager and not job.software.fused_norms)
    modes["none"] = (streams * stream + pieces + 2 * q + 2 * k + wide * f) / tp + streams * whole
    modes["none"] += (1 + (f > 0)) * d * (1 - 1 / tp) * apart  # what entered attention and feed-forward
    # products that are kept: wk, wo, w3, or wq, wv, w1 and, eager, w2. Where what is scattered is kept too, a compiled
    # block keeps that of wo alone; an eager one wo's whole output as well, and what w2's becomes
    scatters = apart and job.software.keeps_scattered
    out = d / tp if job.compiled else d + 2 * d / tp * scatters
    modes["selective_op"] = (stream + (k if even else q + k) + f) / tp + whole + out * even
    modes["selective_op"] += 2 * d / tp * (eager and not even)
    modes["selective_op"] += q / tp
    if cp and not job.software.keeps_exchanged:
        modes["selective_op"] += 2 * q / tp  # attention's outputs of each part, not only of the whole
    elif cp and job.cp_method == "ulysses":
        # what was exchanged: queries, keys, values, output; the product of keys need not be kept
        modes["selective_op"] += (2 * q + k) / tp
    if block.mixture:
        modes["none"] += experts.saved(job)
        modes["selective_op"] += experts.kept(job)
    low, high = modes["full"], modes["none"]
    modes["selective_layer"] = (low + (job.ac_every - 1) * high) / job.ac_every
    cheap = (f + q * repeats_attention(job, block)) / tp if keeps_norms(job) else (2 * stream + f) / tp + 2 * whole
    modes["memory_budget"] = _budgeted(job, low, high, cheap=0 if float8(job) else cheap)
    kept = modes[mode or job.ac]
    if job.own_float8 and job.quant != "float8_rowwise_with_gw_hp" and (mode or job.ac) in ("none", "memory_budget"):
        kept += (2 * d + (q + f) / tp) / b  # our own products keep, turned and in float8, what they read
    return b * kept


def _budgeted(job: Job, low: float, high: float, *, cheap: float) -> float:
    """Elements that the compiler keeps of a token under ``ac.budget``. A budget of 0.8 costs norms and product alone
    (3B on an H200: 12.2 GiB of 38.5); one of 0.5 was seen to keep 0.32."""
    return high - cheap if job.ac_budget >= CHEAP_BUDGET else low + job.ac_budget**2 * (high - low)


def _block_backward(job: Job, block: Block) -> float:
    """Bytes alive while one block runs backward: the gradients of what it saved, that itself where a checkpoint fills
    it anew, and, under tp, nine tensors of whole sequences (gathered inputs, summands before and after scattering), of
    which fused transfers spare three; our own blocks free them as they go."""
    if job.mesh.tp > 1 and job.software.frees_early and not block.mixture:
        summed = job.mesh.token_degree == 1 and job.software.sums_gradients
        return job.tokens * saved_per_token(job, block, mode="none") + gradients_at_work(
            job, block, width=wide(job) if summed else job.compute_bytes
        )
    # one graph frees as it goes: at a 3B's proportions it held 7 of 14.7 residual streams, on a CPU
    share = 2.0 if job.ac not in ("none", "memory_budget") else 0.5 if job.compiled else 1.0
    whole = 0.0
    if job.mesh.tp > 1:
        # of which what is saved has two
        gathered = share * 2 * (1 - 1 / job.mesh.tp) * job.sequence_parallel
        whole = (9 - 1.5 * len(job.async_tp) - gathered) * job.shape.dim * job.compute_bytes
    saved = saved_per_token(job, block, mode="none")
    return job.tokens * (share * saved + whole)


def gradients_at_work(job: Job, block: Block, *, width: int) -> float:
    """Bytes of gradients in a dense block's backward where they are most: of gate, up and product, of which the product
    itself makes room for one; and, at ``width`` bytes a number, of the feed-forward's last matrix, which comes first.
    What the block's output needed is that of the gradient that comes in."""
    features = job.shape.width(block) / job.mesh.tp
    return features * (2 * job.tokens * job.compute_bytes + width * job.shape.dim)


def _loss(job: Job) -> tuple[float, float, float]:
    """(bytes of logits, bytes of the head's own gradients in a chunked loss, of these what the blocks' backward finds
    freed: the weight's is summed in float32, and then rounded)."""
    rows = job.shape.vocab_size / job.mesh.tp
    if not job.software.in_chunks:
        return _LOGIT[job.software.loss] * job.tokens * rows, 0.0, 0.0
    tokens = min(job.chunk_tokens, job.tokens)
    kept = 4 * rows * job.shape.dim + job.compute_bytes * job.tokens * job.shape.dim
    # over tp, the next chunk's logits are formed while numbers of this one travel
    buffers = 2 if job.software.loss == "fused" and job.mesh.tp > 1 and tokens < job.tokens else 1
    logits = _LOGIT[job.software.loss] * tokens * rows * buffers
    return logits, kept, max(0, 4 - job.compute_bytes) * rows * job.shape.dim


def stream_buffers(job: Job, stages: tuple[Stage, ...]) -> float:
    """Bytes into which torch's pipeline stages receive: one buffer for each microbatch and neighbour."""
    stream = job.slice_tokens * job.shape.dim * job.compute_bytes
    return job.microbatches * sum(stage.neighbours for stage in stages) * stream


def _parts(job: Job, *, rank: int) -> dict[str, float]:
    stages = job.stages_of(rank)
    if job.mesh.pp > 1:
        return _fullest(job, stages, rank=rank)
    blocks = stages[0].blocks
    logits, kept, freed = _loss(job)
    block = max(_block_backward(job, one) for one in set(blocks))
    parts = states(job, stages) | {
        "activations": saved_by(job, stages[0]) + _float8_weights(job, blocks),
        "recompute peak": max(0.0, block - logits - freed) + _left(job, logits, block),
        "logits": logits + kept,
        "gathered weights": _gathered(job, stages),
        "allocator": _allocator(job) * GIB,
    }
    if job.mesh.token_degree == 1:
        return _one_rank(job, parts)
    return _reusing(job, parts) if job.reuses else parts


def _fullest(job: Job, stages: tuple[Stage, ...], *, rank: int) -> dict[str, float]:
    """A pipeline rank at its fullest moment. Over its stages the forwards that it holds count alike."""
    blocks = [block for stage in stages for block in stage.blocks]
    logits, kept, freed = _loss(job)
    handed = 2 * job.tokens * job.shape.vocab_size / job.mesh.tp * (not job.software.in_chunks)  # kept for the caller
    saved = sum(saved_by(job, stage) for stage in stages) / len(stages)
    weights8, work = (
        _float8_weights(job, blocks),
        [max(_block_backward(job, one) for one in set(stage.blocks)) for stage in stages],
    )
    fixed, transfers = states(job, stages), Transfers(job, stages)
    fixed |= {"allocator": _allocator(job) * GIB, "stream buffers": stream_buffers(job, stages)}
    found = []
    for moment in moments_of.moments(job, rank):
        block, at_loss = work[moment.stage], stages[moment.stage].last and not moment.ends
        gradients = transfers.gradients(moment)
        parts = fixed | {
            "activations": moment.held * saved + weights8,
            "recompute peak": max(0.0, block - (logits + freed) * at_loss) + _left(job, logits, block) * at_loss,
            "logits": at_loss * (logits + kept) + stages[-1].last * handed * moment.outputs,
            "gathered weights": transfers.weights(moment),
            "unsharded gradients": gradients,
        }
        if job.mesh.token_degree == 1:  # nothing is sharded: they stay as they grow
            reduced = sum(transfers.sizes[i] for i in moment.reduced)
            parts |= {"gradients": gradients + wide(job) * reduced, "unsharded gradients": 0.0}
        found.append(parts)
    return max(found, key=lambda parts: sum(parts.values()))


def _allocator(job: Job) -> float:
    """GiB reserved beyond what is in use. Where FSDP or autocast copy weights on streams of their own, blocks are kept
    for each stream; where one stream computes on weights that stay, there are workspaces and rounded blocks alone
    (H200: 0.04 to 0.8 GiB between what was reserved and what was active)."""
    one_stream = job.mesh.token_degree * job.mesh.pp == 1 and job.software.weights == "masters"
    return 0.4 if one_stream else constants.ALLOCATOR_GIB.value


def _left(job: Job, logits: float, block: float) -> float:
    """Bytes of the smaller of loss and block that the larger one cannot reuse, under tp."""
    return constants.TP_LEFTOVER.value * min(logits, block) if job.mesh.tp > 1 else 0.0


def _float8_weights(job: Job, blocks: Sequence[Block]) -> float:
    """Bytes of the weights in float8 that blocks keep for their backward passes."""
    if not job.keeps_float8_weights or job.ac not in ("none", "memory_budget"):
        return 0.0
    return _linear_weights(job, blocks)


def _linear_weights(job: Job, blocks: Sequence[Block]) -> float:
    """Numbers in the weights of the linear layers of blocks, on a tp rank."""
    return sum(one.inputs * one.outputs for block in blocks for one in job.shape.linears_of(block)) / job.mesh.tp


def saved_by(job: Job, stage: Stage) -> float:
    """Bytes that a stage keeps of one microbatch."""
    return job.tokens * sum(saved_per_token(job, block) * stage.blocks.count(block) for block in set(stage.blocks))


def wide(job: Job) -> int:
    """Bytes of a parameter in full precision, and of its summed gradient."""
    return max(4, job.compute_bytes)


def states(job: Job, stages: tuple[Stage, ...]) -> dict[str, float]:
    """Parameters, gradients, optimizer of a rank. One data rank stores the parameters as it computes, its optimizer the
    wide ones; gradients are summed wide. Shards are wide, but with split masters: then they are as one data rank's, and
    so is the gradient of a single backward pass, which FSDP rounds."""
    full, narrow = wide(job), job.compute_bytes
    every, held = job.params_of(stages)
    alone = job.mesh.token_degree == 1
    if alone and job.software.weights == "masters":
        masters = job.master_bytes * (narrow < 4)
        return {
            "parameters": narrow * every,
            "gradients": full * every,
            "optimizer": (masters + job.moment_bytes) * every,
        }
    if job.own_float8 and job.float8_gather:  # a copy of each shard in float8, which is what is gathered
        copies = sum(_linear_weights(job, stage.blocks) for stage in stages) / job.mesh.size("shard")
        return {"parameters": full * held + copies, "gradients": full * held, "optimizer": job.moment_bytes * held}
    if job.master_bytes == 2 and narrow == 2:
        summed = job.accumulation * job.microbatches > 1 or job.software.sums_gradients
        return {
            "parameters": narrow * held,
            "gradients": (full if summed else narrow) * held,
            "optimizer": (job.master_bytes + job.moment_bytes) * held,
        }
    return {"parameters": full * held, "gradients": full * held, "optimizer": job.moment_bytes * held}


def _gathered(job: Job, stages: tuple[Stage, ...]) -> float:
    """Weights whole on this rank: the model's ends, three blocks and one block's gradients. Gathering in float8 was
    seen to save nothing where blocks come and go (8B on 8 H100: 77.0 and 76.8 GiB; 3B on two H200: 53.3 twice)."""
    if job.mesh.token_degree == 1:
        return 0.0
    block = max(sum(size for _, size in job.groups(one)) for stage in stages for one in stage.blocks)
    if job.reshard == "never":
        return job.params_of(stages)[0] * job.compute_bytes + 6 * block
    root = sum(map(job.root, stages))
    return job.software.root_copies * root + block * (4 * job.compute_bytes + 4)


class Transfers:
    """What is whole on a pipeline rank, in bytes.

    A backward of torch's stages leaves the weights that it gathered, and adds gradients up in float32 until the last
    one reduces them. With ``always`` a forward frees its weights, block by block: then what is there are those of
    backwards that no forward came after, and two blocks at work.

    Args:
        job: with pp. stages: of the rank.
    """

    def __init__(self, job: Job, stages: tuple[Stage, ...]) -> None:
        self.job, self.stages = job, stages
        narrow = 1 if job.float8_gather else job.compute_bytes
        self.sizes = [job.params_of((stage,))[0] for stage in stages]
        blocks = [[sum(size for _, size in job.groups(one)) for one in stage.blocks] for stage in stages]
        roots = [job.compute_bytes * job.root(stage) for stage in stages]
        self._first = [sizes[0] + job.root(stage) * stage.first for stage, sizes in zip(stages, blocks, strict=True)]
        self._whole = [narrow * sum(sizes) + root for sizes, root in zip(blocks, roots, strict=True)]
        self._passing = [narrow * sum(sorted(sizes)[-2:]) + root for sizes, root in zip(blocks, roots, strict=True)]

    def gradients(self, moment: Moment) -> float:
        """Those that wait for the last backward of their stage."""
        grown = sum(self.sizes[i] for i in moment.grown) - self._first[moment.stage] * moment.fresh
        return wide(self.job) * grown

    def weights(self, moment: Moment) -> float:
        """Those gathered."""
        if self.job.mesh.token_degree == 1:
            return 0.0
        if self.job.reshard != "always":
            return sum(sorted(self._whole)[-ACTIVE:])
        passing = 0.0 if moment.stage in moment.idle else self._passing[moment.stage]
        return passing + sum(self._whole[i] for i in moment.idle)


def _reusing(job: Job, parts: dict[str, float]) -> dict[str, float]:
    """FSDP whose gradients take freed activations' memory. The larger of two moments: all activations and no gradient,
    or no activation, all gradients, and those of the model's ends on their way: narrow, and as they are summed."""
    ends = (job.compute_bytes + wide(job)) * sum(map(job.root, job.stages_of(0)))
    early = parts | {"gradients": 0.0}
    late = parts | {"activations": 0.0, "logits": 0.0, "recompute peak": 0.0, "unsharded gradients": ends}
    return max(early, late, key=lambda moment: sum(moment.values()))


def _one_rank(job: Job, parts: dict[str, float]) -> dict[str, float]:
    """No FSDP. The larger of two moments: all activations and no gradient but the sums of earlier forwards, or no
    activation and all gradients. One backward pass a step sums nothing up, where the optimizer's kernel is ours."""
    summed = job.accumulation > 1
    early = parts | {"gradients": parts["gradients"] * summed}
    late = parts | {"activations": 0.0, "logits": 0.0, "recompute peak": 0.0}
    if job.software.weights == "masters":
        if not summed and not job.software.sums_gradients:
            late["gradients"] *= job.compute_bytes / max(4, job.compute_bytes)
    else:  # bf16 copies of embedding and head, and their gradients, live through the step
        early["gathered weights"] = 4 * job.shape.local_root(job.mesh.tp)
    return max(early, late, key=lambda moment: sum(moment.values()))
