"""Cross-entropy of a chunk of tokens; the logits are overwritten by their own gradient.

The kernel reads a row twice and writes it once: maximum and sum come from one read (Milakov and Gimelshein 2018, Online
normalizer calculation for softmax), the gradient from the second. PyTorch's operators need float32 logits, their
log-softmax and the gradient beside each other: 10 bytes a logit against 2, and five passes against three.

With the logits' columns on several ranks the kernel is cut in two. ``shard_log_sum_exps`` reads a rank's columns and
writes two numbers a token, which are gathered from all ranks; ``sharded_cross_entropy_`` forms loss and gradient.
On one rank it stays whole: there the second read of a row hits the cache, for which the halves are too far apart.

Shapes: C tokens, V vocabulary, or this rank's columns of it; R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanyaml.kernels.triton_support import jit, next_power_of_2, tl

BLOCK, WARPS = 4096, 16  # the fastest of seven on an H200
_LOWEST = -3.4e38  # finite: the difference of two infinities is NaN


def cross_entropy_(logits_CV: Tensor, labels_C: Tensor, *, ignore_index: int, gradient: bool) -> Tensor:
    """Losses (nats) [C] in float32; with ``gradient``, logits_CV becomes softmax - one_hot in its own dtype.

    Args:
        logits_CV: bfloat16, float16 or float32, rows contiguous. All arithmetic is in float32.
        labels_C: int64. A token whose label is ``ignore_index`` has loss 0 and gradient 0. A label outside the
            vocabulary makes the loss NaN: raising would have to wait for the device.
    """
    tokens, vocab = logits_CV.shape
    constants = _constants(logits_CV, labels_C)
    losses_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
    if tokens:
        sizes = vocab, logits_CV.stride(0), ignore_index
        cross_entropy_kernel[(tokens,)](logits_CV, labels_C, losses_C, *sizes, GRADIENT=gradient, **constants)
    return losses_C


def shard_log_sum_exps(logits_CV: Tensor, labels_C: Tensor, *, first: int) -> Tensor:
    """[2, C] in float32: log-sum-exp of a token's logits here, and its label's logit, 0 if another rank has it.
    ``logits_CV`` are those of the ids from ``first`` on, labels of the full vocabulary; else as ``cross_entropy_``.
    """
    tokens, columns = logits_CV.shape
    constants = _constants(logits_CV, labels_C)
    parts_2C = torch.empty(2, tokens, dtype=torch.float32, device=logits_CV.device)
    if tokens:
        sizes = tokens, first, columns, logits_CV.stride(0)
        shard_log_sum_exps_kernel[(tokens,)](logits_CV, labels_C, parts_2C, *sizes, **constants)
    return parts_2C


def sharded_cross_entropy_(
    logits_CV: Tensor, labels_C: Tensor, parts_R2C: Tensor, *, first: int, vocab: int, ignore_index: int, gradient: bool
) -> Tensor:
    """``cross_entropy_`` of the columns from id ``first`` on: losses over all ``vocab`` ids, gradient of these logits.
    ``parts_R2C``: each rank's ``shard_log_sum_exps``, contiguous.
    """
    # from equal parts every rank computes the same losses, to the bit: they need no all-reduce
    (tokens, columns), ranks = logits_CV.shape, len(parts_R2C)
    assert parts_R2C.is_contiguous() and parts_R2C.shape[1:] == (2, tokens)
    constants = _constants(logits_CV, labels_C) | {"GRADIENT": gradient, "RANKS": next_power_of_2(ranks)}
    losses_C = torch.empty(tokens, dtype=torch.float32, device=logits_CV.device)
    if tokens:
        sizes = tokens, ranks, first, columns, vocab, logits_CV.stride(0), ignore_index
        sharded_cross_entropy_kernel[(tokens,)](logits_CV, labels_C, parts_R2C, losses_C, *sizes, **constants)
    return losses_C


def _constants(logits_CV: Tensor, labels_C: Tensor) -> dict[str, Any]:
    """Constants of every kernel here, which assumes what is asserted."""
    assert logits_CV.stride(1) == 1 and labels_C.is_contiguous() and logits_CV.dtype.itemsize <= 4
    return {"LOWEST": _LOWEST, "BLOCK": min(BLOCK, next_power_of_2(logits_CV.shape[1])), "num_warps": WARPS}


@jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, vocab, stride, ignore_index,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # 16,744 tokens of 128,256 logits are more than 2^31
    row_ptr = logits_ptr + token * stride
    label = tl.load(labels_ptr + token)
    in_vocab = (label >= 0) & (label < vocab)
    label_logit = tl.load(row_ptr + label, mask=in_vocab, other=0.0).to(tl.float32)  # before anything is overwritten
    log_sum_exp = _log_sum_exp(row_ptr, vocab, LOWEST, BLOCK, "evict_last")  # the row is read again below
    loss = tl.where(in_vocab, log_sum_exp - label_logit, float("nan"))
    is_valid = label != ignore_index
    tl.store(losses_ptr + token, tl.where(is_valid, loss, 0.0))
    if GRADIENT:
        _overwrite_by_gradient(row_ptr, vocab, log_sum_exp, label, is_valid, LOWEST, BLOCK)


@jit
def shard_log_sum_exps_kernel(
    logits_ptr, labels_ptr, parts_ptr, tokens, first, columns, stride, LOWEST: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    column = tl.load(labels_ptr + token) - first
    label_logit = tl.load(row_ptr + column, mask=(column >= 0) & (column < columns), other=0.0).to(tl.float32)
    # No eviction policy: all rows are read before the first one is read again, so that keeping some would only push
    # out what others need.
    tl.store(parts_ptr + token, _log_sum_exp(row_ptr, columns, LOWEST, BLOCK, ""))
    tl.store(parts_ptr + tokens + token, label_logit)


@jit
def sharded_cross_entropy_kernel(
    logits_ptr, labels_ptr, parts_ptr, losses_ptr, tokens, ranks, first, columns, vocab, stride, ignore_index,
    GRADIENT: tl.constexpr, LOWEST: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a token. RANKS: ``ranks``, rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + token)
    rank = tl.arange(0, RANKS)
    part_ptrs = parts_ptr + rank * 2 * tokens + token
    log_sum_exps = tl.load(part_ptrs, mask=rank < ranks, other=LOWEST)
    label_logit = tl.sum(tl.load(part_ptrs + tokens, mask=rank < ranks, other=0.0), 0)  # 0 on all ranks but one
    maximum = tl.max(log_sum_exps, 0)
    log_sum_exp = maximum + tl.log(tl.sum(tl.exp(log_sum_exps - maximum), 0))
    loss = tl.where((label >= 0) & (label < vocab), log_sum_exp - label_logit, float("nan"))
    is_valid = label != ignore_index
    tl.store(losses_ptr + token, tl.where(is_valid, loss, 0.0))
    if GRADIENT:
        row_ptr = logits_ptr + token * stride
        _overwrite_by_gradient(row_ptr, columns, log_sum_exp, label - first, is_valid, LOWEST, BLOCK)


@jit
def _log_sum_exp(row_ptr, columns, LOWEST: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Of one row. POLICY: eviction of its cache lines."""
    lanes = tl.arange(0, BLOCK)
    # Every lane keeps the maximum and the sum of its own columns: one reduction over lanes, at the end. Two columns at
    # a time take three exponentials, not four.
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, 2 * BLOCK):
        column = start + lanes
        x = tl.load(row_ptr + column, mask=column < columns, other=LOWEST, eviction_policy=POLICY).to(tl.float32)
        column += BLOCK
        y = tl.load(row_ptr + column, mask=column < columns, other=LOWEST, eviction_policy=POLICY).to(tl.float32)
        larger = tl.maximum(largest, tl.maximum(x, y))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger) + tl.exp(y - larger)
        largest = larger
    maximum = tl.max(largest, 0)
    return maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), 0))


@jit
def _overwrite_by_gradient(
    row_ptr, columns, log_sum_exp, label_column, is_valid, LOWEST: tl.constexpr, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        x = tl.load(row_ptr + column, mask=column < columns, other=LOWEST, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(x - log_sum_exp) - tl.where(column == label_column, 1.0, 0.0)
        gradient = tl.where(is_valid, gradient, 0.0)
        tl.store(row_ptr + column, gradient.to(row_ptr.dtype.element_ty), mask=column < columns)
