"""Chunked cross-entropy: the module-level loss, its autograd function and its custom operator.

A plain loss holds the logits, their float32 copy and its gradient at once: tokens * vocabulary * 10 bytes, 21 GB for
16,384 tokens of Llama 3. Here the logits of one chunk of tokens are formed, turned into losses and immediately into
gradients of the hidden states and of the head's weight, then freed. The backward pass only scales those gradients.
Where the head's weight is sharded by vocabulary rows, each rank forms the logits of its own rows.

Shapes: B batch, S sequence, N = B*S tokens, C tokens of a chunk, D model width, V vocabulary rows on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import TensorGroup, local
from titanyaml.errors import DataError
from titanyaml.kernels.multiply_by_scalar import multiply_by_scalar
from titanyaml.loss import torch_chunks, triton_chunks
from titanyaml.loss.task import HeadGradient, LossTask

#: Label of a position that has no target.
IGNORE_INDEX = -100
#: Stands for a weight that is whole on this rank; no process group has an empty name.
_UNSHARDED = TensorGroup(name="", rank=0, size=1)


@dataclass(frozen=True)
class CrossEntropy:
    """Sum of token losses (nats). The caller divides once by the number of valid tokens of all ranks.

    Args:
        chunk_tokens: tokens whose logits exist at one time. fused: use the Triton kernels; they do not support float64.
        compiled: torch.compile backend for what is between the GEMMs where ``fused`` is off; "" runs it eagerly.
    """

    chunk_tokens: int
    ignore_index: int = IGNORE_INDEX
    fused: bool = False
    compiled: str = ""

    def __call__(self, hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor) -> Tensor:
        """Project onto the vocabulary and sum the losses.

        Args:
            hidden_BSD: final hidden states, equal on all ranks of a sharded weight.
            weight_VD: the head's weight in the same dtype; a plain tensor, or a DTensor sharded by rows.
            labels_BS: int64 ids, equal on all ranks of a sharded weight.

        Returns:
            0-dim sum, float32, or float64 for float64 inputs; 0 where no label is valid. With a sharded weight it is
            equal on all ranks, but a rank's gradient of the hidden states is only a summand of the true one.

        Raises:
            DataError: a label is outside the vocabulary (CPU). On CUDA, where reading labels would stall every step,
                the lookup's device-side assertion fails instead, or the fused loss is NaN.
        """
        group = TensorGroup.of(weight_VD.device_mesh) if isinstance(weight_VD, DTensor) else _UNSHARDED
        grad_enabled = torch.is_grad_enabled()
        return _apply(
            hidden_BSD.flatten(0, -2),
            local(weight_VD),
            labels_BS.flatten(),
            self.fused,
            self.compiled,
            self.chunk_tokens,
            self.ignore_index,
            # inside the operator autograd is off, so that it has to be told what needs a gradient
            grad_enabled and hidden_BSD.requires_grad,
            grad_enabled and weight_VD.requires_grad,
            group.name,
            group.rank,
            group.size,
        )

    def describe(self) -> str:
        """Name of the implementation, for the log."""
        return "fused" if self.fused else "compiled" if self.compiled else "torch"


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, fused: bool, compiled: str, *options: Any
    ) -> Tensor:
        loss: Tensor
        loss, *gradients = _operator(hidden_ND, weight_VD, labels_N, *options, fused, compiled)
        # The gradients are stored in the dtype of their tensors. In float32 the head's would stand, with the scaled
        # copy that backward makes, at the peak of memory (2.2 GiB in a 3B model). The price is a second rounding there.
        ctx.save_for_backward(*gradients)
        ctx.fused = fused
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # out of place: a second backward through a retained graph must find the same gradients
        gradients = [
            multiply_by_scalar(grad, grad_loss, fused=ctx.fused) if needs_grad else None
            for grad, needs_grad in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        return *gradients, *(None,) * 10  # labels and nine options


_apply: Callable[..., Tensor] = _ChunkedCrossEntropy.apply


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    hidden_needs_grad: bool,
    weight_needs_grad: bool,
    group_name: str,
    rank: int,
    size: int,
    fused: bool = False,
    compiled: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients by hidden_ND and weight_VD in their dtypes, in one pass over chunks of tokens.

    The weight's gradient is accumulated in float32 (float64) over the chunks. A gradient that is not needed is an empty
    tensor. ``group_name``: process group over whose ``size`` ranks the weight's rows are sharded; "" where it is whole.
    DataError: see ``CrossEntropy.__call__``.
    """
    if labels_N.device.type == "cpu" and not compat.is_fake(labels_N):
        _check_labels(labels_N.where(labels_N != ignore_index, 0), vocab_size=weight_VD.shape[0] * size)
    task = LossTask(
        hidden_ND,
        weight_VD,
        labels_N,
        chunk_tokens,
        ignore_index,
        TensorGroup(group_name, rank, size),
        grad_hidden_ND=hidden_ND.new_empty(hidden_ND.shape) if hidden_needs_grad else None,
        head=HeadGradient(weight_VD) if weight_needs_grad else None,
    )
    # the same loop twice: the kernel overwrites bfloat16 logits, PyTorch's operators need float32 ones
    loss = triton_chunks.sum_losses(task) if fused else torch_chunks.sum_losses(task, compiled)
    grad_weight_VD = weight_VD.new_empty(0) if task.head is None else task.head.rounded()
    return loss, hidden_ND.new_empty(0) if task.grad_hidden_ND is None else task.grad_hidden_ND, grad_weight_VD


def _check_labels(labels_N: Tensor, *, vocab_size: int) -> None:
    invalid_N = (labels_N < 0) | (labels_N >= vocab_size)
    if invalid_N.any():
        raise DataError(
            f"label {labels_N[invalid_N][0].item()} is outside the vocabulary of {vocab_size} ids",
            key="model.vocab_size",
            hint="a tokenizer that fits the model, or a larger model.vocab_size",
        )


# The whole chunk loop is one operator, so that Dynamo, AOTAutograd and fake tensors see one node: the loop breaks no
# graph of a compiled model, and its matmuls in place and by ``out=`` need no support from the compiler.
_operator = torch.library.custom_op("titanyaml::chunked_cross_entropy", chunked_cross_entropy, mutates_args=())


@_operator.register_fake
def _(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    hidden_needs_grad: bool,
    weight_needs_grad: bool,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden_ND.new_empty((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    grad_hidden_ND = hidden_ND.new_empty(hidden_ND.shape if hidden_needs_grad else (0,))
    grad_weight_VD = weight_VD.new_empty(weight_VD.shape if weight_needs_grad else (0,))
    return loss, grad_hidden_ND, grad_weight_VD


@register_flop_formula(torch.ops.titanyaml.chunked_cross_entropy)
def _flops(
    hidden_shape: torch.Size,
    weight_shape: torch.Size,
    labels_shape: torch.Size,
    chunk_tokens: int,
    ignore_index: int,
    hidden_needs_grad: bool,
    weight_needs_grad: bool,
    *_: Any,
    **__: Any,
) -> int:
    num_gemms = 1 + hidden_needs_grad + weight_needs_grad  # the projection, and one per gradient
    return 2 * hidden_shape[0] * weight_shape[0] * weight_shape[1] * num_gemms
