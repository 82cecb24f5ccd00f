"""Causal attention over keys that lie on other ranks, forward and backward, with the transfers inside.

Every rank holds queries, keys and values of a head and a tail run of positions
(``distributed.context_parallel.head_tail_positions``). Then the work falls into partial attentions without masks,
equally much on each rank. With its own keys a rank is causal. Of a lower rank all its queries see the head run. Of a
higher rank its tail queries see both runs.

- gathered: keys and values of all ranks at once; at most three partial attentions, whatever the number
  of ranks. The backward gathers them again: keeping them would cost W times their memory in every block.
- ring: keys and values go around; while one rank's are used, the next are on their way. No rank ever
  holds those of more than two (Liu et al. 2023). Their gradients follow them.

Transfers run behind the attention to a rank's own keys, which needs none. Each pass is one opaque operator: a compiler
would start a transfer where it is waited for, and checkpoints would keep partial outputs. The price is that what
Inductor would have fused around them is written by hand.

Shapes: B batch, N query heads, K key/value heads, S positions of a rank (C = S/2 a run), H head size, W ranks; a pair
``kv`` is [2, B, S, K, H], the memory order of projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.kernels.attention import AttentionKernel, merge_, partial_attention, partial_attention_backward

_Pair = tuple[Tensor, Tensor]


def attend_across_ranks(
    q: Tensor, k: Tensor, v: Tensor, group: TensorGroup, *, is_ring: bool, kernel: AttentionKernel, fused: bool
) -> Tensor:
    """Attention of this rank's queries [B, N, S, H] over all keys and values [B, K, S, H]. fused: merged by Triton."""
    return context_attention(q, k, v, is_ring, group.name, group.rank, group.size, kernel, fused)[0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_ring: bool, name: str, rank: int, size: int, kernel: str, fused: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, H] in the memory order B, S, N, H, and log-sum-exp [B, N, S]."""
    kv, run = _stack(k, v), q.shape[2] // 2
    incoming = _pass_on(kv, name, rank, size) if is_ring else compat.start_all_gather(kv, size, name)
    state = _Forward(q, k, v, cast(AttentionKernel, kernel), fused=fused, wide=size > 2)
    if not is_ring:
        lower_kv, higher_kv = _lower_and_higher(compat.wait(incoming), rank, size)
        if lower_kv is not None:
            state.attend(lower_kv, 0)
        if higher_kv is not None:
            state.attend(higher_kv, run)
    for distance in range(1, size if is_ring else 1):
        kv = compat.wait(incoming)
        if distance + 1 < size:
            incoming = _pass_on(kv, name, rank, size)
        visible_kv, first_query = (_head_run(kv), 0) if distance <= rank else (kv, run)
        state.attend(visible_kv, first_query)
    return _in_projection_order(state.out.to(q.dtype)), state.lse.contiguous()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    is_ring: bool, name: str, rank: int, size: int, kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the queries, laid out as the output, and of the pair of keys and values [2, B, S, K, H]."""
    state = _Backward(grad, q, k, v, out, lse, cast(AttentionKernel, kernel))
    half, kv = q.shape[0] // 2, _stack(k, v)
    incoming = _pass_on(kv, name, rank, size) if is_ring else compat.start_all_gather(kv, size, name)
    state.attend_own(slice(0, half))  # half of the batch while keys arrive, the other while their gradients leave
    send_gradients = _send_around if is_ring else _send_to_owners
    outgoing = send_gradients(state, incoming, name, rank, size)
    state.attend_own(slice(half, None))
    grads_kv = state.own_grads_kv(wide=size > 2)
    if is_ring:
        grads_kv += compat.wait(outgoing)
    else:
        batch, run = q.shape[0], q.shape[2] // 2
        shares = compat.wait(outgoing).split(_rows(q, rank, size)[1])
        for peer, share in enumerate(shares):  # in rank order, so that sums are the same in every run
            if peer < rank:
                grads_kv += share.view_as(grads_kv)
            elif peer > rank:
                grads_kv[:, :, :run] += share.view(2, batch, run, *grads_kv.shape[3:])
    return state.grad_q(wide=size > 2), grads_kv.to(k.dtype)


#: What the operators compute, by name.
BODIES: dict[str, Callable[..., _Pair]] = {"context_attention": _forward, "context_attention_backward": _backward}
context_attention, context_attention_backward = (
    torch.library.custom_op(f"titanyaml::{name}", body, mutates_args=()) for name, body in BODIES.items()
)


@context_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return _empty_in_projection_order(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


@context_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, positions, size = k.shape
    return _empty_in_projection_order(q), k.new_empty(2, batch, positions, heads, size)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    q, k, v, *ctx.options, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_q, grads_kv = context_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    grad_k, grad_v = grads_kv.transpose(2, 3).unbind()
    return grad_q, grad_k, grad_v, *[None] * (len(ctx.options) + 1)


context_attention.register_autograd(_differentiate, setup_context=_save_for_backward)


class _Forward:
    """Output and log-sum-exp of a rank's queries, merged from partial attentions."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel, *, fused: bool, wide: bool) -> None:
        self.q, self.kernel, self.fused = q, kernel, fused
        out, self.lse = partial_attention(q, k, v, causal=True, kernel=kernel)
        # With two ranks a row is merged once, and rounded then: float32 in between would gain nothing.
        self.out = out.to(self.lse.dtype) if wide else out

    def attend(self, kv: Tensor, first_query: int) -> None:
        """The queries from ``first_query`` on see these keys."""
        q, out, lse = (tensor[:, :, first_query:] for tensor in (self.q, self.out, self.lse))
        merge_(out, lse, *partial_attention(q, *_unstack(kv), causal=False, kernel=self.kernel), fused=self.fused)


class _Backward:
    """Gradients of a rank's queries, and of the keys and values that they saw."""

    def __init__(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kernel: AttentionKernel
    ) -> None:
        self.saved, self.kv, self.kernel, self.run = (grad, q, out, lse), (k, v), kernel, q.shape[2] // 2
        self.own_grads: list[tuple[slice, tuple[Tensor, Tensor, Tensor]]] = []
        self.grads_q: list[tuple[int, Tensor]] = []  # first query, gradient of it and those after it

    def attend_own(self, rows: slice) -> None:
        """Some sequences of the batch with the rank's own keys."""
        grad, q, out, lse = (tensor[rows] for tensor in self.saved)
        if q.shape[0]:
            k, v = (tensor[rows] for tensor in self.kv)
            grads = partial_attention_backward(grad, q, k, v, out, lse, causal=True, kernel=self.kernel)
            self.own_grads.append((rows, grads))

    def attend(self, kv: Tensor, first_query: int) -> _Pair:
        """Gradients of these keys and values, which the queries from ``first_query`` on see."""
        saved = (tensor[:, :, first_query:].contiguous() if first_query else tensor for tensor in self.saved)
        grad, q, out, lse = saved
        inputs = grad, q, *_unstack(kv), out, lse
        grad_q, grad_k, grad_v = partial_attention_backward(*inputs, causal=False, kernel=self.kernel)
        self.grads_q.append((first_query, grad_q))
        return grad_k, grad_v

    def grad_q(self, *, wide: bool) -> Tensor:
        """The sum of all contributions, in q's dtype; ``wide``: added in the log-sum-exp's."""
        _, q, _, lse = self.saved
        total = _in_projection_order(torch.empty_like(q, dtype=lse.dtype if wide else q.dtype))
        for rows, (grad_q, *_) in self.own_grads:
            total[rows] = grad_q
        for first_query, grad_q in self.grads_q:  # those of lower ranks' keys come first, gathered or in a ring
            total[:, :, first_query:] += grad_q
        return total.to(q.dtype)

    def own_grads_kv(self, *, wide: bool) -> Tensor:
        """Gradients [2, B, S, K, H] of the rank's own keys and values by its own queries."""
        grads_kv = torch.empty_like(_stack(*self.kv), dtype=self.saved[-1].dtype if wide else None)
        for rows, (_, *grads) in self.own_grads:
            for target, grad in zip(grads_kv, grads, strict=True):
                target[rows] = grad.transpose(1, 2)
        return grads_kv


def _send_to_owners(state: _Backward, incoming: Tensor, name: str, rank: int, size: int) -> Tensor:
    """Attend to the gathered keys of other ranks, and start the all-to-all of their gradients."""
    # A reduce-scatter would send zeros for tail runs that nobody looked at, wait for the rank's own gradients, and
    # round each partial sum to bfloat16. Here the owner adds what arrives.
    q, run = state.saved[1], state.run
    heads, width = state.kv[0].shape[1], state.kv[0].shape[3]
    sent, received = _rows(q, rank, size)
    buffer = state.kv[0].new_empty(sum(sent), heads, width)
    lower_kv, higher_kv = _lower_and_higher(compat.wait(incoming), rank, size)
    grads: dict[int, _Pair] = {}
    if lower_kv is not None:
        grads |= enumerate(_by_rank(state.attend(lower_kv, 0), run))
    if higher_kv is not None:
        grads |= enumerate(_by_rank(state.attend(higher_kv, run), 2 * run), rank + 1)
    for peer, piece in enumerate(buffer.split(sent)):
        if peer != rank:
            targets = piece.view(2, q.shape[0], -1, heads, width)
            for target, grad in zip(targets, grads[peer], strict=True):
                target.copy_(grad.transpose(1, 2))
    return compat.start_all_to_all(buffer, received, sent, name)


def _send_around(state: _Backward, incoming: Tensor, name: str, rank: int, size: int) -> Tensor:
    """Attend to the keys of other ranks in turn; the sums of their gradients follow them, and end at their owners."""
    outgoing, run = incoming, state.run
    for distance in range(1, size):
        kv = compat.wait(incoming)
        if distance + 1 < size:
            incoming = _pass_on(kv, name, rank, size)
        # with more than two ranks several add to it, in float32 or wider
        share = torch.zeros_like(kv, dtype=state.saved[-1].dtype if size > 2 else None)
        if distance <= rank:
            grads, targets = state.attend(_head_run(kv), 0), share[:, :, :run]
        else:
            grads, targets = state.attend(kv, run), share
        for target, grad in zip(targets, grads, strict=True):
            target.copy_(grad.transpose(1, 2))
        if distance > 1:
            share += compat.wait(outgoing)
        outgoing = _pass_on(share, name, rank, size)
    return outgoing


def _rows(q: Tensor, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Rows [K, H] of gradients to and from each rank: of lower ranks' head runs, of both runs of higher ones."""
    full = 2 * q.shape[0] * q.shape[2]
    sent = [full // 2] * rank + [0] + [full] * (size - rank - 1)
    return sent, [full] * rank + [0] + [full // 2] * (size - rank - 1)


def _by_rank(grads: _Pair, length: int) -> list[_Pair]:
    return list(zip(*(grad.split(length, dim=2) for grad in grads), strict=True))


def _stack(k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    return torch.stack((k_BKSH.transpose(1, 2), v_BKSH.transpose(1, 2)))


def _unstack(kv: Tensor) -> _Pair:
    """Keys and values [B, K, S, H] of a pair; views."""
    k_BKSH, v_BKSH = kv.transpose(2, 3).unbind()
    return k_BKSH, v_BKSH


def _head_run(kv: Tensor) -> Tensor:
    return kv[:, :, : kv.shape[2] // 2]


def _in_projection_order(x_BNSH: Tensor) -> Tensor:
    """In the memory order B, S, N, H, which the next projection reads without a copy."""
    return x_BNSH.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_in_projection_order(like_BNSH: Tensor) -> Tensor:
    return torch.empty_like(like_BNSH.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _lower_and_higher(kv: Tensor, rank: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values of lower ranks' head runs and of all of higher ranks', or None if there are none."""
    shards = kv.chunk(size)
    return _concatenate([_head_run(shard) for shard in shards[:rank]]), _concatenate(list(shards[rank + 1 :]))


def _concatenate(pairs: list[Tensor]) -> Tensor | None:
    """Along the positions; a single one is not copied."""
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    return torch.cat(pairs, dim=2)


def _pass_on(kv: Tensor, name: str, rank: int, size: int) -> Tensor:
    """Send to the next rank and start to receive from the previous one."""
    sent, received = [0] * size, [0] * size
    sent[(rank + 1) % size], received[(rank - 1) % size] = kv.shape[0], kv.shape[0]
    return compat.start_all_to_all(kv, received, sent, name)
