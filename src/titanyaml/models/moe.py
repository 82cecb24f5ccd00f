"""Mixture of experts: a router sends each token to a few feed-forwards, whose outputs are added up; none is dropped.

Shapes: B batch, S sequence, D model width, F inner width of an expert, E experts, K experts of a token, G groups of
experts, N = B*S tokens, M = N*K (token, expert) pairs sorted by expert.

What the loop has to know of a router (how often each expert was chosen, the balance loss) leaves it as the *gradient of
a buffer*: zeros that enter the forward without an effect and get these numbers in the backward pass. So they are
counted once a microbatch also where activations are recomputed, a compiled block stays free of side effects, and no
block has to return more than its output. The same function adds the balance loss's own gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titanyaml.config.schema import Model
from titanyaml.config.schema import MoE as Spec
from titanyaml.distributed.tensor import TensorGroup, all_reduce_sum
from titanyaml.models.grouped import grouped_linear
from titanyaml.models.layers import FeedForward, at_least_float32


def is_mixture(spec: Model, index: int) -> bool:
    """Whether block ``index`` is a mixture."""
    moe = spec.moe
    return moe.num_experts > 0 and index >= moe.first_dense and (index + 1) % moe.every == 0


def expert_biases(model: nn.Module) -> dict[str, Tensor]:
    """The routers' biases by name: beside the parameters, what a checkpoint holds of a model."""
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    return {f"{name}.bias_E": router.bias_E for name, router in routers.items() if router.spec.bias_rate}


class MoE(nn.Module):
    """Router, experts and, where there is one, the expert that every token passes."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        moe = spec.moe
        self.router = Router(moe, spec.dim)
        self.experts = Experts(moe, spec.dim, ffn_dim=moe.ffn_dim or spec.ffn_dim)
        self.shared = FeedForward(spec.dim, ffn_dim=moe.shared_ffn_dim) if moe.shared_ffn_dim else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD = self.experts(x_BSD, *self.router(x_BSD)).view_as(x_BSD)
        return out_BSD if self.shared is None else out_BSD + self.shared(x_BSD)


class Router(nn.Module):
    """Scores every expert for every token and chooses; computes in float32 or wider.

    Buffers:
        bias_E: added to the scores for the choice alone (only with ``bias_rate``); saved in checkpoints.
        load_E, balance: zeros whose *gradients* are the pairs sent to each expert and the sum over tokens of their
            sequence's balance loss, of this rank's forwards since the gradients were last cleared.
        gain: factor of the balance loss in what is differentiated.
    """

    #: Ranks that hold a slice each of the same sequences; None: whole sequences are here.
    peers: TensorGroup | None = None

    def __init__(self, spec: Spec, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, dim))
        if spec.bias_rate:
            self.register_buffer("bias_E", torch.empty(spec.num_experts))
        for name in ("load_E", "balance", "gain"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.init_buffers(self.weight.device)

    def init_buffers(self, device: torch.device, *, dtype: torch.dtype = torch.float32) -> None:
        """No bias, no loads; ``dtype`` float32 or float64 (float32 counts up to 2**24 pairs exactly)."""
        if self.spec.bias_rate:
            self.bias_E = torch.zeros(self.spec.num_experts, dtype=dtype, device=device)
        self.load_E = torch.zeros(self.spec.num_experts, dtype=dtype, device=device, requires_grad=True)
        self.balance = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        self.gain = torch.zeros((), dtype=dtype, device=device)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose.

        Returns:
            ids [B, S, K] int64, best first; weights [B, S, K] in float32 or wider; pairs of each expert [E] int64.
        """
        spec, wide = self.spec, at_least_float32(x_BSD.dtype)
        logits_BSE = F.linear(x_BSD.to(wide), self.matrix().to(wide))
        scores_BSE = logits_BSE.softmax(-1) if spec.score == "softmax" else logits_BSE.sigmoid()
        ids_BSK = self._choose(scores_BSE.detach())
        weights_BSK = scores_BSE.gather(-1, ids_BSK)
        if spec.normalize:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        counts_BE = _counts(ids_BSK, spec.num_experts)
        if torch.is_grad_enabled():
            balance = self._balance(scores_BSE, counts_BE) if spec.balance_loss else scores_BSE.new_zeros(())
            load_E = counts_BE.sum(0).to(wide)
            weights_BSK = _Report.apply(weights_BSK, balance, self.gain, load_E, self.load_E, self.balance)
        return ids_BSK, weights_BSK * spec.scale, counts_BE.sum(0)

    def matrix(self) -> Tensor:
        """The weight [E, D]."""
        return self.weight

    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """The K best experts, of the best groups where there are groups.

        A group is as good as its two best experts together (DeepSeek-AI 2024, DeepSeek-V3).
        """
        spec = self.spec
        if spec.bias_rate:
            scores_BSE = scores_BSE + self.bias_E.to(scores_BSE.dtype)
        if spec.num_groups > 1:
            scores_BSGe = scores_BSE.unflatten(-1, (spec.num_groups, -1))
            best_BSG = scores_BSGe.topk(min(2, scores_BSGe.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best_BSG, dtype=torch.bool)
            kept = kept.scatter(-1, best_BSG.topk(spec.top_groups, dim=-1).indices, True)
            scores_BSE = scores_BSGe.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores_BSE.topk(spec.top_k, dim=-1).indices

    def _balance(self, scores_BSE: Tensor, counts_BE: Tensor) -> Tensor:
        """Sum over tokens of the balance loss of their sequence; 0-dim.

        Per sequence sum_e f_e P_e, f_e = E/(K S) * tokens sent to e, P_e = mean share of e in the tokens' scores
        (DeepSeek-AI 2024, equations 17 to 20). 1 where everything is even.
        """
        spec, tokens = self.spec, scores_BSE.shape[1]
        shares_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).sum(1)
        counts_BE = counts_BE.to(shares_BE.dtype)
        if self.peers is not None:
            shares_BE, counts_BE = all_reduce_sum(torch.stack((shares_BE, counts_BE)), self.peers).unbind()
            tokens *= self.peers.size
        return (counts_BE * shares_BE).sum() * (spec.num_experts / (spec.top_k * tokens))


class Experts(nn.Module):
    """Feed-forwards with their matrices stacked: w1 (gate) and w3 (up) [E, F, D], w2 (down) [E, D, F]."""

    def __init__(self, spec: Spec, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.top_k, self.weight_at = spec.top_k, spec.weight_at
        self.w1 = nn.Parameter(torch.empty(spec.num_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(spec.num_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(spec.num_experts, ffn_dim, dim))

    def forward(self, x_BSD: Tensor, ids_BSK: Tensor, weights_BSK: Tensor, counts_E: Tensor) -> Tensor:
        """Sum over a token's experts of weight * expert(x), or of expert(weight * x).

        Args:
            ids_BSK, weights_BSK, counts_E: as ``Router.forward`` returns them.

        Returns:
            [N, 1, D]; not a view of it, which FSDP's hooks on this module would warn of.
        """
        x_ND, weights_NK = x_BSD.flatten(0, 1), weights_BSK.flatten(0, 1)
        order_M = ids_BSK.flatten().argsort(stable=True)  # pair m of the sorted ones is pair order_M[m] of [N, K]
        place_M = inverse(order_M)
        x_MD = _Rows.apply(x_ND, order_M // self.top_k, place_M, self.top_k)
        if self.weight_at == "input":
            x_MD = x_MD * weights_NK.flatten()[order_M].unsqueeze(1).to(x_MD.dtype)
        y_MD = self.compute(x_MD, counts_E)
        y_NKD = _Rows.apply(y_MD, place_M, order_M, 1).unflatten(0, (-1, self.top_k))
        if self.weight_at == "input":
            return y_NKD.sum(1, keepdim=True)
        return torch.bmm(weights_NK.unsqueeze(1).to(y_NKD.dtype), y_NKD)

    def compute(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Every row through its expert: the first ``counts_E[0]`` rows through the first one, and so on. [M, D]."""
        w1_EFD, w2_EDF, w3_EFD = self.matrices()
        h_MF = F.silu(grouped_linear(x_MD, w1_EFD, counts_E)) * grouped_linear(x_MD, w3_EFD, counts_E)
        return grouped_linear(h_MF, w2_EDF, counts_E)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w2, w3."""
        return self.w1, self.w2, self.w3


def inverse(order_M: Tensor) -> Tensor:
    """Where each number 0..M-1 stands in a permutation of them."""
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


def take_rows(x_MD: Tensor, order_M: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in another order, and the order that takes them back."""
    back_M = inverse(order_M)
    return _Rows.apply(x_MD, order_M, back_M, 1), back_M


def _counts(ids_BSK: Tensor, num_experts: int) -> Tensor:
    """Pairs of each expert in each sequence, [B, E] int64."""
    ids_BP = ids_BSK.flatten(1)
    return ids_BP.new_zeros(ids_BP.shape[0], num_experts).scatter_add_(1, ids_BP, torch.ones_like(ids_BP))


class _Report(torch.autograd.Function):
    """Identity on the weights. Its backward hands out the load and the balance loss, and ``gain`` to the latter."""

    @staticmethod
    def forward(
        ctx: Any,
        weights_BSK: Tensor,
        balance: Tensor,
        gain: Tensor,
        load_E: Tensor,
        load_buffer_E: Tensor,
        balance_buffer: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(balance, gain, load_E)
        return weights_BSK.view_as(weights_BSK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSK: Tensor) -> tuple[Tensor | None, ...]:
        balance, gain, load_E = ctx.saved_tensors
        return grad_BSK, gain.clone(), None, None, load_E.clone(), balance.clone()


class _Rows(torch.autograd.Function):
    """``x[source]``, where every row of x is taken ``copies`` times: the backward pass gathers too, and adds nothing up
    in an order of its own. ``places``: where the copies of x's rows are, one row's after the other's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        return x[source]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [places] = ctx.saved_tensors
        grad = grad[places]
        return (grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1)), None, None, None
