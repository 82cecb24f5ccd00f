"""Noise on the token embeddings while training, as in NEFTune (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanyaml.errors import Problem
from titanyaml.pipeline.protocol import Change, Context


class EmbeddingNoise:
    """Add noise, uniform in +-alpha / sqrt(S * D), to the embeddings [B, S, D] of every training forward.

    Args:
        alpha: strength.
    """

    stage = "model"
    before = ("ac",)

    def __init__(self, *, alpha: float) -> None:
        self.alpha = alpha

    def check(self, ctx: Context) -> list[Problem]:
        """The strength is not negative."""
        if self.alpha >= 0:
            return []
        return [Problem("pipeline.plugins.noise.alpha", f"is {self.alpha}", allowed="0 or more")]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Hook the embedding; no parameter is added or renamed."""
        if self.alpha == 0:
            return model, Change("alpha is 0", [])
        name = ctx.facts.embedding
        model.get_submodule(name).register_forward_hook(self._perturb)
        return model, Change(f"training forwards add noise of alpha={self.alpha:g} to the embeddings", [name])

    def _perturb(self, module: nn.Module, args: tuple, out_BSD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # validation and sampling stay exact
            return out_BSD
        bound = self.alpha / (out_BSD.shape[1] * out_BSD.shape[2]) ** 0.5
        return out_BSD + torch.empty_like(out_BSD).uniform_(-bound, bound)
