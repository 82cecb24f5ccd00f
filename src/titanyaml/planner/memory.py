"""Peak memory of a rank by part (bytes): what CUDA's allocator will have reserved.

The peak is at the start of the backward pass, or, on one data rank, where it ends. Under FSDP gradients count in full
at that peak: what a reduce-scatter returns lives in another stream's pool, which does not reuse freed activations. With
a pipeline the value is a lower bound: cached, fragmented blocks of many microbatches are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titanyaml.planner import constants
from titanyaml.planner.inputs import Job
from titanyaml.planner.operators import float8

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
    """Of the fullest rank."""
    mesh, ranks = job.mesh, job.layers_of_ranks
    if mesh.pp == 1:
        parts = _parts(job, ranks[0], rank=0)
        return Memory(parts, [sum(parts.values())])
    per_rank = [_parts(job, layers, rank=rank) for rank, layers in enumerate(ranks)]
    sums = [sum(parts.values()) for parts in per_rank]
    return Memory(per_rank[sums.index(max(sums))], sums, lower_bound=True)


def saved_per_token(job: Job, *, mode: str | None = None) -> float:
    """Bytes that a block keeps of a token for its backward pass, on one rank.

    Compiled blocks keep inputs of products and what the partitioner does not recompute; with float8 it recomputes
    norms, product and casts. Under sequence parallelism everything is a tp-th.
    """
    shape, b = job.shape, job.compute_bytes
    d, q, k, f = shape.dim, shape.query_dim, shape.kv_dim, shape.ffn_dim
    wide = 3 if shape.gated else 2
    everything = {True: 2 * d + 2 * q + 2 * k + (wide - 1) * f, False: 4 * d + 2 * q + 2 * k + wide * f}[float8(job)]
    # eager kernels keep one more copy of each norm's input and of the activation's output
    everything += 0 if job.compiled else 2 * d + f
    first, second = (q + k, f) if job.software.keeps_even is False else (k + d, f)
    some = d + q + first + second + (0 if job.compiled else 2 * d)
    if job.mesh.cp > 1 and not job.software.keeps_exchanged:
        some += 2 * q  # attention's outputs of each part, not only of the whole
    elif job.mesh.cp > 1 and job.cp_method == "ulysses":
        some += 2 * q + k  # what was exchanged: queries, keys, values, output; the product of keys need not be kept
    mode = mode or job.ac
    elements = {"none": everything, "full": d, "selective_op": some,
                "selective_layer": (d + (job.ac_every - 1) * everything) / job.ac_every,
                # the compiler's own estimate, on H200: a budget of 0.8 kept 0.63, of 0.5 0.32
                "memory_budget": d + job.ac_budget**2 * (everything - d)}[mode]
    return elements * b / job.mesh.tp + (0 if job.sequence_parallel else d * b * (1 - 1 / job.mesh.tp))


def _block_backward(job: Job) -> float:
    """Bytes alive while one block runs backward: the gradients of what it saved, that itself where a checkpoint fills
    it anew, and, under tp, nine tensors of whole sequences (gathered inputs, summands before and after scattering), of
    which fused transfers spare three."""
    whole = 0.0
    if job.mesh.tp > 1:
        whole = (9 - 1.5 * len(job.async_tp)) * job.shape.dim * job.compute_bytes
    # one graph frees as it goes: at a 3B's proportions it held 7 of 14.7 residual streams, on a CPU
    share = 2.0 if job.ac not in ("none", "memory_budget") else 0.5 if job.compiled else 1.0
    return job.tokens * (share * saved_per_token(job, mode="none") + whole)


def _loss(job: Job) -> tuple[float, float, float]:
    """(bytes of logits, bytes of the head's own gradients in a chunked loss, of these what the blocks' backward finds
    freed: the weight's is summed in float32, and then rounded)."""
    rows = job.shape.vocab_size / job.mesh.tp
    if not job.software.in_chunks:
        return _LOGIT[job.software.loss] * job.tokens * rows, 0.0, 0.0
    tokens = min(job.chunk_tokens, job.tokens)
    kept = 4 * rows * job.shape.dim + job.compute_bytes * job.tokens * job.shape.dim
    return _LOGIT[job.software.loss] * tokens * rows, kept, max(0, 4 - job.compute_bytes) * rows * job.shape.dim


def _parts(job: Job, layers: int, *, rank: int) -> dict[str, float]:
    mesh, shape = job.mesh, job.shape
    (first, last), pipe = job.ends_of(rank), mesh.pp > 1
    root = shape.local_root(mesh.tp) * ((first or last) if shape.tied or not pipe else 0.5 * (first + last))
    params = layers * shape.local_block(mesh.tp) + root
    logits, kept, freed = _loss(job) if last else (0.0, 0.0, 0.0)
    inflight = min(job.microbatches, mesh.pp - rank) if pipe else 1
    activations = layers * job.tokens * saved_per_token(job) * inflight
    if pipe and last and not job.software.in_chunks:  # bf16 logits of every microbatch are kept for the caller
        logits += 2 * (job.microbatches - 1) * job.tokens * shape.vocab_size / mesh.tp
    block = _block_backward(job)
    left = constants.TP_LEFTOVER.value * min(logits, block) if mesh.tp > 1 else 0.0
    parts = _states(job, params) | {
        "activations": activations,
        "recompute peak": max(0.0, block - logits - freed) + left,
        "logits": logits + kept,
        "gathered weights": _gathered(job, params, root, pipe=pipe),
        "allocator": constants.ALLOCATOR_GIB.value * GIB,
    }
    return _one_rank(job, parts, params) if mesh.shards * mesh.dp_replicate == 1 and not pipe else parts


def _states(job: Job, params: float) -> dict[str, float]:
    wide = max(4, job.compute_bytes)
    shard = params / job.mesh.shards
    return {"parameters": wide * shard, "gradients": wide * shard, "optimizer": job.moment_bytes * shard}


def _gathered(job: Job, params: float, root: float, *, pipe: bool) -> float:
    """Weights whole on this rank: the model's ends, three blocks and one block's gradients; under a pipeline all of a
    rank's blocks, with their gradients in float32."""
    if job.mesh.shards * job.mesh.dp_replicate == 1:
        return 0.0
    width = 1 if job.float8_gather else job.compute_bytes
    block = job.shape.local_block(job.mesh.tp)
    if pipe or job.reshard == "never":
        return params * (width + (4 if pipe else 0)) + (0 if pipe else 6 * block)
    return job.software.root_copies * root + block * (3 * width + job.compute_bytes + 4)


def _one_rank(job: Job, parts: dict[str, float], params: float) -> dict[str, float]:
    """No FSDP. The larger of two moments: all activations and no gradient, or no activation and all gradients."""
    masters = job.software.weights == "masters" and job.compute_bytes < 4
    early, late = parts | {"gradients": 0.0}, dict(parts)
    if masters:
        summed = 4 if job.accumulation > 1 else 0
        for moment in (early, late):
            moment |= {"parameters": 2 * params, "optimizer": (job.master_bytes + job.moment_bytes) * params}
        late["gradients"] = (2 + summed) * params
        early["gradients"] = summed * params
    else:  # bf16 copies of embedding and head, and their gradients, live through the step
        early["gathered weights"] = 4 * job.shape.local_root(job.mesh.tp)
    late |= {"activations": 0.0, "logits": 0.0, "recompute peak": 0.0}
    return max(early, late, key=lambda moment: sum(moment.values()))
