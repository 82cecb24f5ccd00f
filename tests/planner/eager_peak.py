"""Bytes alive at the peak of an eager program: exact, as ``tests/memory_trace.py`` counts them.

``planner/model/memory.py`` says what CUDA's allocator will have reserved for a compiled program: streams do not share
freed memory, and blocks stay cached. Here a byte counts while something refers to it. The peak is at the loss, when
every activation is there, or in the backward of a block, when its own activations and those before it are there, and
the gradients of those after it. Within a block it is where the gradients of gate, up and their product meet.
"""

from __future__ import annotations

import itertools

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import experts, in_flight, memory
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.saved_activations import saved_per_token

Parts = dict[str, float]


def eager_peak(job: Job, *, rank: int = 0) -> tuple[str, Parts]:
    """(what runs, bytes by part) at the peak of a pipeline rank."""
    instants = _Program(job, rank).instants()
    name = max(instants, key=lambda name: sum(instants[name].values()))
    return name, instants[name]


def saved_bytes(job: Job, block: BlockKind, *, mode: str = "", level: int = kept_matmuls.HALF) -> float:
    """Bytes that a block saves of one microbatch: as planned, and a float32 per query (log-sum-exp) and norm (root)."""
    floats = 4 * job.shape.num_heads / job.mesh.tp + 8 if (mode or job.ac) in ("none", "selective_op") else 0.0
    return job.tokens * (saved_per_token(job, block, mode=mode, level=level) + floats)


class _Program:
    """The stages of one rank, and what of them is alive when."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.stages = job, rank, job.stages_of(rank)
        self.blocks = [block for stage in self.stages for block in stage.blocks]
        # bytes of a parameter's gradient before reduction
        self.gradient_bytes = job.compute_bytes if job.uses_fsdp else job.full_bytes
        levels = kept_matmuls.block_levels(job.ac_keep, blocks=len(self.blocks))
        self.saved = [saved_bytes(job, block, level=level) for block, level in zip(self.blocks, levels, strict=True)]
        self.saved_by_none = [saved_bytes(job, block, mode="none") for block in self.blocks]
        self.stream = job.slice_tokens * job.shape.dim * job.compute_bytes
        self.states = memory.states(job, self.stages)
        self.head = job.shape.table_params / job.mesh.tp

    def instants(self) -> dict[str, Parts]:
        """Bytes by part at every instant that may be the peak."""
        instants = self._pipeline() if self.job.mesh.pp > 1 else self._without_pipeline()
        fixed = {name: self.states[name] for name in ("parameters", "optimizer")}
        return {when: fixed | parts for when, parts in instants.items()}

    def _without_pipeline(self) -> dict[str, Parts]:
        activations = self.stream + sum(self.saved)
        transfers = self._gathered(len(self.blocks))
        instants = {"loss": {"activations": activations, "loss": self._loss(), "transfers": transfers}}
        for i in range(len(self.blocks)):
            instants[f"block {i}"] = {
                "activations": self.stream + sum(self.saved[:i]),
                "block": self._block_backward(i),
                "gradients": sum(map(self._gradients, self.blocks[i + 1 :])) + self.gradient_bytes * self.head,
                "transfers": self._gathered(i),
            }
        return instants

    def _pipeline(self) -> dict[str, Parts]:
        job, instants = self.job, {}
        first = any(stage.first for stage in self.stages)
        buffers, unsharded = memory.stream_buffers(job, self.stages), memory.UnshardedOnPipelineRank(job, self.stages)
        saved_by_forward = (sum(self.saved) + self.stream * first) / job.stages_per_rank
        starts = list(itertools.accumulate((len(stage.blocks) for stage in self.stages), initial=0))
        for number, instant in enumerate(in_flight.instants(job, self.rank)):
            block = starts[instant.stage] if instant.at_first_block else starts[instant.stage + 1] - 1
            gradients, weights = unsharded.gradients(instant), unsharded.weights(instant)
            reduced = [job.params_of((self.stages[i],))[job.uses_fsdp] for i in instant.reduced]
            gradients += job.full_bytes * sum(reduced)
            if instant.stage in instant.unreduced and not instant.first_backward:
                # w2's gradient before it is added up
                gradients -= (self.gradient_bytes - job.compute_bytes) * self._last_matrix(block)
            in_flight_bytes = instant.in_flight * saved_by_forward
            fixed = {"activations": in_flight_bytes, "transfers": weights, "buffers": buffers}
            work = self._block_backward(block)
            if not instant.at_first_block:
                work -= self.saved[block]  # counted among the forwards in flight
            instants[f"backward {number}"] = fixed | {"block": work, "gradients": gradients}
            if self.stages[instant.stage].last and not instant.at_first_block:
                at_loss = fixed | {"loss": self._loss(), "gradients": gradients}
                if job.reshard == "always" and instant.stage not in instant.unfreed:  # its forward has freed the blocks
                    root = job.root_params(self.stages[-1]) if job.uses_fsdp else 0.0
                    at_loss["transfers"] = job.compute_bytes * root
                instants[f"loss {number}"] = at_loss
        return instants

    def _loss(self) -> float:
        """The normed stream (gathered under tp), its gradient, and a chunk's logits with their float32 log-softmax.

        From the second chunk on there are the sum of the head's gradients, and the logits' gradient of the chunk
        before, which the loop has not let go of.
        """
        job = self.job
        chunk = min(job.chunk_tokens, job.tokens) * job.shape.vocab_size / job.mesh.tp
        logits, summed = 2 * job.full_bytes * chunk, job.full_bytes * self.head
        if job.chunk_tokens < job.tokens:
            logits += summed + job.compute_bytes * chunk
        else:
            logits = max(logits, (job.full_bytes + job.compute_bytes) * chunk + summed)
        hidden = job.tokens * job.shape.dim * job.compute_bytes
        normed = self.stream + hidden * (job.mesh.tp > 1 and job.sequence_parallel)
        return logits + hidden + normed

    def _gradients(self, block: BlockKind) -> float:
        """Gradients of a block whose backward is over, on this rank."""
        sharded = [params / self.job.mesh.size(axis) for axis, params in self.job.groups(block)]
        return self.job.full_bytes * (sum(sharded) if self.job.uses_fsdp else self.job.block_params(block))

    def _gathered(self, i: int) -> float:
        """FSDP's weights of the ends and of block ``i``, those of the block before on their way, and the gradients of
        the block after as they are reduced. At the loss (``i`` past the end): the last block's, there and on their way.
        """
        job = self.job
        if not job.uses_fsdp:
            return 0.0
        count, at_loss = len(self.blocks), i == len(self.blocks)
        unsharded = [job.block_params(block) for block in self.blocks]
        # what one rank alone shards is never gathered
        moving = [sum(params for axis, params in job.groups(block) if job.mesh.size(axis) > 1) for block in self.blocks]
        params = sum(map(job.root_params, self.stages))
        i = min(i, count - 1)
        if job.reshard == "never":
            params += sum(unsharded)
        else:
            params += unsharded[i] + (moving[i] if at_loss else moving[i - 1] if i else 0.0)
        reduced = unsharded[i + 1] if not at_loss and i + 1 < count else 0.0
        return job.compute_bytes * params + job.full_bytes * reduced

    def _block_backward(self, i: int) -> float:
        """All that a block saves, or has computed again, and its gradients."""
        job, block = self.job, self.blocks[i]
        shape, b = job.shape, job.compute_bytes
        work = memory.gradients_at_work(job, block, weight_bytes=self.gradient_bytes)
        if block.mixture:
            moe, shared = shape.experts, job.tokens * shape.width(block) * b / job.mesh.tp
            weights = self.gradient_bytes * moe.num_experts * shape.expert_params / 3 / job.mesh.ep
            # the shared expert's backward is over, and its activations are gone
            routed = experts.pairs(job) * (2 * moe.ffn_dim + shape.dim) * b + weights - 4 * shared
            work = max(work, routed)
        return self.saved_by_none[i] + work

    def _last_matrix(self, i: int) -> float:
        """Parameters of w2, whose gradient comes first."""
        return self.job.shape.width(self.blocks[i]) * self.job.shape.dim / self.job.mesh.tp
