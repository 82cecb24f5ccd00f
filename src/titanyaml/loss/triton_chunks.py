"""The loss of all chunks with the fused Triton kernel, which overwrites a chunk's logits with their gradient.

Shapes as in ``cross_entropy.py``; K buffers.
"""

from collections.abc import Iterator
from itertools import chain, pairwise

import torch
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.kernels.cross_entropy import cross_entropy_, shard_log_sum_exps, sharded_cross_entropy_
from titanyaml.loss.task import LossTask

#: Token range, logits, and what ``shard_log_sum_exps`` of all ranks gather into; None where the weight is whole.
_ChunkLogits = tuple[slice, Tensor, Tensor | None]


def sum_losses(task: LossTask) -> Tensor:
    """Return the 0-dim float32 sum of the losses and fill the gradient buffers of ``task``."""
    hidden_ND, labels_N, group = task.hidden_ND, task.labels_N, task.group
    losses_N = torch.empty(hidden_ND.shape[0], dtype=torch.float32, device=hidden_ND.device)
    num_rows = task.weight_VD.shape[0]
    for chunk, logits_CV, parts in _chunk_logits(task):
        # Logits keep the dtype of the hidden states, and the kernel overwrites them: 2 bytes per entry, where
        # ``torch_chunks.py`` needs 10. A bfloat16 logit is off by at most 2^-9 of itself, so a token's loss by at most
        # 2^-8 of its largest absolute logit. The roundings are unbiased and average out over tokens.
        if parts is None:
            losses_N[chunk] = cross_entropy_(
                logits_CV, labels_N[chunk], ignore_index=task.ignore_index, gradient=task.needs_grad
            )
        else:
            losses_N[chunk] = sharded_cross_entropy_(
                logits_CV,
                labels_N[chunk],
                compat.wait(parts).view(group.size, 2, -1),
                first=group.rank * num_rows,
                vocab=group.size * num_rows,
                ignore_index=task.ignore_index,
                gradient=task.needs_grad,
            )
        # the kernel already writes zeros for ignored tokens: no mask here
        if task.grad_hidden_ND is not None:
            torch.mm(logits_CV, task.weight_VD, out=task.grad_hidden_ND[chunk])
        if task.head is not None:
            task.head.add(logits_CV, hidden_ND[chunk])
    # Each rank has the losses of the whole vocabulary out of equal parts, to the bit: no all-reduce is needed.
    return losses_N.sum()


def _chunk_logits(task: LossTask) -> Iterator[_ChunkLogits]:
    """Yield each chunk's logits, valid until the next chunk is requested."""
    # With a sharded weight the all-gather of a chunk's parts (log-sum-exp and label logit, a few kilobytes) runs while
    # the next chunk's logits are formed in a second buffer: its latency is hidden.
    if not task.group.name:
        return _start_chunks(task)
    # pairwise yields a chunk only after its successor was started
    return (chunk for chunk, _ in pairwise(chain(_start_chunks(task), (None,))) if chunk is not None)


def _start_chunks(task: LossTask) -> Iterator[_ChunkLogits]:
    """Form the logits of one chunk after the other, and start the all-gather of its parts."""
    hidden_ND, weight_VD, group = task.hidden_ND, task.weight_VD, task.group
    num_tokens, num_rows = hidden_ND.shape[0], weight_VD.shape[0]
    num_buffers = 2 if group.name and num_tokens > task.chunk_tokens else 1
    buffers_KCV = hidden_ND.new_empty(num_buffers, min(task.chunk_tokens, num_tokens), num_rows)
    for index, chunk in enumerate(task.chunks()):
        buffer_CV = buffers_KCV[index % num_buffers, : chunk.stop - chunk.start]
        logits_CV, parts = torch.mm(hidden_ND[chunk], weight_VD.t(), out=buffer_CV), None
        if group.name:
            parts_2C = shard_log_sum_exps(logits_CV, task.labels_N[chunk], first=group.rank * num_rows)
            parts = compat.start_all_gather(parts_2C, group.size, group.name)
        yield chunk, logits_CV, parts
