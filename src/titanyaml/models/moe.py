"""Mixture of experts: a router sends each token to a few feed-forwards, whose weighted outputs are summed.

No token is dropped: an expert has no capacity, its GEMM has as many rows as tokens chose it.

Shapes: B batch, S sequence, D model width, F inner width of an expert, E experts, K experts per token, G groups of
experts, N = B*S tokens, M = N*K (token, expert) pairs sorted by expert.
"""

from collections.abc import Callable
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


def expert_biases(model: nn.Module) -> dict[str, Tensor]:
    """The routers' biases by name: the only buffers that a checkpoint holds."""
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    return {f"{name}.bias_E": router.bias_E for name, router in routers.items() if router.spec.bias_rate}


class MixtureOfExperts(nn.Module):
    """Router, routed experts and, with ``shared_ffn_dim``, a shared expert that every token passes."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        moe = spec.moe
        self.router = Router(moe, spec.dim)
        self.experts = Experts(moe, spec.dim, ffn_dim=moe.ffn_dim or spec.ffn_dim)
        self.shared = FeedForward(spec.dim, ffn_dim=moe.shared_ffn_dim) if moe.shared_ffn_dim else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.experts(x_BSD, *self.router(x_BSD)).view_as(x_BSD)
        return out_BSD if self.shared is None else out_BSD + self.shared(x_BSD)


class Router(nn.Module):
    """Scores every expert for every token and chooses the K best.

    Buffers:
        bias_E: added to the scores for the choice alone (only with ``bias_rate``); saved in checkpoints.
        load_E: its *gradient* is the number of pairs sent to each expert by this rank since gradients were cleared.
        balance: its *gradient* is the sum over these tokens of their sequence's balance loss.
        gain: factor of the balance loss in the differentiated loss; the loop sets it, which knows the token count.
    """

    #: Ranks that each hold a slice of the same sequences (sequence parallelism); None: sequences are whole.
    peers: TensorGroup | None = None
    bias_E: Tensor
    load_E: Tensor
    balance: Tensor
    gain: Tensor

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
        """Zero all buffers; ``dtype`` float32 (counts up to 2**24 pairs exactly) or float64."""
        if self.spec.bias_rate:
            self.bias_E = torch.zeros(self.spec.num_experts, dtype=dtype, device=device)
        self.load_E = torch.zeros(self.spec.num_experts, dtype=dtype, device=device, requires_grad=True)
        self.balance = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        self.gain = torch.zeros((), dtype=dtype, device=device)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [B, S, K] int64, best first; weights [B, S, K] in float32 or wider; pairs per expert [E] int64."""
        # float32 or wider: bfloat16 scores of similar experts would often tie, and their order decides the routing
        spec, wide = self.spec, at_least_float32(x_BSD.dtype)
        logits_BSE = F.linear(x_BSD.to(wide), self.matrix().to(wide))
        scores_BSE = logits_BSE.softmax(-1) if spec.score == "softmax" else logits_BSE.sigmoid()
        ids_BSK = self._choose(scores_BSE.detach())  # gradients flow through the weights, not through the choice
        weights_BSK = scores_BSE.gather(-1, ids_BSK)
        if spec.normalize:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        counts_BE = _counts(ids_BSK, spec.num_experts)
        if torch.is_grad_enabled():
            balance = self._balance(scores_BSE, counts_BE) if spec.balance_loss else scores_BSE.new_zeros(())
            load_E = counts_BE.sum(0).to(wide)
            weights_BSK = _report(weights_BSK, balance, self.gain, load_E, self.load_E, self.balance)
        return ids_BSK, weights_BSK * spec.scale, counts_BE.sum(0)

    def matrix(self) -> Tensor:
        """The weight [E, D]; tensor parallelism overrides this."""
        return self.weight

    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """Ids of the K best experts, with groups only of the best groups (DeepSeek-AI 2024, DeepSeek-V3)."""
        spec = self.spec
        if spec.bias_rate:
            scores_BSE = scores_BSE + self.bias_E.to(scores_BSE.dtype)
        if spec.num_groups > 1:
            scores_BSGe = torch.unflatten(scores_BSE, -1, (spec.num_groups, -1))
            # a group is as good as its two best experts together
            group_scores_BSG = scores_BSGe.topk(min(2, scores_BSGe.shape[-1]), dim=-1).values.sum(-1)
            is_top_BSG = torch.zeros_like(group_scores_BSG, dtype=torch.bool)
            is_top_BSG = is_top_BSG.scatter(-1, group_scores_BSG.topk(spec.top_groups, dim=-1).indices, True)
            scores_BSE = scores_BSGe.masked_fill(~is_top_BSG.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores_BSE.topk(spec.top_k, dim=-1).indices

    def _balance(self, scores_BSE: Tensor, counts_BE: Tensor) -> Tensor:
        """0-dim sum over tokens of their sequence's balance loss (DeepSeek-AI 2024, equations 17 to 20).
        Per sequence sum_e f_e P_e, 1 where loads are even, with f_e = E/(K S) * tokens sent to e and P_e = mean share
        of e in the tokens' scores.
        """
        spec, tokens = self.spec, scores_BSE.shape[1]
        shares_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).sum(1)
        counts_BE = counts_BE.to(shares_BE.dtype)
        if self.peers is not None:  # the loss is not linear in a sequence's tokens: sum its factors over all slices
            shares_BE, counts_BE = all_reduce_sum(torch.stack((shares_BE, counts_BE)), self.peers).unbind()
            tokens *= self.peers.size
        return (counts_BE * shares_BE).sum() * (spec.num_experts / (spec.top_k * tokens))


class Experts(nn.Module):
    """SwiGLU feed-forwards with stacked matrices: w1 (gate) and w3 (up) [E, F, D], w2 (down) [E, D, F]."""

    def __init__(self, spec: Spec, dim: int, *, ffn_dim: int) -> None:
        super().__init__()
        self.top_k, self.weight_at = spec.top_k, spec.weight_at
        self.w1 = nn.Parameter(torch.empty(spec.num_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(spec.num_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(spec.num_experts, ffn_dim, dim))

    def forward(self, x_BSD: Tensor, ids_BSK: Tensor, weights_BSK: Tensor, counts_E: Tensor) -> Tensor:
        """Sum over a token's experts of weight * expert(x), or expert(weight * x); arguments from ``Router.forward``.
        It is [N, 1, D], not viewed as [B, S, D] here: FSDP's hooks on this module warn of views.
        """
        x_ND, weights_NK = x_BSD.flatten(0, 1), weights_BSK.flatten(0, 1)
        # Sorted pair m is pair order_M[m] of [N, K]. Stable: pairs of an expert keep the order of their tokens, so that
        # sums over its rows do not depend on the sorting algorithm.
        order_M = ids_BSK.flatten().argsort(stable=True)
        position_M = inverse(order_M)
        x_MD = _gather_rows(x_ND, order_M // self.top_k, position_M, self.top_k)
        if self.weight_at == "input":
            x_MD = x_MD * weights_NK.flatten()[order_M].unsqueeze(1).to(x_MD.dtype)
        y_MD = self.compute(x_MD, counts_E)
        y_NKD = torch.unflatten(_gather_rows(y_MD, position_M, order_M, 1), 0, (-1, self.top_k))
        if self.weight_at == "input":
            return y_NKD.sum(1, keepdim=True)
        return torch.bmm(weights_NK.unsqueeze(1).to(y_NKD.dtype), y_NKD)

    def compute(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Pass the first ``counts_E[0]`` rows through the first expert, and so on; [M, D]."""
        w1_EFD, w2_EDF, w3_EFD = self.matrices()
        h_MF = F.silu(grouped_linear(x_MD, w1_EFD, counts_E)) * grouped_linear(x_MD, w3_EFD, counts_E)
        return grouped_linear(h_MF, w2_EDF, counts_E)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w2 and w3; tensor and expert parallelism override this."""
        return self.w1, self.w2, self.w3


def inverse(order_M: Tensor) -> Tensor:
    """Inverse of a permutation of 0..M-1."""
    return torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


def take_rows(x_MD: Tensor, order_M: Tensor) -> tuple[Tensor, Tensor]:
    """Permute rows; return also the inverse permutation."""
    back_M = inverse(order_M)
    return _gather_rows(x_MD, order_M, back_M, 1), back_M


def _counts(ids_BSK: Tensor, num_experts: int) -> Tensor:
    """Pairs per sequence and expert, [B, E] int64."""
    ids_BP = ids_BSK.flatten(1)
    return ids_BP.new_zeros(ids_BP.shape[0], num_experts).scatter_add_(1, ids_BP, torch.ones_like(ids_BP))


# How a router reports to the loop: zero buffers enter the forward without effect, and their gradients are the numbers.
# So these are counted once per microbatch even where activations are recomputed, a compiled block has no side effect,
# and a block returns nothing but its output.
class _Report(torch.autograd.Function):
    """Identity on the weights; its backward gives the buffers load and balance loss as their gradients."""

    @staticmethod
    def forward(
        ctx: Any, weights_BSK: Tensor, balance: Tensor, gain: Tensor, load_E: Tensor, *buffers: Tensor
    ) -> Tensor:
        ctx.save_for_backward(balance, gain, load_E)
        return weights_BSK.view_as(weights_BSK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSK: Tensor) -> tuple[Tensor | None, ...]:
        balance, gain, load_E = ctx.saved_tensors
        # The balance loss gets ``gain`` as gradient: it trains the router without being added to the loss. Clones:
        # autograd may keep a gradient as the leaf's ``grad`` and later add to it in place.
        return grad_BSK, gain.clone(), None, None, load_E.clone(), balance.clone()


class _GatherRows(torch.autograd.Function):
    """``x[source]``, taking every row of x ``copies`` times; ``positions``: of the copies, row after row of x."""

    # Indexing's own backward is a scatter-add, whose order of summation is not fixed on a GPU. As the positions of all
    # copies are known, this backward is a gather and a sum over a dimension: deterministic, and without atomics.
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, positions: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.copies = copies
        return x[source]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [positions] = ctx.saved_tensors
        grad = grad[positions]
        grad_x = grad if ctx.copies == 1 else torch.unflatten(grad, 0, (-1, ctx.copies)).sum(1)
        return grad_x, None, None, None


_report: Callable[..., Tensor] = _Report.apply
_gather_rows: Callable[..., Tensor] = _GatherRows.apply
