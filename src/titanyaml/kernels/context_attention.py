"""Causal attention over keys that lie on other ranks, forward and backward, with the transfers inside.

Every rank holds queries, keys and values of a head and a tail run of positions (``dist.context.head_tail_positions``).
Then the work falls into parts without masks, equally much on each rank: with its own keys a rank is causal; of a lower
rank all its queries see the head run; of a higher rank its tail queries see both runs.

- ``gathered``: keys and values of all ranks at once; at most three parts, whatever the number of ranks. The backward
  gathers them again, so that only a rank's own are kept.
- ``ring``: keys and values go around; while one rank's are used, the next are on their way. Nobody ever holds more than
  two ranks' (Liu et al. 2023). Their gradients go around with them, in float32 or wider.

Shapes: B batch, N query heads, K key/value heads, S positions of a rank (C = S/2 a run), H head size, W ranks; a pair
``kv`` is [2, B, K, S, H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanyaml.dist import compat
from titanyaml.dist.tensor import TensorGroup
from titanyaml.kernels.attention import Kernel, merge, part_backward, part_forward


def gathered(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: TensorGroup, *, kernel: Kernel) -> Tensor:
    """Attention [B, N, S, H] of this rank's queries, by an all-gather of keys and values."""
    return _Gathered.apply(q_BNSH, k_BKSH, v_BKSH, group.name, group.rank, group.size, kernel)


def ring(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: TensorGroup, *, kernel: Kernel) -> Tensor:
    """Attention [B, N, S, H] of this rank's queries, by passing keys and values around."""
    return _Ring.apply(q_BNSH, k_BKSH, v_BKSH, group.name, group.rank, group.size, kernel)


class _Forward:
    """Output and log-sum-exp of a rank's queries, part by part."""

    def __init__(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, kernel: Kernel) -> None:
        self.q, self.kernel, self.run = q_BNSH, kernel, q_BNSH.shape[2] // 2
        out, self.lse = part_forward(q_BNSH, k_BKSH, v_BKSH, causal=True, kernel=kernel)
        self.out = out.to(self.lse.dtype)

    def lower(self, kv: tuple[Tensor, Tensor]) -> None:
        """All queries see these keys."""
        part = part_forward(self.q, *kv, causal=False, kernel=self.kernel)
        self.out, self.lse = merge(self.out, self.lse, *part)

    def higher(self, kv: tuple[Tensor, Tensor]) -> None:
        """The tail queries see these keys."""
        run = self.run
        part = part_forward(self.q[:, :, run:], *kv, causal=False, kernel=self.kernel)
        out, lse = merge(self.out[:, :, run:], self.lse[:, :, run:], *part)
        self.out = torch.cat((self.out[:, :, :run], out), dim=2)
        self.lse = torch.cat((self.lse[:, :, :run], lse), dim=2)


class _Backward:
    """Gradient of a rank's queries, part by part; each part returns the gradients of its keys and values."""

    def __init__(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kernel: Kernel) -> None:
        self.known, self.kernel, self.run = (grad, q, out, lse), kernel, q.shape[2] // 2
        grad_q, *self.own = part_backward(grad, q, k, v, out, lse, causal=True, kernel=kernel)
        self.grad_q = grad_q.to(lse.dtype)

    def lower(self, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        grad, q, out, lse = self.known
        grad_q, *grads = part_backward(grad, q, *kv, out, lse, causal=False, kernel=self.kernel)
        self.grad_q = self.grad_q + grad_q
        return tuple(grads)

    def higher(self, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        grad, q, out, lse = (tensor[:, :, self.run :].contiguous() for tensor in self.known)
        grad_q, *grads = part_backward(grad, q, *kv, out, lse, causal=False, kernel=self.kernel)
        head, tail = self.grad_q.split(self.run, dim=2)
        self.grad_q = torch.cat((head, tail + grad_q), dim=2)
        return tuple(grads)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, rank: int, size: int, kernel: Kernel
    ) -> Tensor:
        coming = compat.start_all_gather(torch.stack((k, v)), size, name)
        state = _Forward(q, k, v, kernel)
        lower, higher = _lower_and_higher(compat.wait(coming), rank, size)
        if lower is not None:
            state.lower(lower)
        if higher is not None:
            state.higher(higher)
        out = state.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, state.lse)
        ctx.place = name, rank, size, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, rank, size, kernel = ctx.place
        q, k, v, out, lse = ctx.saved_tensors
        coming = compat.start_all_gather(torch.stack((k, v)), size, name)
        state = _Backward(grad, q, k, v, out, lse, kernel)
        lower, higher = _lower_and_higher(compat.wait(coming), rank, size)
        run, shares = q.shape[2] // 2, []  # of each rank in turn: gradients [2, B, K, S, H] of its keys and values
        if lower is not None:
            heads = torch.stack(state.lower(lower))
            tail = torch.zeros_like(heads[..., :run, :])
            shares += [torch.cat((head, tail), dim=3) for head in heads.split(run, dim=3)]
        shares.append(torch.stack(state.own))
        if higher is not None:
            shares += torch.stack(state.higher(higher)).split(2 * run, dim=3)
        grad_k, grad_v = compat.reduce_scatter(torch.cat(shares), size, name)
        return state.grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _lower_and_higher(kv: Tensor, rank: int, size: int) -> tuple[Any, Any]:
    """Keys and values of lower ranks' head runs and of all of higher ranks', or None where there are none."""
    ranks = kv.chunk(size)
    run = kv.shape[3] // 2
    lower = torch.cat([one[..., :run, :] for one in ranks[:rank]], dim=3).unbind() if rank else None
    higher = torch.cat(ranks[rank + 1 :], dim=3).unbind() if rank + 1 < size else None
    return lower, higher


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, name: str, rank: int, size: int, kernel: Kernel
    ) -> Tensor:
        run = q.shape[2] // 2
        kv = torch.stack((k, v))
        coming = _pass_on(kv, name, rank, size)
        state = _Forward(q, k, v, kernel)
        for distance in range(1, size):
            kv = compat.wait(coming)
            if distance + 1 < size:
                coming = _pass_on(kv, name, rank, size)
            if distance <= rank:
                state.lower(kv[..., :run, :].unbind())
            else:
                state.higher(kv.unbind())
        out = state.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, state.lse)
        ctx.place = name, rank, size, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, rank, size, kernel = ctx.place
        q, k, v, out, lse = ctx.saved_tensors
        run = q.shape[2] // 2
        kv = torch.stack((k, v))
        coming = _pass_on(kv, name, rank, size)
        state = _Backward(grad, q, k, v, out, lse, kernel)
        grads = torch.stack(state.own).to(lse.dtype)  # of the keys that are here, on their way with them
        for distance in range(1, size):
            kv, grads_coming = compat.wait(coming), _pass_on(grads, name, rank, size)
            if distance + 1 < size:
                coming = _pass_on(kv, name, rank, size)
            if distance <= rank:
                head = torch.stack(state.lower(kv[..., :run, :].unbind()))
                share = torch.cat((head, torch.zeros_like(head)), dim=3)
            else:
                share = torch.stack(state.higher(kv.unbind()))
            grads = compat.wait(grads_coming) + share
        grad_k, grad_v = compat.wait(_pass_on(grads, name, rank, size)).to(k.dtype)
        return state.grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _pass_on(kv: Tensor, name: str, rank: int, size: int) -> Tensor:
    """Send to the next rank and start to receive from the previous one."""
    sent, received = [0] * size, [0] * size
    sent[(rank + 1) % size], received[(rank - 1) % size] = kv.shape[0], kv.shape[0]
    return compat.start_exchange(kv, received, sent, name)
