"""Cross-entropy of a chunk of tokens; the logits are overwritten by their own gradient.

The kernel reads a row twice (maximum and sum in one read: Milakov and Gimelshein 2018, Online normalizer calculation
for softmax) and writes it once. PyTorch's operators need float32 logits, their log-softmax and the gradient beside each
other: 10 bytes a logit against 2, and five passes against three.

Where several ranks hold columns of the logits, it is cut in two: ``shard_log_sum_exps`` reads a rank's columns, the two
numbers a token that it makes are gathered from all ranks, and ``sharded_cross_entropy_`` forms loss and gradient.

Shapes: C tokens, V vocabulary, or this rank's columns of it; R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import jit, next_power_of_2, tl

BLOCK, WARPS = 4096, 16  # the fastest of seven on an H200
_LOWEST = -3.4e38  # finite: the difference of two infinities is no number


def cross_entropy_(logits_CV: Tensor, labels_C: Tensor, *, ignore_index: int, gradient: bool) -> Tensor:
    """Losses (nats) [C] in float32; with ``gradient``, logits_CV becomes softmax - one_hot in its own dtype.

    Args:
        logits_CV: bfloat16, float16 or float32, rows contiguous. All arithmetic is in float32.
        labels_C: int64. A token whose label is ``ignore_index`` has loss 0 and gradient 0. A label outside the
            vocabulary makes the loss NaN, since nothing can be raised without waiting for the device.
    """
    tokens, vocab = logits_CV.shape
    assert logits_CV.stride(1) == 1 and labels_C.is_contiguous() and logits_CV.dtype.itemsize <= 4
    losses_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
    if tokens:
        cross_entropy_kernel[(tokens,)](
            logits_CV,
            labels_C,
            losses_C,
            vocab,
            logits_CV.stride(0),
            ignore_index,
            GRADIENT=gradient,
            LOWEST=_LOWEST,
            BLOCK=min(BLOCK, next_power_of_2(vocab)),
            num_warps=WARPS,
        )
    return losses_C


def shard_log_sum_exps(logits_CV: Tensor, labels_C: Tensor, *, first: int) -> Tensor:
    """[2, C] in float32: log-sum-exp of a token's logits here, and its label's logit, 0 where another rank has it.

    Args:
        logits_CV: of the ids from ``first`` on; as for ``cross_entropy_``. labels_C: int64, of the whole vocabulary.
    """
    tokens, columns = logits_CV.shape
    assert logits_CV.stride(1) == 1 and labels_C.is_contiguous() and logits_CV.dtype.itemsize <= 4
    parts_2C = torch.empty(2, tokens, dtype=torch.float32, device=logits_CV.device)
    if tokens:
        cross_entropy_parts_kernel[(tokens,)](
            logits_CV,
            labels_C,
            parts_2C,
            tokens,
            first,
            columns,
            logits_CV.stride(0),
            LOWEST=_LOWEST,
            BLOCK=min(BLOCK, next_power_of_2(columns)),
            num_warps=WARPS,
        )
    return parts_2C


def sharded_cross_entropy_(
    logits_CV: Tensor, labels_C: Tensor, parts_R2C: Tensor, *, first: int, vocab: int, ignore_index: int, gradient: bool
) -> Tensor:
    """``cross_entropy_`` of a rank's columns: the losses of the whole vocabulary, the gradient of these logits.

    Args:
        parts_R2C: what ``shard_log_sum_exps`` made on each rank, contiguous. first: id of the first column. vocab: ids of all
            ranks. From equal parts every rank computes the same losses, to the bit.
    """
    tokens, columns = logits_CV.shape
    assert parts_R2C.is_contiguous() and parts_R2C.shape[1:] == (2, tokens)
    losses_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
    if tokens:
        sharded_cross_entropy_kernel[(tokens,)](
            logits_CV,
            labels_C,
            parts_R2C,
            losses_C,
            tokens,
            len(parts_R2C),
            first,
            columns,
            vocab,
            logits_CV.stride(0),
            ignore_index,
            GRADIENT=gradient,
            LOWEST=_LOWEST,
            RANKS=next_power_of_2(len(parts_R2C)),
            BLOCK=min(BLOCK, next_power_of_2(columns)),
            num_warps=WARPS,
        )
    return losses_C


def reference_(logits_CV: Tensor, labels_C: Tensor, *, ignore_index: int, gradient: bool) -> Tensor:
    """``cross_entropy_`` in plain PyTorch."""
    valid_C1 = (labels_C != ignore_index)[:, None]
    labels_C1 = labels_C[:, None].where(valid_C1, 0)
    log_probs_CV = logits_CV.float().log_softmax(-1)
    losses_C1 = -log_probs_CV.gather(1, labels_C1)
    if gradient:
        one_hot_CV = torch.zeros_like(log_probs_CV).scatter_(1, labels_C1, 1.0)
        logits_CV.copy_((log_probs_CV.exp() - one_hot_CV) * valid_C1)
    return losses_C1.where(valid_C1, 0.0).squeeze(1)


def shard_log_sum_exps_reference(logits_CV: Tensor, labels_C: Tensor, *, first: int) -> Tensor:
    """``shard_log_sum_exps`` in plain PyTorch; in float64 for float64 logits."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    own_C = labels_C - first
    mine_C = (own_C >= 0) & (own_C < logits_CV.shape[1])
    at_label_C = wide_CV.gather(1, own_C.where(mine_C, 0)[:, None]).squeeze(1).where(mine_C, 0.0)
    return torch.stack((wide_CV.logsumexp(1), at_label_C))


@jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, vocab, stride, ignore_index,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)  # 16,744 tokens of 128,256 logits are more than 2^31
    row_ptr = logits_ptr + token * stride
    label = tl.load(labels_ptr + token)
    in_vocab = (label >= 0) & (label < vocab)
    at_label = tl.load(row_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)  # before anything is overwritten
    normaliser = _log_sum_exp(row_ptr, vocab, LOWEST, BLOCK, "evict_last")
    loss = tl.where(in_vocab, normaliser - at_label, float("nan"))
    valid = label != ignore_index
    tl.store(losses_ptr + token, tl.where(valid, loss, 0.0))
    if GRADIENT:
        _to_gradient(row_ptr, vocab, normaliser, label, valid, LOWEST, BLOCK)


@jit
def cross_entropy_parts_kernel(
    logits_ptr, labels_ptr, parts_ptr, tokens, first, columns, stride, LOWEST: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    own = tl.load(labels_ptr + token) - first
    at_label = tl.load(row_ptr + own, mask=(own >= 0) & (own < columns), other=0.0).to(tl.float32)
    # all rows are read before the first one is read again: keeping any would only push out what others need
    tl.store(parts_ptr + token, _log_sum_exp(row_ptr, columns, LOWEST, BLOCK, ""))
    tl.store(parts_ptr + tokens + token, at_label)


@jit
def sharded_cross_entropy_kernel(
    logits_ptr, labels_ptr, parts_ptr, losses_ptr, tokens, ranks, first, columns, vocab, stride, ignore_index,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token. RANKS: ``ranks``, rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + token)
    rank = tl.arange(0, RANKS)
    part_ptrs = parts_ptr + rank * 2 * tokens + token
    normalisers = tl.load(part_ptrs, mask=rank < ranks, other=LOWEST)
    at_label = tl.sum(tl.load(part_ptrs + tokens, mask=rank < ranks, other=0.0), 0)
    maximum = tl.max(normalisers, 0)
    normaliser = maximum + tl.log(tl.sum(tl.exp(normalisers - maximum), 0))
    loss = tl.where((label >= 0) & (label < vocab), normaliser - at_label, float("nan"))
    valid = label != ignore_index
    tl.store(losses_ptr + token, tl.where(valid, loss, 0.0))
    if GRADIENT:
        _to_gradient(logits_ptr + token * stride, columns, normaliser, label - first, valid, LOWEST, BLOCK)


@jit
def _log_sum_exp(row_ptr, columns, LOWEST: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Of one row. POLICY: which of the row's cache lines go first."""
    lanes = tl.arange(0, BLOCK)
    # every lane keeps the maximum and the sum of its own columns; two at a time take three exponentials, not four
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, 2 * BLOCK):
        place = start + lanes
        x = tl.load(row_ptr + place, mask=place < columns, other=LOWEST, eviction_policy=POLICY).to(tl.float32)
        place += BLOCK
        y = tl.load(row_ptr + place, mask=place < columns, other=LOWEST, eviction_policy=POLICY).to(tl.float32)
        larger = tl.maximum(largest, tl.maximum(x, y))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger) + tl.exp(y - larger)
        largest = larger
    maximum = tl.max(largest, 0)
    return maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), 0))


@jit
def _to_gradient(row_ptr, columns, normaliser, label, valid, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    """Overwrite a row. label: as a column of it."""
    lanes = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        place = start + lanes
        x = tl.load(row_ptr + place, mask=place < columns, other=LOWEST, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(x - normaliser) - tl.where(place == label, 1.0, 0.0)
        gradient = tl.where(valid, gradient, 0.0)
        tl.store(row_ptr + place, gradient.to(row_ptr.dtype.element_ty), mask=place < columns)
