"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanyaml.config import schema
from titanyaml.optim.adamw import AdamW as AdamW
from titanyaml.optim.adamw import Optimizer as Optimizer
from titanyaml.optim.compiled import CompiledAdamW
from titanyaml.optim.fused import FusedAdamW, fits
from titanyaml.optim.lowbit import LowBitAdamW


def build(
    spec: schema.Optim,
    named_params: Mapping[str, nn.Parameter],
    *,
    masters: Mapping[str, Tensor],
    device: torch.device | str,
    elsewhere: Mapping[str, Tensor] | None = None,
    fused: bool = False,
    one_backward: bool = False,
    compiled: str = "",
) -> AdamW:
    """The optimizer that ``spec`` names.

    Args:
        named_params: trainable parameters by name; one that comes under several names (tied) counts once, under the
            first.
        masters: by parameter name, of every parameter that is narrower than float32: full-precision copies, or what
            is left of split ones (``kernels.master``).
        device: where the parameters are.
        elsewhere: parameters that only other ranks hold, on meta: a pattern may match those alone.
        fused: use our own kernel where it can be used and ``spec.implementation`` is auto.
        compiled: backend of torch.compile that makes a graph of the update; "": none does.
        one_backward: a step has a single backward pass, so that there is nothing to add up.

    Raises:
        ConfigError: a pattern of ``spec.groups`` has no effect.
    """
    on_gpu = torch.device(device).type == "cuda"
    if spec.name != "adamw":
        return LowBitAdamW(spec, named_params, masters=masters, compiled=on_gpu, elsewhere=elsewhere)
    implementation = spec.implementation
    if compiled:
        return CompiledAdamW(
            spec, named_params, masters=masters, one_backward=one_backward, backend=compiled, elsewhere=elsewhere
        )
    if implementation == "auto" and fused and fits(named_params, masters):
        return FusedAdamW(spec, named_params, masters=masters, one_backward=one_backward, elsewhere=elsewhere)
    if implementation == "auto":
        implementation = "fused" if on_gpu else "foreach"
    return AdamW(spec, named_params, masters=masters, implementation=implementation, elsewhere=elsewhere)
