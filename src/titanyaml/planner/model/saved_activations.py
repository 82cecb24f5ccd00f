"""Bytes that blocks save of a token for their backward pass, on one rank.

Symbols: d width of the residual stream, q and k features of all query and of all key heads, f inner width of the
feed-forward, b bytes of the compute dtype. Under sequence parallelism a tensor of the stream is d/tp elements of a
token, else d.

A block's output counts, its input does not: that is the output of the block before. Log-sum-exps of attention and
roots of norms (a few floats per head or token) are left out; the fitted constant of what is reserved contains them.
The rules were read off traces of the real pipeline, and tests hold them against such traces within 2 %.
"""

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import experts, operators
from titanyaml.planner.model.inputs import Job


def saved_per_token(job: Job, block: BlockKind, *, mode: str = "", level: int = kept_matmuls.HALF) -> float:
    """Bytes that a block saves of a token under a ``mode`` of activation checkpointing ("": the job's).

    ``level`` says which GEMM outputs ``selective_op`` keeps: none, half (every second) or all.
    """
    mode = mode or job.ac
    if mode == "full":
        elements = _stream(job)
    elif mode == "selective_layer":
        elements = _mean(_stream(job), _all_elements(job, block), job.ac_every)
    elif mode == "memory_budget":
        elements = _budget_elements(job, block)
    elif mode == "selective_op":
        elements = _half_elements(job, block) + _beyond_half(job, block, level)
    else:
        elements = _all_elements(job, block)
    if mode in ("none", "memory_budget") and job.own_float8 and job.quant != "float8_rowwise_with_gw_hp":
        # our float8 GEMMs save their inputs, one byte an element, in the layout that the weight's gradient reads
        split_inputs = (job.shape.query_dim + job.shape.width(block)) / job.mesh.tp
        elements += (2 * job.shape.dim + split_inputs) / job.compute_bytes
    return job.compute_bytes * elements


def saved_by_kind(job: Job) -> dict[BlockKind, float]:
    """Bytes that a block of each kind saves of a token, on average over all blocks of the decoder.

    ``ac.keep_products`` deals levels out to the blocks of each pipeline rank. Memory takes every block at the same
    point between no checkpointing and full checkpointing: the one at which all blocks together save as much.
    """
    kinds = set(job.shape.blocks)
    if job.ac != "selective_op" or job.ac_keep == Job.ac_keep:  # half of the outputs: every block has the same level
        return {block: saved_per_token(job, block) for block in kinds}
    without_ac = {block: job.compute_bytes * _all_elements(job, block) for block in kinds}
    checkpointed = job.compute_bytes * _stream(job)
    span = spared = 0.0
    for rank in range(job.mesh.pp):
        blocks = [block for stage in job.stages_of(rank) for block in stage.blocks]
        for block, level in zip(blocks, kept_matmuls.block_levels(job.ac_keep, blocks=len(blocks)), strict=True):
            span += without_ac[block] - checkpointed
            spared += without_ac[block] - saved_per_token(job, block, level=level)
    period = span / (spared or 1e-9 * span)  # nothing is spared where all outputs are small, or kept anyway
    return {block: _mean(checkpointed, without_ac[block], period) for block in kinds}


def _mean(checkpointed: float, without_ac: float, period: float) -> float:
    """Mean over blocks of which one in ``period`` is checkpointed and the others are not."""
    return (checkpointed + (period - 1) * without_ac) / period


def _stream(job: Job) -> float:
    """Elements of one tensor of the residual stream, such as a block's output."""
    return job.shape.dim / job.mesh.tp if job.slices_stream else float(job.shape.dim)


def _all_elements(job: Job, block: BlockKind) -> float:
    """Without activation checkpointing."""
    shape, tp, eager = job.shape, job.mesh.tp, not job.compiled
    d, q, k, f = shape.dim, shape.query_dim, shape.kv_dim, shape.width(block)
    # the stream after attention and after the feed-forward, and the norms of both. Under float8, the compiler's
    # partitioner recomputes norms, the product of gate and up, and casts
    streams = (2 if job.uses_float8 else 4) * _stream(job)
    inner = (3 if shape.gated else 2) - job.uses_float8  # gate, up, product
    inner += eager  # eager kernels save the activation's output too
    elements = streams + (2 * q + 2 * k + inner * f) / tp
    if eager and not job.software.fused_norms:
        elements += 2 * d / tp  # a norm in pieces saves what it reads in float32
    if job.slices_stream:
        entries = 1 + (f > 0)
        elements += entries * d * (1 - 1 / tp)  # gathered inputs, beyond the slice that is a norm's output
    return elements + (experts.saved(job) if block.mixture else 0.0)


def _half_elements(job: Job, block: BlockKind) -> float:
    """Under ``selective_op`` with every second GEMM output (wk, wo, w3 or wq, wv, w1, w2), and attention's output."""
    shape, tp, software = job.shape, job.mesh.tp, job.software
    d, q, k, f = shape.dim, shape.query_dim, shape.kv_dim, shape.width(block)
    elements = _stream(job) + q / tp
    if software.keeps_even:
        elements += (k + f) / tp + _kept_wo(job)
    else:
        elements += (q + k + f) / tp
        if not job.compiled:
            # w2's output is cached though no gradient reads it. Twice its size is too much for the one row that shows
            # it (8B eager on 8 H100: +3.7 %)
            elements += 2 * d / tp
    if job.mesh.cp > 1 and not software.keeps_exchanged:
        elements += 2 * q / tp  # outputs of attention's parts, not only of the whole
    elif job.mesh.cp > 1 and job.cp_method == "ulysses":
        elements += (2 * q + k) / tp  # exchanged queries, keys, values, output; the GEMM's own keys need not be kept
    return elements + (experts.saved_by_half(job) if block.mixture else 0.0)


def _kept_wo(job: Job) -> float:
    """Elements of wo's output. Where tp ranks keep what they reduce-scatter, a compiled block saves that in its place;
    an eager one saves wo's whole output, what became of it, and what became of w2's."""
    d, tp = job.shape.dim, job.mesh.tp
    return d / tp if job.compiled else d + 2 * d / tp * (job.slices_stream and job.software.keeps_scattered)


def _beyond_half(job: Job, block: BlockKind, level: int) -> float:
    """Elements that a block saves more (or less) at another level than at half."""
    if level == kept_matmuls.HALF:
        return 0.0
    sizes = _output_sizes(job, block)
    repeated, repeated_by_half = (set(operators.recomputed(job, block, at)) for at in (level, kept_matmuls.HALF))
    more = sum(sizes[name] for name in repeated_by_half - repeated)
    return more - sum(sizes[name] for name in repeated - repeated_by_half)


def _output_sizes(job: Job, block: BlockKind) -> dict[str, float]:
    """Elements of each GEMM's output on this rank."""
    shape, tp = job.shape, job.mesh.tp
    linears = shape.linears_of(block)
    sizes = {linear.name: linear.outputs / tp if linear.column else float(linear.outputs) for linear in linears}
    if job.compiled:  # wo's scattered output is saved at every level
        sizes["wo"] = 0.0 if job.slices_stream and job.software.keeps_scattered else shape.dim / tp
    if block.mixture:
        moe, token_share = shape.experts, experts.token_share(job)
        rows = token_share * moe.top_k
        sizes["router"] = token_share * job.full_bytes / job.compute_bytes * moe.num_experts
        sizes |= {"experts.w1": rows * moe.ffn_dim, "experts.w3": rows * moe.ffn_dim, "experts.w2": rows * shape.dim}
    return sizes


def _budget_elements(job: Job, block: BlockKind) -> float:
    """Under a compiler's ``ac.budget``."""
    checkpointed, without_ac = _stream(job), _all_elements(job, block)
    if job.ac_budget < operators.CHEAP_BUDGET:
        # 3B on an H200: a budget of 0.5 kept 0.32 of the activations
        return checkpointed + job.ac_budget**2 * (without_ac - checkpointed)
    if job.uses_float8:  # what is cheap is recomputed without a budget too
        return without_ac
    shape, tp = job.shape, job.mesh.tp
    f = shape.width(block)
    if job.slices_stream:
        attention = shape.query_dim if operators.repeats_attention(job, block) else 0
        return without_ac - (f + attention) / tp
    # norms and the product of gate and up are recomputed: 12.2 GiB of 38.5 with 3B on an H200. Without sequence
    # parallelism tp ranks hold whole norms, while f is a tp-th
    return without_ac - (2 * _stream(job) + f / tp)
