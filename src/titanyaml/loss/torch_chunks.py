"""The loss of all chunks with PyTorch operators: logits, softmax and loss in float32 (float64 for float64 inputs).

Between its GEMMs a chunk is ``chunk_loss``, which may be compiled. Shapes as in ``cross_entropy.py``.
"""

import functools
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from titanyaml.distributed import compat, compat_compile
from titanyaml.distributed.tensor import local_rows
from titanyaml.errors import TitanError
from titanyaml.loss import wide_matmul
from titanyaml.loss.task import LossTask

_ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor, str, torch.dtype | None], tuple[Tensor, Tensor | None]]


def sum_losses(task: LossTask, compiled: str) -> Tensor:
    """The 0-dim sum of the losses; fills the gradient buffers of ``task``. ``compiled``: as for ``CrossEntropy``."""
    hidden_ND, weight_VD, group = task.hidden_ND, task.weight_VD, task.group
    valid_N = task.labels_N != task.ignore_index
    # Ignored tokens look up row 0, which exists on every rank; their loss and gradients are masked afterwards.
    labels_N, owned_N = local_rows(
        task.labels_N.where(valid_N, 0), rows=weight_VD.shape[0], rank=group.rank, size=group.size
    )
    loss = torch.zeros((), dtype=task.wide_dtype, device=hidden_ND.device)
    grad_dtype = hidden_ND.dtype if task.needs_grad else None
    compute_chunk: _ChunkLoss = _compile_chunk_loss(compiled) if compiled else chunk_loss
    for rows in task.chunks():
        hidden_CD, valid_C1 = hidden_ND[rows], valid_N[rows, None]
        # The logits get no name here: ``chunk_loss`` frees them, which a second reference would prevent.
        chunk_sum, grad_CV = compute_chunk(
            wide_matmul.project(hidden_CD, weight_VD, dtype=task.wide_dtype),
            labels_N[rows, None],
            valid_C1,
            owned_N[rows, None],
            group.name,
            grad_dtype,
        )
        loss += chunk_sum
        if grad_CV is None:
            continue
        # Ignored tokens are zeroed in tensors of width D: masking grad_CV would be one more pass over V columns.
        if task.grad_hidden_ND is not None:
            torch.mm(grad_CV, weight_VD, out=task.grad_hidden_ND[rows]).mul_(valid_C1)
        if task.head is not None:
            task.head.add(grad_CV, hidden_CD * valid_C1)
    # A label contributes on the one rank that owns its row; one all-reduce after the last chunk completes the sum.
    return compat.all_reduce(loss, "sum", group.name) if group.name else loss


def chunk_loss(
    logits_CV: Tensor,
    labels_C1: Tensor,
    valid_C1: Tensor,
    owned_C1: Tensor,
    group_name: str,
    grad_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Sum the losses of a chunk, and form their gradient by the logits: what is done between the GEMMs.
    logits_CV (float32 or wider, may be overwritten) and labels_C1 are of this rank's rows; valid_C1: the token has a
    target; owned_C1: its label's row is here. ``grad_dtype``: of the gradient; None: it is not needed.
    """
    log_probs_CV = _log_softmax(logits_CV, group_name=group_name)
    # The caller has no other reference: without this, logits, log-probabilities and gradient would be alive together.
    del logits_CV
    label_log_probs_C1 = log_probs_CV.gather(1, labels_C1)
    loss = -label_log_probs_C1.where(valid_C1 & owned_C1, 0).sum()
    if grad_dtype is None:
        return loss, None
    return loss, _logit_gradient(log_probs_CV, labels_C1, label_log_probs_C1, owned_C1, dtype=grad_dtype)


def _log_softmax(logits_CV: Tensor, *, group_name: str) -> Tensor:
    """Log-softmax over the rows of all ranks; overwrites the logits of a sharded vocabulary."""
    if not group_name:
        return torch.log_softmax(logits_CV, dim=-1)
    # The maximum is taken over all ranks before exp, as in any stable softmax: a rank's own maximum may be so far below
    # another rank's that the sums of exponentials could not be added in one scale.
    logits_CV -= compat.all_reduce(logits_CV.amax(dim=-1, keepdim=True), "max", group_name)
    return logits_CV.sub_(compat.all_reduce(logits_CV.exp().sum(dim=-1, keepdim=True), "sum", group_name).log_())


def _logit_gradient(
    log_probs_CV: Tensor, labels_C1: Tensor, label_log_probs_C1: Tensor, owned_C1: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """softmax - one_hot(label) in ``dtype``; may overwrite log_probs_CV."""
    # One pass: beside its GEMMs this loss is bound by memory traffic. ``out`` of another dtype casts within the same
    # pass, and of the same dtype reuses the memory.
    out_CV = log_probs_CV if log_probs_CV.dtype == dtype else torch.empty_like(log_probs_CV, dtype=dtype)
    grad_CV = torch.exp(log_probs_CV, out=out_CV)
    # expm1 keeps p - 1 exact where the label is nearly certain; exp(...) - 1 would cancel
    at_label_C1 = label_log_probs_C1.expm1().where(owned_C1, label_log_probs_C1.exp())
    return grad_CV.scatter_(1, labels_C1, at_label_C1.to(dtype))


@functools.cache
def _compile_chunk_loss(backend: str) -> _ChunkLoss:
    # static shapes: there are at most two, full chunks and the last one
    return compat_compile.compile_function(chunk_loss, backend=backend, dynamic=False, explain=_raise_compile_error)


def _raise_compile_error(error: Exception) -> NoReturn:
    raise TitanError(f"the loss cannot be compiled: {error}", key="compile.loss", hint="compile.loss=false")
