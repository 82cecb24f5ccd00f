"""Cross-entropy over a large vocabulary without keeping logits.

A plain loss holds logits, their float32 copy and its gradient at once: tokens * vocabulary * 10 bytes, 21 GB for
16,384 tokens of Llama 3. Here a chunk of tokens is projected, turned into losses and *at once* into gradients of the
hidden states and of the head's weight; then its logits are freed. The backward pass only scales those gradients, which
wait for it in the dtype of their tensors: the float32 sum of the weight's (V * D * 4 bytes) lives in the loss alone.

With the fused kernel (``kernels.cross_entropy``) a chunk's logits stay in the dtype of the hidden states and are
overwritten by their gradient. A bfloat16 logit is then rounded before the softmax: it is off by at most 2^-9 of itself,
so that a token's loss is off by at most 2^-8 of its largest absolute logit; the roundings are unbiased and average out
over tokens. Without it the logits are float32.

The chunk loop is one custom operator, so that Dynamo, AOTAutograd and fake tensors take it whole: no graph break in a
compiled model. Where the head's weight is a DTensor over tensor-parallel ranks, each of them forms the logits of its
own rows only, and the normalisation is taken over all. Shapes: B batch, S sequence, N = B*S tokens, C tokens of a
chunk, D model width, V vocabulary, or this rank's rows of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from titanyaml.distributed import compat, compat_compile
from titanyaml.distributed.tensor import TensorGroup, local, own_rows
from titanyaml.errors import DataError, TitanError
from titanyaml.kernels.cross_entropy import cross_entropy_, shard_parts, sharded_cross_entropy_
from titanyaml.kernels.scale import scaled

#: Label of a position that has no target.
IGNORE_INDEX = -100
#: Of a weight that is whole on every rank; no process group has this name.
_ALONE = TensorGroup(name="", rank=0, size=1)


@dataclass(frozen=True)
class CrossEntropy:
    """Sum of token losses (nats); the caller divides once by the global number of valid tokens.

    Args:
        chunk_tokens: tokens whose logits exist at one time. ignore_index: label of positions without a target.
        fused: use the Triton kernels; not in float64. compiled: else, the backend of torch.compile that makes a graph
            of what comes between the products; "": none does.
    """

    chunk_tokens: int
    ignore_index: int = IGNORE_INDEX
    fused: bool = False
    compiled: str = ""

    def __call__(self, hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor) -> Tensor:
        """Project, normalise, sum.

        Args:
            hidden_BSD: final hidden states. weight_VD: the head's weight, same dtype; whole, or a DTensor with its
                rows on the ranks of one axis, where all of them call with equal hidden states and labels.
                labels_BS: int64 ids.

        Returns:
            0-dim sum, float32, or float64 for float64 inputs; 0 where no label is valid. Gradients come in the dtype
            of their tensor; that of the weight is summed in float32 (float64) over all chunks. Both are rounded here,
            and, unless the gradient of the sum is a power of two, a second time when they are multiplied by it. With
            a sharded weight the sum is the same on all its ranks, and the hidden states' gradient a summand of the
            true one on each.

        Raises:
            DataError: a label is outside the vocabulary (CPU). On CUDA, since looking at the labels would stall the
                device in every step, the lookup's device-side assertion fails instead, or the fused loss is NaN.
        """
        group = TensorGroup.of(weight_VD.device_mesh) if isinstance(weight_VD, DTensor) else _ALONE
        return _ChunkedCrossEntropy.apply(
            hidden_BSD.flatten(0, -2),
            local(weight_VD),
            labels_BS.flatten(),
            self.chunk_tokens,
            self.ignore_index,
            torch.is_grad_enabled() and hidden_BSD.requires_grad,
            torch.is_grad_enabled() and weight_VD.requires_grad,
            group.name,
            group.rank,
            group.size,
            self.fused,
            self.compiled,
        )

    def runs(self) -> str:
        """What computes it, for the log."""
        return "fused" if self.fused else "compiled" if self.compiled else "torch"


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        fused: bool,
        compiled: str,
    ) -> Tensor:
        loss, *gradients = _operator(
            hidden_ND,
            weight_VD,
            labels_N,
            chunk_tokens,
            ignore_index,
            hidden_needs_grad,
            weight_needs_grad,
            group_name,
            rank,
            size,
            fused,
            compiled,
        )
        ctx.save_for_backward(*gradients)
        ctx.fused = fused
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # out of place: a second backward through a retained graph finds the same gradients
        gradients = [
            scaled(grad, grad_loss, fused=ctx.fused) if needed else None
            for grad, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        return *gradients, *(None,) * 10


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
    """Loss and gradients of its sum in one pass over chunks of tokens.

    Args:
        group_name: process group over whose ``size`` ranks the weight's rows lie; "" where they are all here.
        fused: use the Triton kernels; not in float64.
        compiled: backend of torch.compile for ``chunk_loss``; "": eager.

    Returns:
        The 0-dim sum; its gradients by hidden_ND and by weight_VD, each in their dtype. A gradient that is not needed
        comes as an empty tensor.

    Raises:
        DataError: as ``CrossEntropy``.
    """
    valid_N = labels_N != ignore_index
    if labels_N.device.type == "cpu" and not compat.is_fake(labels_N):
        _check_labels(labels_N.where(valid_N, 0), vocab_size=weight_VD.shape[0] * size)
    grad_hidden_ND = hidden_ND.new_empty(hidden_ND.shape) if hidden_needs_grad else None
    head = _HeadGradient(weight_VD) if weight_needs_grad else None
    group = TensorGroup(group_name, rank, size)
    if fused:
        loss = _fused(hidden_ND, weight_VD, labels_N, chunk_tokens, ignore_index, group, grad_hidden_ND, head)
    else:
        loss = _plain(
            hidden_ND,
            weight_VD,
            labels_N.where(valid_N, 0),
            valid_N,
            chunk_tokens,
            group,
            grad_hidden_ND,
            head,
            compiled,
        )
    grad_weight_VD = weight_VD.new_empty(0) if head is None else head.rounded()
    return loss, hidden_ND.new_empty(0) if grad_hidden_ND is None else grad_hidden_ND, grad_weight_VD


def _plain(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    valid_N: Tensor,
    chunk_tokens: int,
    group: TensorGroup,
    grad_hidden_ND: Tensor | None,
    head: _HeadGradient | None,
    compiled: str,
) -> Tensor:
    """The sum; gradients go into what there is for them. labels_N: 0 where not valid."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    labels_N, mine_N = own_rows(labels_N, rows=weight_VD.shape[0], rank=group.rank, size=group.size)
    loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
    dtype = hidden_ND.dtype if grad_hidden_ND is not None or head is not None else None
    of_chunk = _compiled(compiled) if compiled else chunk_loss
    for start in range(0, hidden_ND.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CD, labels_C1, valid_C1, mine_C1 = (
            hidden_ND[rows],
            labels_N[rows, None],
            valid_N[rows, None],
            mine_N[rows, None],
        )
        part, grad_CV = of_chunk(
            _logits(hidden_CD, weight_VD, dtype=wide), labels_C1, valid_C1, mine_C1, group.name, dtype
        )
        loss += part
        if grad_CV is None:
            continue
        # ignored tokens are zeroed where rows are D wide, not V
        if grad_hidden_ND is not None:
            torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows]).mul_(valid_C1)
        if head is not None:
            head.add(grad_CV, hidden_CD * valid_C1)
    # each label was counted where its row is
    return compat.all_reduce(loss, "sum", group.name) if group.name else loss


def chunk_loss(
    logits_CV: Tensor, labels_C1: Tensor, valid_C1: Tensor, mine_C1: Tensor, group_name: str, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Between the products of a chunk: the sum of its losses, and their gradients by the logits in ``dtype``.

    Args:
        logits_CV: of this rank's rows, wide; may be overwritten. labels_C1: indices of these rows. valid_C1: the token
            counts. mine_C1: its label is among these rows. dtype: None: no gradient is needed.
    """
    log_probs_CV = _log_probs(logits_CV, group_name=group_name)
    del logits_CV  # the caller's only reference: three tensors of this size need not be alive together
    label_log_probs_C1 = log_probs_CV.gather(1, labels_C1)
    loss = -label_log_probs_C1.where(valid_C1 & mine_C1, 0).sum()
    if dtype is None:
        return loss, None
    return loss, _logit_gradient(log_probs_CV, labels_C1, label_log_probs_C1, mine_C1, dtype=dtype)


@functools.cache
def _compiled(backend: str) -> Callable[..., Any]:
    return compat_compile.compile_function(chunk_loss, backend=backend, dynamic=False, explain=_explain)


def _explain(error: Exception) -> NoReturn:
    raise TitanError(f"the loss cannot be compiled: {error}", key="compile.loss", hint="compile.loss=false")


def _fused(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    group: TensorGroup,
    grad_hidden_ND: Tensor | None,
    head: _HeadGradient | None,
) -> Tensor:
    """``_plain`` with buffers of logits that become buffers of their gradients."""
    losses_N = torch.empty(hidden_ND.shape[0], dtype=torch.float32, device=hidden_ND.device)
    options = {"ignore_index": ignore_index, "gradient": grad_hidden_ND is not None or head is not None}
    rows = weight_VD.shape[0]
    for chunk, logits_CV, parts in _chunk_logits(hidden_ND, weight_VD, labels_N, chunk_tokens, group):
        if parts is None:
            losses_N[chunk] = cross_entropy_(logits_CV, labels_N[chunk], **options)
        else:
            losses_N[chunk] = sharded_cross_entropy_(
                logits_CV,
                labels_N[chunk],
                compat.wait(parts).view(group.size, 2, -1),
                first=group.rank * rows,
                vocab=group.size * rows,
                **options,
            )
        if grad_hidden_ND is not None:
            torch.mm(logits_CV, weight_VD, out=grad_hidden_ND[chunk])
        if head is not None:
            head.add(logits_CV, hidden_ND[chunk])
    return losses_N.sum()


def _chunk_logits(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int, group: TensorGroup
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Of each chunk its place among the tokens, its logits, and what all ranks' ``shard_parts`` make of it.

    A chunk's logits are good until the next one is asked for. The parts are on their way (None: the weight is whole):
    they travel while the next chunk's logits are formed, in a second buffer.
    """
    tokens, rows = hidden_ND.shape[0], weight_VD.shape[0]
    buffers_KCV = hidden_ND.new_empty(2 if group.name and tokens > chunk_tokens else 1, min(chunk_tokens, tokens), rows)

    def started() -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        for index, start in enumerate(range(0, tokens, chunk_tokens)):
            chunk = slice(start, min(start + chunk_tokens, tokens))
            buffer_CV = buffers_KCV[index % len(buffers_KCV), : chunk.stop - start]
            logits_CV, parts = torch.mm(hidden_ND[chunk], weight_VD.t(), out=buffer_CV), None
            if group.name:
                own_2C = shard_parts(logits_CV, labels_N[chunk], first=group.rank * rows)
                parts = compat.start_all_gather(own_2C, group.size, group.name)
            yield chunk, logits_CV, parts

    # a pair comes when its second has started
    return (one for one, _ in pairwise(chain(started(), (None,)))) if group.name else started()


class _HeadGradient:
    """The sum of grad_CV^T hidden_CD over chunks, in float32 where the weight is narrower, rounded at the end.

    The sum lies in two tensors of half the rows. All of it in two bytes is as large as one of them: each is rounded
    into the first one's memory, and the second one is freed. So the result never stands beside the whole float32 sum
    (at Llama 3's 128,256 x 4096: 1.0 beside 2.0 GiB), and does not keep its memory until the backward pass.
    """

    PIECE = 2**24  # numbers that are rounded at one time, through a copy

    def __init__(self, weight_VD: Tensor) -> None:
        self.shape, self.dtype, self.device = weight_VD.shape, weight_VD.dtype, weight_VD.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        # a multiple of 8 rows: so the second half of a row of bfloat16 logits begins at a multiple of 16 bytes
        half = self.shape[0] if self.dtype == self.wide else min(self.shape[0], -(-self.shape[0] // 16) * 8)
        self.halves = (slice(0, half), slice(half, None)) if half < self.shape[0] else (slice(None),)
        self.sums: list[Tensor] = []

    def add(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """A chunk more."""
        if not self.sums:  # there is nothing to add to yet
            self.sums = [_outer(grad_CV[:, half], hidden_CD, dtype=self.wide) for half in self.halves]
            return
        for half, part in zip(self.halves, self.sums, strict=True):
            _add_outer(part, grad_CV[:, half], hidden_CD)

    def rounded(self) -> Tensor:
        """[V, D] in the weight's dtype; the sum is forgotten."""
        sums, self.sums = self.sums, []
        if not sums:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.dtype == self.wide:
            return sums[0]
        assert self.dtype.itemsize * 2 == self.wide.itemsize
        result = sums[0].view(-1).view(self.dtype)[: self.shape.numel()]
        end = 0
        for part in sums:
            # number i of the first half is written where i / 2 was: never over one that is not yet read
            for piece in part.view(-1).split(self.PIECE):
                begin, end = end, end + len(piece)
                result[begin:end] = piece.to(self.dtype)
        return result.view(self.shape)


def _log_probs(logits_CV: Tensor, *, group_name: str) -> Tensor:
    """Log-softmax over the rows of all ranks; a sharded one overwrites the logits."""
    if not group_name:
        return torch.log_softmax(logits_CV, dim=-1)
    logits_CV -= compat.all_reduce(logits_CV.amax(dim=-1, keepdim=True), "max", group_name)
    return logits_CV.sub_(compat.all_reduce(logits_CV.exp().sum(dim=-1, keepdim=True), "sum", group_name).log_())


def _logits(hidden_CD: Tensor, weight_VD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """hidden_CD weight_VD^T in ``dtype``."""
    if hidden_CD.is_cuda and hidden_CD.dtype != dtype:
        # the product is formed in float32 anyway: written so, it is neither rounded nor cast by one more pass
        return torch.mm(hidden_CD, weight_VD.t(), out_dtype=dtype)
    return (hidden_CD @ weight_VD.t()).to(dtype)


def _logit_gradient(
    log_probs_CV: Tensor, labels_C1: Tensor, label_log_probs_C1: Tensor, mine_C1: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """softmax - one_hot(label, where its row is ours) in ``dtype``; may overwrite log_probs_CV.

    One pass over it: memory traffic is the cost of this loss beside its matrix products.
    """
    same = log_probs_CV.dtype == dtype
    grad_CV = torch.exp(log_probs_CV, out=log_probs_CV if same else torch.empty_like(log_probs_CV, dtype=dtype))
    # expm1: p - 1 is exact where the label is nearly certain
    at_label_C1 = label_log_probs_C1.expm1().where(mine_C1, label_log_probs_C1.exp())
    return grad_CV.scatter_(1, labels_C1, at_label_C1.to(dtype))


def _add_outer(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """sum_VD += grad_CV^T hidden_CD in sum_VD's dtype."""
    if sum_VD.dtype == hidden_CD.dtype:
        sum_VD.addmm_(grad_CV.t(), hidden_CD)
    elif sum_VD.is_cuda:
        # tensor cores take 16-bit operands and add into the float32 sum in place
        torch.addmm(sum_VD, grad_CV.t(), hidden_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD.addmm_(grad_CV.to(sum_VD.dtype).t(), hidden_CD.to(sum_VD.dtype))


def _outer(grad_CV: Tensor, hidden_CD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """grad_CV^T hidden_CD in ``dtype``."""
    if grad_CV.is_cuda and grad_CV.dtype != dtype:
        return torch.mm(grad_CV.t(), hidden_CD, out_dtype=dtype)
    return grad_CV.to(dtype).t() @ hidden_CD.to(dtype)


def _check_labels(labels_N: Tensor, *, vocab_size: int) -> None:
    bad_N = (labels_N < 0) | (labels_N >= vocab_size)
    if bad_N.any():
        raise DataError(
            f"label {labels_N[bad_N][0].item()} is outside the vocabulary of {vocab_size} ids",
            key="model.vocab_size",
            hint="a tokenizer that fits the model, or a larger model.vocab_size",
        )


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
    group_name: str,
    rank: int,
    size: int,
    fused: bool = False,
    compiled: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden_ND.new_empty((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    gradients = ((hidden_ND, hidden_needs_grad), (weight_VD, weight_needs_grad))
    return loss, *(tensor.new_empty(tensor.shape if needed else (0,)) for tensor, needed in gradients)


@register_flop_formula(torch.ops.titanyaml.chunked_cross_entropy)
def _flops(
    hidden_shape: Any,
    weight_shape: Any,
    labels_shape: Any,
    chunk_tokens: int,
    ignore_index: int,
    hidden_needs_grad: bool,
    weight_needs_grad: bool,
    *_: Any,
    **__: Any,
) -> int:
    """The three matrix products, as ``torch.utils.flop_counter`` counts those that it can see."""
    return 2 * hidden_shape[0] * weight_shape[0] * weight_shape[1] * (1 + hidden_needs_grad + weight_needs_grad)
