"""Cross-entropy of a chunk of tokens; the logits are overwritten by their own gradient.

The kernel reads a row twice (maximum and sum in one read: Milakov and Gimelshein 2018, Online normalizer calculation
for softmax) and writes it once. PyTorch's operators need float32 logits, their log-softmax and the gradient beside each
other: 10 bytes a logit against 2, and five passes against three.

Shapes: C tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titanyaml.kernels.jit import jit, next_power_of_2, tl

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
            logits_CV, labels_C, losses_C, vocab, logits_CV.stride(0), ignore_index, GRADIENT=gradient,
            LOWEST=_LOWEST, BLOCK=min(BLOCK, next_power_of_2(vocab)), num_warps=WARPS,
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
    columns = tl.arange(0, BLOCK)
    # every lane keeps the maximum and the sum of its own columns; two at a time take three exponentials, not four
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, 2 * BLOCK):
        place = start + columns
        x = tl.load(row_ptr + place, mask=place < vocab, other=LOWEST, eviction_policy="evict_last").to(tl.float32)
        place += BLOCK
        y = tl.load(row_ptr + place, mask=place < vocab, other=LOWEST, eviction_policy="evict_last").to(tl.float32)
        larger = tl.maximum(largest, tl.maximum(x, y))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger) + tl.exp(y - larger)
        largest = larger
    maximum = tl.max(largest, 0)
    normaliser = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum), 0))
    valid = label != ignore_index
    loss = tl.where(in_vocab, normaliser - at_label, float("nan"))
    tl.store(losses_ptr + token, tl.where(valid, loss, 0.0))
    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            x = tl.load(row_ptr + start + columns, mask=inside, other=LOWEST, eviction_policy="evict_first")
            x = x.to(tl.float32)
            gradient = tl.exp(x - normaliser) - tl.where(start + columns == label, 1.0, 0.0)
            gradient = tl.where(valid, gradient, 0.0)
            tl.store(row_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
