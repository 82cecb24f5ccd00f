"""Optimizers and learning-rate schedules."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from titanyaml.config import schema
from titanyaml.optim.adamw import AdamW as AdamW
from titanyaml.optim.adamw import TrainedParameters
from titanyaml.optim.adamw_backends import CompiledAdamW, TritonAdamW, kernel_supports
from titanyaml.optim.lowbit_adamw import LowBitAdamW


def build(
    spec: schema.Optim,
    named_params: Mapping[str, nn.Parameter],
    *,
    masters: Mapping[str, Tensor],
    device: torch.device | str,
    remote_params: Mapping[str, Tensor] | None = None,
    fused: bool = False,
    one_backward: bool = False,
    compiled: str = "",
) -> AdamW:
    """Build the optimizer that ``spec`` describes; ConfigError where a pattern of ``spec.groups`` has no effect.

    Args:
        named_params, masters, remote_params: see ``TrainedParameters``.
        fused: with ``spec.implementation=auto``, use our Triton kernel where it supports the parameters.
        one_backward: a step has a single backward pass, so gradients need no accumulation.
        compiled: torch.compile backend for the update; "" leaves it uncompiled.
    """
    params = TrainedParameters.of(named_params, masters, remote_params or {})
    on_gpu = torch.device(device).type == "cuda"
    if spec.name != "adamw":
        return LowBitAdamW(spec, params, compiled=on_gpu)
    if compiled:
        return CompiledAdamW(spec, params, one_backward=one_backward, backend=compiled)
    if spec.implementation != "auto":
        return AdamW(spec, params, implementation=spec.implementation)
    if fused and kernel_supports(params):
        return TritonAdamW(spec, params, one_backward=one_backward)
    return AdamW(spec, params, implementation="fused" if on_gpu else "foreach")
