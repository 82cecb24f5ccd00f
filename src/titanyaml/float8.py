"""Matmuls in float8 and MX by torchao: the only file that imports it, and only where a recipe is on.

torchao's training functions are not a public interface. Its import takes seconds and prints about extensions that
these matmuls do not use.
"""

import dataclasses
import importlib
import logging
from importlib import metadata
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import local, place_like
from titanyaml.errors import PipelineError

#: Releases that this file was run with: 0.17 on an H200, 0.18 on CPUs.
TRIED_TORCHAO = ("0.17", "0.18")
#: Loggers that speak while torchao is imported: extensions for other devices, enum classes that torch.compile knows.
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")


class Float8Matmul:
    """x @ weight^T (+ bias); the operands of the three matmuls of a step are cast to float8.

    Scales are those of the tensors given, of a rank's shard under tp. With scales per row the result is then what one
    process computes, except for rows that a split shortens. With one scale a tensor a shard has a scale of its own,
    which is never coarser than that of the full tensor, and costs no communication.

    Args:
        recipe: ``float8_tensorwise``, ``float8_rowwise`` or ``float8_rowwise_with_gw_hp``.
        emulate: cast as the recipe says, multiply in float32.
        recast_weight: cast the weight again in the backward pass; else its float8 copy is kept for it.
    """

    def __init__(self, recipe: str, *, emulate: bool, recast_weight: bool = True) -> None:
        ao = _import("torchao.float8")
        linear, tensor = (_import(f"torchao.float8.{name}") for name in ("float8_linear", "float8_training_tensor"))
        base = ao.Float8LinearConfig.from_recipe_name(recipe.removeprefix("float8_"))
        self.config = dataclasses.replace(base, emulate=emulate)
        self._weight_dtype = self.config.cast_config_weight.target_dtype
        gemms = (base.gemm_config_output, base.gemm_config_grad_input, base.gemm_config_grad_weight)
        self.gemms = tensor.LinearMMConfig(
            *(tensor.ScaledMMConfig(emulate, gemm.use_fast_accum, False, base.pad_inner_dim) for gemm in gemms)
        )
        self.recast_weight = recast_weight
        self._multiply = linear.matmul_with_hp_or_float8_args.apply
        self._cast = _import("torchao.float8.float8_scaling_utils").hp_tensor_to_float8_dynamic
        self._role = tensor.GemmInputRole.WEIGHT
        # Nothing to convert here: the call fixes Inductor's float8 code in releases that need it.
        ao.convert_to_float8_training(nn.Module())

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] and weight [N, K], in x's dtype or gathered in float8 by FSDP, to [..., N] in x's dtype."""
        if not self.recast_weight:
            weight = self._cast(weight, self._weight_dtype, self.gemms, gemm_input_role=self._role)
        out = self._multiply(x, weight.t(), self.gemms, self.config)
        return out if bias is None else out + bias

    def wrap_for_gather(self, weight: nn.Parameter) -> nn.Parameter:
        """The same weight as a parameter that FSDP casts to float8, with one scale, before it gathers it."""
        wrapper = _import("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
        return nn.Parameter(wrapper(weight.detach(), self.gemms, self._weight_dtype), weight.requires_grad)


class MXMatmul:
    """x @ weight^T (+ bias) with operands in mxfp8: e4m3 with one power-of-two scale per 32 numbers along the sum."""

    def __init__(self, *, emulate: bool) -> None:
        try:
            module = _import("torchao.prototype.moe_training.mxfp8_linear", quiet=emulate)  # 0.18
        except PipelineError:
            module = _import("torchao.prototype.mx_formats.mx_linear", quiet=emulate)  # 0.17
        preference = _import("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
        self._multiply = module._to_mxfp8_then_scaled_mm
        self._options = {
            "kernel_preference": preference.EMULATED if emulate else preference.AUTO,
            "scale_calculation_mode": module.ScaleCalculationMode.RCEIL,
        }

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``Float8Matmul.__call__``."""
        out = self._multiply(x, weight, **self._options)
        return out if bias is None else out + bias


@torch.no_grad()
def precompute_scales(weights: list[Tensor]) -> None:
    """Compute the scales of all weights from ``Float8Matmul.wrap_for_gather`` for their next gather: one all-reduce."""
    dtensors = cast(list[DTensor], weights)
    mesh = dtensors[0].device_mesh
    axis_names = enumerate(mesh.mesh_dim_names or ())
    [shard_axis] = [axis for axis, name in axis_names if name not in ("dp_replicate", "tp")]
    inner: list[Any] = [compat.local_shard_object(weight) for weight in dtensors]
    # a rank may hold nothing of a small weight
    amax = torch.stack([shard.abs().max() if shard.numel() else shard.new_zeros(()) for shard in map(unwrap, inner)])
    amax = compat.all_reduce(amax, "max", mesh.get_group(shard_axis).group_name)
    to_scale = _import("torchao.float8.float8_utils").amax_to_scale
    for shard, scale in zip(inner, to_scale(amax, inner[0]._dtype), strict=True):
        shard._precomputed_scale = scale


def is_gathered_in_float8(tensor: Tensor) -> bool:
    """Whether a parameter, or a DTensor's shard, is a wrapper that FSDP gathers in float8 (torchao's, or ours)."""
    return hasattr(local(tensor), "fsdp_pre_all_gather")


def unwrap(tensor: Tensor) -> Tensor:
    """The high-precision tensor inside a weight that is gathered in float8, sharing memory; any other as it is."""
    if not is_gathered_in_float8(tensor):
        return tensor
    wrapper: Any = local(tensor)
    return place_like(wrapper._tensor, tensor)


def _import(name: str, *, quiet: bool = True) -> Any:
    """A module of torchao; a PipelineError if torchao is missing, or of a version that this file does not know."""
    noisy = [logging.getLogger(logger) for logger in _NOISY_LOGGERS if quiet]
    levels = [logger.level for logger in noisy]
    for logger in noisy:
        logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        try:
            installed = f"torchao {metadata.version('torchao')} is installed"
            installed += f"; {' and '.join(TRIED_TORCHAO)} are known to work"
        except metadata.PackageNotFoundError:
            installed = "torchao is not installed"
        problem = f"cannot import {name}: {error}; {installed}"
        hint = "pip install torchao==0.18.0, or quant=none"
        raise PipelineError(problem, key="quant.recipe", hint=hint) from error
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)
