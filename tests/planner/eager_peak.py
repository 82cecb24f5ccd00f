"""Bytes that are alive at the fullest moment of an eager program: exact, as ``runner/memory_trace.py`` counts them.

``memory.py`` says what CUDA's allocator will have reserved for a compiled one: streams do not share freed memory, and
blocks stay cached. Here a byte counts while something refers to it. Two kinds of moments can be the fullest: the loss,
when every activation is there, and the backward of a block, when its own and those before it are, and the gradients of
those after it. In a block it is where the gradients of gate, up and their product meet.
"""

from __future__ import annotations

import itertools

from titanyaml.config import kept_matmuls
from titanyaml.config.decoder_shape import BlockKind
from titanyaml.planner.model import experts, in_flight, memory
from titanyaml.planner.model import memory_of_kept as kept_products
from titanyaml.planner.model.inputs import Job


def fullest(job: Job, *, rank: int = 0) -> tuple[str, dict[str, float]]:
    """(what runs, bytes by part) at the fullest moment of a pipeline rank."""
    found = _Program(job, rank).moments()
    name = max(found, key=lambda name: sum(found[name].values()))
    return name, found[name]


def kept(job: Job, block: BlockKind, *, mode: str | None = None, keeps: int = kept_matmuls.HALF) -> float:
    """Bytes that a block keeps of one microbatch: as ``memory.saved_per_token`` says, and a float32 number for each
    query and norm. keeps: of products, under ``selective_op``."""
    numbers = 4 * job.shape.num_heads / job.mesh.tp + 8
    small = numbers if (mode or job.ac) in ("none", "selective_op") else 0.0
    if (mode or job.ac) == "selective_op":
        return job.tokens * (kept_products.saved_per_token(job, block, keeps) + small)
    return job.tokens * (memory.saved_per_token(job, block, mode=mode) + small)


class _Program:
    """One rank's stages, and what of them is alive when."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.stages = job, rank, job.stages_of(rank)
        self.blocks = [block for stage in self.stages for block in stage.blocks]
        self.narrow, self.wide = job.compute_bytes, max(4, job.compute_bytes)
        self.sharded = job.mesh.token_degree > 1
        self.grown = self.narrow if self.sharded else self.wide  # bytes of a parameter's gradient before reduction
        levels = kept_matmuls.block_levels(job.ac_keep, blocks=len(self.blocks))
        self.kept = [kept(job, block, keeps=keeps) for block, keeps in zip(self.blocks, levels, strict=True)]
        self.all = [kept(job, block, mode="none") for block in self.blocks]
        self.stream = job.slice_tokens * job.shape.dim * self.narrow
        self.states = memory.states(job, self.stages)
        self.head = job.shape.vocab_size / job.mesh.tp * job.shape.dim

    def moments(self) -> dict[str, dict[str, float]]:
        """Bytes by part at every moment that may be the fullest."""
        found = self._pipeline() if self.job.mesh.pp > 1 else self._whole()
        fixed = {name: self.states[name] for name in ("parameters", "optimizer")}
        return {when: fixed | parts for when, parts in found.items()}

    def _whole(self) -> dict[str, dict[str, float]]:
        found = {
            "loss": {
                "activations": self.stream + sum(self.kept),
                "loss": self._loss(),
                "transfers": self._gathered(len(self.blocks)),
            }
        }
        for i in range(len(self.blocks)):
            found[f"block {i}"] = {
                "activations": self.stream + sum(self.kept[:i]),
                "block": self._work(i),
                "gradients": sum(map(self._gradients, self.blocks[i + 1 :])) + self._head_gradient(),
                "transfers": self._gathered(i),
            }
        return found

    def _pipeline(self) -> dict[str, dict[str, float]]:
        job, found = self.job, {}
        first, last = job.ends_of(self.rank)
        buffers, transfers = memory.stream_buffers(job, self.stages), memory.Transfers(job, self.stages)
        one_forward = (sum(self.kept) + self.stream * first) / job.stages_per_rank
        starts = list(itertools.accumulate((len(stage.blocks) for stage in self.stages), initial=0))
        for number, moment in enumerate(in_flight.moments(job, self.rank)):
            gradients, weights = transfers.gradients(moment), transfers.weights(moment)
            at = starts[moment.stage] if moment.ends else starts[moment.stage + 1] - 1
            gradients += self.wide * sum(job.params_of((self.stages[i],))[self.sharded] for i in moment.reduced)
            if moment.stage in moment.grown and not moment.fresh:  # of the last matrix, before it is added up
                gradients -= (self.grown - self.narrow) * self._last_matrix(at)
            fixed = {"activations": moment.held * one_forward, "transfers": weights, "buffers": buffers}
            work = self._work(at) - self.kept[at] * (not moment.ends)  # what it keeps is counted as held
            found[f"backward {number}"] = fixed | {"block": work, "gradients": gradients}
            if self.stages[moment.stage].last and not moment.ends:
                found[f"loss {number}"] = fixed | {"loss": self._loss(), "gradients": gradients}
                if job.reshard == "always" and moment.stage not in moment.idle:  # the blocks' forwards have freed them
                    found[f"loss {number}"]["transfers"] = self.narrow * self.sharded * job.root(self.stages[-1])
        return found

    def _loss(self) -> float:
        """Normed stream (gathered under tp), gradients that a chunked loss keeps, and a chunk's logits with their
        log-softmax in float32. From the second chunk on there are the sum of the head's gradients, and the logits'
        gradient of the chunk before, which the loop has not let go of."""
        job, wide = self.job, self.wide
        chunk = min(job.chunk_tokens, job.tokens) * job.shape.vocab_size / job.mesh.tp
        logits, summed = 2 * wide * chunk, wide * self.head
        if job.chunk_tokens < job.tokens:
            logits += summed + self.narrow * chunk
        else:
            logits = max(logits, (wide + self.narrow) * chunk + summed)
        hidden = job.tokens * job.shape.dim * self.narrow
        normed = self.stream + hidden * (job.mesh.tp > 1 and job.sequence_parallel)
        return logits + hidden + normed

    def _head_gradient(self) -> float:
        return self.grown * self.head

    def _gradients(self, block: BlockKind) -> float:
        """Of a block whose backward is over, on this rank."""
        groups = self.job.groups(block)
        if not self.sharded:
            return self.wide * sum(size for _, size in groups)
        return self.wide * sum(size / self.job.mesh.size(axis) for axis, size in groups)

    def _gathered(self, i: int) -> float:
        """FSDP's: weights of the ends and of block ``i``, the one before it on its way, and the gradients of the one
        after it as they are reduced. At the loss (``i`` past the end) the last block is there, and on its way."""
        if not self.sharded:
            return 0.0
        count, loss = len(self.blocks), i == len(self.blocks)
        sizes = [[(axis, size) for axis, size in self.job.groups(block)] for block in self.blocks]
        whole = [sum(size for _, size in groups) for groups in sizes]
        moving = [sum(size for axis, size in groups if self.job.mesh.size(axis) > 1) for groups in sizes]
        held = self.narrow * sum(map(self.job.root, self.stages))
        i = min(i, count - 1)
        if self.job.reshard == "never":
            held += self.narrow * sum(whole)
        else:
            held += self.narrow * (whole[i] + (moving[i] if loss else moving[i - 1] if i else 0.0))
        return held + (self.wide * whole[i + 1] if not loss and i + 1 < count else 0.0)

    def _work(self, i: int) -> float:
        """A block's backward: all that it keeps, or has computed again, and its gradients."""
        job, block = self.job, self.blocks[i]
        shape, b = job.shape, self.narrow
        work = memory.gradients_at_work(job, block, width=self.grown)
        if block.mixture:
            of, width = shape.mixture, job.tokens * shape.width(block) * b / job.mesh.tp
            spread = self.grown * of.num_experts * shape.expert_params / 3 / job.mesh.ep
            # the shared expert has had its turn, and its activations are gone
            work = max(work, experts.pairs(job) * (2 * of.ffn_dim + shape.dim) * b + spread - 4 * width)
        return self.all[i] + work

    def _last_matrix(self, i: int) -> float:
        """Parameters of the feed-forward's last matrix, whose gradient comes first."""
        shape = self.job.shape
        return shape.width(self.blocks[i]) * shape.dim / self.job.mesh.tp
