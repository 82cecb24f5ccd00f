"""Causal attention over keys that lie on other ranks, forward and backward, with the transfers inside.

Every rank holds queries, keys and values of a head and a tail run of positions (``dist.context.head_tail_positions``).
Then the work falls into parts without masks, equally much on each rank: with its own keys a rank is causal; of a lower
rank all its queries see the head run; of a higher rank its tail queries see both runs.

- ``gathered``: keys and values of all ranks at once; at most three parts, whatever the number of ranks. The backward
  gathers them again, so that only a rank's own are kept.
- ``ring``: keys and values go around; while one rank's are used, the next are on their way. Nobody ever holds more than
  two ranks' (Liu et al. 2023). Their gradients follow them, in float32 or wider where several ranks add to them.

Transfers run behind the part with a rank's own keys, which needs none: the backward pass does it for a half of the
batch while keys come, and for the other half while their gradients leave. Each pass is one operator, so that a compiler
neither reorders the transfers nor repeats them where a checkpoint keeps the output.

Shapes: B batch, N query heads, K key/value heads, S positions of a rank (C = S/2 a run), H head size, W ranks; a pair
``kv`` is [2, B, S, K, H], the memory order of projections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.kernels.attention import AttentionKernel, merge_, partial_attention, partial_attention_backward


def gathered_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: TensorGroup, *, kernel: AttentionKernel, fused: bool
) -> Tensor:
    """Attention [B, N, S, H] of this rank's queries, by an all-gather of keys and values.

    Args:
        fused: parts are put together by the Triton kernel.
    """
    return context_attention(q_BNSH, k_BKSH, v_BKSH, False, group.name, group.rank, group.size, kernel, fused)[0]


def ring_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: TensorGroup, *, kernel: AttentionKernel, fused: bool) -> Tensor:
    """The same by passing keys and values around."""
    return context_attention(q_BNSH, k_BKSH, v_BKSH, True, group.name, group.rank, group.size, kernel, fused)[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, around: bool, name: str, rank: int, size: int, kernel: str, fused: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, H] in the memory order B, S, N, H, and log-sum-exp [B, N, S].

    Args:
        around: keys go around; else they are gathered.
    """
    kv = _pair(k, v)
    coming = _pass_on(kv, name, rank, size) if around else compat.start_all_gather(kv, size, name)
    state = _Forward(q, k, v, kernel, fused=fused, wide=size > 2)
    if not around:
        lower, higher = _lower_and_higher(compat.wait(coming), rank, size)
        if lower is not None:
            state.lower(lower)
        if higher is not None:
            state.higher(higher)
    for distance in range(1, size if around else 1):
        kv = compat.wait(coming)
        if distance + 1 < size:
            coming = _pass_on(kv, name, rank, size)
        if distance <= rank:
            state.lower(_head_run(kv))
        else:
            state.higher(kv)
    return _in_order(state.out.to(q.dtype)), state.lse.contiguous()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    around: bool,
    name: str,
    rank: int,
    size: int,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of the queries, as the output, and of the pair of keys and values [2, B, S, K, H]."""
    state = _Backward(grad, q, k, v, out, lse, kernel)
    half, kv = q.shape[0] // 2, _pair(k, v)
    if around:
        coming = _pass_on(kv, name, rank, size)
        state.own(slice(0, half))
        leaving = _share_around(state, coming, name, rank, size)
    else:
        coming = compat.start_all_gather(kv, size, name)
        state.own(slice(0, half))
        leaving = _share_gathered(state, coming, name, rank, size)
    state.own(slice(half, None))
    grads_kv = state.own_pair(wide=size > 2)
    if around:
        grads_kv += compat.wait(leaving)
    else:
        batch, run = q.shape[0], q.shape[2] // 2
        for other, share in enumerate(compat.wait(leaving).split(_rows(q, rank, size)[1])):
            if other < rank:
                grads_kv += share.view_as(grads_kv)
            elif other > rank:
                grads_kv[:, :, :run] += share.view(2, batch, run, *grads_kv.shape[3:])
    return state.grad_q(wide=size > 2), grads_kv.to(k.dtype)


#: What the operators do, by name.
BODIES = {"context_attention": _forward, "context_attention_backward": _backward}
context_attention, context_attention_backward = (
    torch.library.custom_op(f"titanyaml::{name}", body, mutates_args=()) for name, body in BODIES.items()
)


@context_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2), q.new_empty(
        q.shape[:3], dtype=wide
    )


@context_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, run, size = k.shape
    grad_q = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return grad_q, k.new_empty(2, batch, run, heads, size)


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.place, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_q, grads_kv = context_attention_backward(grad, *ctx.saved_tensors, *ctx.place)
    grad_k, grad_v = grads_kv.transpose(2, 3).unbind()
    return grad_q, grad_k, grad_v, *[None] * (len(ctx.place) + 1)


context_attention.register_autograd(_differentiate, setup_context=_keep)


class _Forward:
    """Output and log-sum-exp of a rank's queries, part by part.

    Args:
        wide: put parts together in the log-sum-exp's dtype; else in q's, which is no loss where a row has two parts.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, *, fused: bool, wide: bool) -> None:
        self.q, self.kernel, self.fused, self.run = q, kernel, fused, q.shape[2] // 2
        out, self.lse = partial_attention(q, k, v, causal=True, kernel=kernel)
        self.out = out.to(self.lse.dtype) if wide else out

    def lower(self, kv: Tensor) -> None:
        """All queries see these keys."""
        part = partial_attention(self.q, *_heads(kv), causal=False, kernel=self.kernel)
        merge_(self.out, self.lse, *part, fused=self.fused)

    def higher(self, kv: Tensor) -> None:
        """The tail queries see these keys."""
        part = partial_attention(self.q[:, :, self.run :], *_heads(kv), causal=False, kernel=self.kernel)
        merge_(self.out[:, :, self.run :], self.lse[:, :, self.run :], *part, fused=self.fused)


class _Backward:
    """Gradient of a rank's queries, part by part; a part with others' keys returns the gradients of the pair."""

    def __init__(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kernel: AttentionKernel) -> None:
        self.known, self.kernel, self.run = (grad, q, out, lse), kernel, q.shape[2] // 2
        self.kv = (k, v)
        self.mine: list[tuple[slice, tuple[Tensor, ...]]] = []
        self.of_lower: list[Tensor] = []
        self.of_higher: list[Tensor] = []

    def own(self, rows: slice) -> None:
        """Some sequences of the batch with the rank's own keys."""
        grad, q, out, lse = (tensor[rows] for tensor in self.known)
        if q.shape[0]:
            k, v = (tensor[rows] for tensor in self.kv)
            self.mine.append((rows, partial_attention_backward(grad, q, k, v, out, lse, causal=True, kernel=self.kernel)))

    def lower(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        grad, q, out, lse = self.known
        grad_q, *grads = partial_attention_backward(grad, q, *_heads(kv), out, lse, causal=False, kernel=self.kernel)
        self.of_lower.append(grad_q)
        return tuple(grads)

    def higher(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        grad, q, out, lse = (tensor[:, :, self.run :].contiguous() for tensor in self.known)
        grad_q, *grads = partial_attention_backward(grad, q, *_heads(kv), out, lse, causal=False, kernel=self.kernel)
        self.of_higher.append(grad_q)
        return tuple(grads)

    def grad_q(self, *, wide: bool) -> Tensor:
        """The sum of all parts, in q's dtype; ``wide``: added in the log-sum-exp's."""
        _, q, _, lse = self.known
        total = _in_order(torch.empty_like(q, dtype=lse.dtype if wide else q.dtype))
        for rows, (grad_q, *_) in self.mine:
            total[rows] = grad_q
        for part in self.of_lower:
            total += part
        for part in self.of_higher:
            total[:, :, self.run :] += part
        return total.to(q.dtype)

    def own_pair(self, *, wide: bool) -> Tensor:
        """Gradients [2, B, S, K, H] of the rank's own keys and values by its own queries."""
        pair = torch.empty_like(_pair(*self.kv), dtype=self.known[-1].dtype if wide else None)
        for rows, (_, *grads) in self.mine:
            for target, grad in zip(pair, grads, strict=True):
                target[rows] = grad.transpose(1, 2)
        return pair


def _share_gathered(state: _Backward, coming: Tensor, name: str, rank: int, size: int) -> Tensor:
    """The parts with keys of other ranks, whose gradients are on their way to them."""
    q, run = state.known[1], state.run
    heads, width = state.kv[0].shape[1], state.kv[0].shape[3]
    sent, received = _rows(q, rank, size)
    buffer = state.kv[0].new_empty(sum(sent), heads, width)
    lower, higher = _lower_and_higher(compat.wait(coming), rank, size)
    grads = {
        **dict(enumerate(_runs(state.lower(lower), run) if lower is not None else ())),
        **dict(enumerate(_runs(state.higher(higher), 2 * run) if higher is not None else (), rank + 1)),
    }
    for other, piece in enumerate(buffer.split(sent)):
        if other != rank:
            target = piece.view(2, q.shape[0], -1, heads, width)
            for one, grad in zip(target, grads[other], strict=True):
                one.copy_(grad.transpose(1, 2))
    return compat.start_all_to_all(buffer, received, sent, name)


def _share_around(state: _Backward, coming: Tensor, name: str, rank: int, size: int) -> Tensor:
    """The parts with keys of other ranks in turn; the sums of their gradients, on their way to the keys' owners."""
    leaving, run = coming, state.run
    for distance in range(1, size):
        kv = compat.wait(coming)
        if distance + 1 < size:
            coming = _pass_on(kv, name, rank, size)
        share = torch.zeros_like(kv, dtype=state.known[-1].dtype if size > 2 else None)
        if distance <= rank:
            grads, places = state.lower(_head_run(kv)), share[:, :, :run]
        else:
            grads, places = state.higher(kv), share
        for place, grad in zip(places, grads, strict=True):
            place.copy_(grad.transpose(1, 2))
        if distance > 1:
            share += compat.wait(leaving)
        leaving = _pass_on(share, name, rank, size)
    return leaving


def _rows(q: Tensor, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows [K, H] of gradients to and from each rank: of lower ranks' head runs, of both runs of higher ones."""
    whole = 2 * q.shape[0] * q.shape[2]
    sent = [whole // 2] * rank + [0] + [whole] * (size - rank - 1)
    return sent, [whole] * rank + [0] + [whole // 2] * (size - rank - 1)


def _runs(grads: tuple[Tensor, Tensor], length: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients of keys and of values, rank by rank."""
    return list(zip(*(grad.split(length, dim=2) for grad in grads), strict=True))


def _pair(k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    return torch.stack((k_BKSH.transpose(1, 2), v_BKSH.transpose(1, 2)))


def _heads(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, S, H] of a pair; a view."""
    return tuple(kv.transpose(2, 3).unbind())


def _head_run(kv: Tensor) -> Tensor:
    return kv[:, :, : kv.shape[2] // 2]


def _in_order(x_BNSH: Tensor) -> Tensor:
    """In the memory order B, S, N, H, which the next projection reads without a copy."""
    return x_BNSH.transpose(1, 2).contiguous().transpose(1, 2)


def _lower_and_higher(kv: Tensor, rank: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values of lower ranks' head runs and of all of higher ranks', or None where there are none."""
    ranks = kv.chunk(size)
    return _joined([_head_run(one) for one in ranks[:rank]]), _joined(list(ranks[rank + 1 :]))


def _joined(pairs: list[Tensor]) -> Tensor | None:
    """Along the positions; one is not copied."""
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    return torch.cat(pairs, dim=2)


def _pass_on(kv: Tensor, name: str, rank: int, size: int) -> Tensor:
    """Send to the next rank and start to receive from the previous one."""
    sent, received = [0] * size, [0] * size
    sent[(rank + 1) % size], received[(rank - 1) % size] = kv.shape[0], kv.shape[0]
    return compat.start_all_to_all(kv, received, sent, name)
