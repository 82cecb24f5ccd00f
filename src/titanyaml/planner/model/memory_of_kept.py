"""Memory under ``ac.keep_products``: what ``memory.py``, which knows every second product, has to be told of others."""

from __future__ import annotations

from dataclasses import replace

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import memory
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import Memory
from titanyaml.planner.model.operators import redone


def plan_memory(job: Job) -> Memory:
    """``memory.plan_memory``, for any share of kept products.

    Under ``selective_layer`` blocks keep everything, or their input. A share of them between whole blocks is that which
    keeps as many bytes: all else of the two modes is the same.
    """
    if job.ac != "selective_op" or job.ac_keep == Job.ac_keep:
        return memory.plan_memory(job)
    plain = replace(job, own_float8=False)  # whose kept inputs are no part of what ``selective_layer`` mixes
    all_of, spared = 0.0, 0.0
    for rank in range(job.mesh.pp):
        blocks = [block for stage in job.stages_of(rank) for block in stage.blocks]
        for block, keeps in zip(blocks, kept_matmuls.block_levels(job.ac_keep, blocks=len(blocks)), strict=True):
            most = memory.saved_per_token(plain, block, mode="none")
            all_of += most - memory.saved_per_token(plain, block, mode="full")
            spared += most - saved_per_token(job, block, keeps)
    return memory.plan_memory(replace(job, ac="selective_layer", ac_every=all_of / (spared or 1e-9 * all_of)))


def saved_per_token(job: Job, block: BlockKind, keeps: int) -> float:
    """``memory.saved_per_token`` under ``selective_op`` of a block that keeps so many of its products."""
    half = memory.saved_per_token(job, block, mode="selective_op")
    if keeps == kept_matmuls.HALF:
        return half
    sizes = _sizes(job, block)
    repeated = {level: {*redone(job, block, level)} for level in (keeps, kept_matmuls.HALF)}
    more = repeated[kept_matmuls.HALF] - repeated[keeps]
    less = repeated[keeps] - repeated[kept_matmuls.HALF]
    return half + job.compute_bytes * (sum(sizes[name] for name in more) - sum(sizes[name] for name in less))


def _sizes(job: Job, block: BlockKind) -> dict[str, float]:
    """Elements of a token that each product gives on this rank. What a compiled block keeps of wo's under tp is what
    was scattered, which it keeps anyway."""
    shape, tp = job.shape, job.mesh.tp
    apart = tp > 1 and job.sequence_parallel
    sizes = {one.name: one.outputs / tp if one.column else float(one.outputs) for one in shape.linears_of(block)}
    if job.compiled:
        sizes["wo"] = 0.0 if apart and job.software.keeps_scattered else shape.dim / tp
    if block.mixture:
        share = 1 / tp if job.sequence_parallel else 1.0
        rows = share * shape.mixture.top_k
        wide = max(4, job.compute_bytes) / job.compute_bytes
        sizes |= {
            "router": share * wide * shape.mixture.num_experts,
            "experts.w1": rows * shape.mixture.ffn_dim,
            "experts.w3": rows * shape.mixture.ffn_dim,
            "experts.w2": rows * shape.dim,
        }
    return sizes
