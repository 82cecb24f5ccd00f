"""What kernels without a plain path compute, in plain PyTorch, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanyaml.kernels.adamw import Factors
from titanyaml.kernels.master_weights import is_split, join, split_


def adamw_reference_(
    weight: Tensor | None, master: Tensor, grad: Tensor, avg: Tensor, avg_sq: Tensor, clip: Tensor, factors: Factors
) -> None:
    """``adamw_`` in plain PyTorch."""
    grad = grad.float() * clip
    avg.mul_(factors.beta1).add_(grad, alpha=factors.one_minus_beta1)
    avg_sq.mul_(factors.beta2).addcmul_(grad, grad, value=factors.one_minus_beta2)
    denominator = avg_sq.sqrt() * factors.root_scale + factors.eps
    remainder = master if is_split(master) else None
    if remainder is not None:
        assert weight is not None, "a remainder belongs to a stored weight"
        master = join(weight, remainder)
    master.mul_(factors.decay).addcdiv_(avg, denominator, value=-factors.step_size)
    if weight is not None and remainder is not None:
        split_(master, weight, remainder)
    elif weight is not None:
        weight.copy_(master)


def cross_entropy_reference_(logits_CV: Tensor, labels_C: Tensor, *, ignore_index: int, gradient: bool) -> Tensor:
    """``cross_entropy_`` in plain PyTorch."""
    is_valid_C1 = (labels_C != ignore_index)[:, None]
    labels_C1 = labels_C[:, None].where(is_valid_C1, 0)
    log_probs_CV = logits_CV.float().log_softmax(-1)
    losses_C1 = -log_probs_CV.gather(1, labels_C1)
    if gradient:
        one_hot_CV = torch.zeros_like(log_probs_CV).scatter_(1, labels_C1, 1.0)
        logits_CV.copy_((log_probs_CV.exp() - one_hot_CV) * is_valid_C1)
    return losses_C1.where(is_valid_C1, 0.0).squeeze(1)


def square_sum_reference(tensors: Sequence[Tensor]) -> Tensor:
    """``square_sum`` in plain PyTorch, all in float64."""
    return torch.stack([t.double().square().sum() for t in tensors]).sum()
