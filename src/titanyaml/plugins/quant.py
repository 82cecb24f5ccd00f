"""Float8 training: the linear layers multiply in float8; weights and optimizer stay in high precision.

A layer keeps its class, its parameters and their names; only its ``product`` is another one. So tensor parallelism
splits it as it splits any, and calls the same product on local shards.
"""

# torchao's own layer is not used: it changes the class, and needs DTensors for tensor parallelism. Its matmul takes
# plain tensors.

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from titanyaml import float8
from titanyaml.config.decoder_layers import check_filters, reason_for_high_precision
from titanyaml.config.rules.quant import check_capability, check_own_emulation
from titanyaml.config.rules.values import check_values
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError, Problem
from titanyaml.kernels.float8_gather import Float8Gather
from titanyaml.kernels.float8_linear import (
    Float8Operand,
    Float8Options,
    Recipe,
    cast_operand,
    float8_linear,
    gather_operand,
)
from titanyaml.models.layers import Linear
from titanyaml.pipeline.protocol import Change, Context, dtype_name, first_names


class OwnFloat8Matmul:
    """x @ weight^T (+ bias) by ``kernels.float8_linear``."""

    def __init__(
        self, recipe: str, *, fast_accum: bool, grad_dtype: str, fused: bool, recast_weight: bool = True
    ) -> None:
        self.options = Float8Options(
            cast(Recipe, recipe.removeprefix("float8_")),
            fast_accum=fast_accum,
            fused=fused,
            recast_weight=recast_weight,
            grad_dtype={"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[grad_dtype],
        )

    # A compiler would merge equal casts of one input only if they were opaque operators, whose launches cost the host
    # more than they spare the GPU. So attention and feed-forward say which layers share an input.
    def operand(self, x: Tensor) -> Float8Operand:
        """``x`` and its casts, made once for several layers (``models.layers.shared``)."""
        return cast_operand(x, self.options)

    def with_gathered_input(self, group: TensorGroup) -> GatheringFloat8Matmul | None:
        """The same for layers that take a sequence of which each rank holds a slice; None: cast only after a gather."""
        # scales along the tokens, for the weight's gradient, would need the whole sequence
        return None if self.options.rowwise else GatheringFloat8Matmul(self.options, group)

    def __call__(self, x: Tensor | Float8Operand, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = float8_linear(x, weight, self.options)
        return out if bias is None else out + bias


class GatheringFloat8Matmul(OwnFloat8Matmul):
    """Multiplies a sequence of which each rank of ``group`` holds a slice: cast first, so that bytes are gathered."""

    def __init__(self, options: Float8Options, group: TensorGroup) -> None:
        self.options, self.group = options, group

    def operand(self, x: Tensor) -> Float8Operand:
        return gather_operand(x, self.options, self.group)

    def __call__(self, x: Tensor | Float8Operand, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().__call__(x if isinstance(x, Float8Operand) else self.operand(x), weight, bias)


class Quantize:
    """Convert the linear layers of the model. The head is none: the loss uses its weight itself.

    Args:
        recipe: ``float8_tensorwise``: one scale a tensor, gradients in e5m2. ``float8_rowwise``: one power-of-two scale
            a row, all in e4m3. ``float8_rowwise_with_gw_hp``: the same, with the weight's gradient in high precision.
            ``mxfp8``: e4m3 with one scale per 32 numbers. ``none``.
        fsdp_float8_all_gather: FSDP casts weights before it gathers them (``float8_tensorwise``).
        precompute_scale: their scales come from one reduction after each optimizer step, not from one a weight. With
            own GEMMs that is so in any case, and all are cast at once: after the step, or by its first gather.
        force_recompute_weight: no float8 copy of a weight is kept from the forward to the backward pass.
        filter_fqns: parts of the names of layers that stay in high precision.
        auto_filter_small_kn: leave layers alone whose float8 GEMM is likely to be no faster.
        product: ``torchao``, or ``own`` (``kernels.float8_linear``). fast_accum, grad_dtype: of ``own``, for gradients.
        emulate: cast as the recipe says, multiply in high precision: for devices without float8.
    """

    stage = "quant"

    def __init__(
        self,
        *,
        recipe: str,
        fsdp_float8_all_gather: bool = False,
        precompute_scale: bool = False,
        force_recompute_weight: bool = True,
        filter_fqns: list[str] | None = None,
        auto_filter_small_kn: bool = False,
        emulate: bool = False,
        product: str = "torchao",
        fast_accum: bool | None = None,
        grad_dtype: str = "auto",
    ) -> None:
        if grad_dtype == "auto":
            # one scale must serve the largest and the smallest gradient of a tensor: range goes before precision
            grad_dtype = "e5m2" if recipe == "float8_tensorwise" else "e4m3"
        self.product, self.grad_dtype = product, grad_dtype
        self.fast_accum = not emulate if fast_accum is None else fast_accum
        self.recipe, self.emulate = recipe, emulate
        self.float8_gather, self.precompute_scale = fsdp_float8_all_gather, precompute_scale
        self.recast_weight = force_recompute_weight
        self.filter_fqns, self.auto_filter_small_kn = list(filter_fqns or []), auto_filter_small_kn
        self.gathered_weights: Float8Gather | None = None  # of own GEMMs

    def reason_off(self, ctx: Context) -> str:
        return "quant.recipe is none" if self.recipe == "none" else ""

    def check(self, ctx: Context) -> list[Problem]:
        """The device multiplies in the recipe's format (``config/rules/quant.py``)."""
        problems = check_values("quant", recipe=self.recipe)
        if not self.emulate and not problems:
            fixes = ("quant.emulate=true", "quant=none")
            is_gpu = ctx.device.type == "cuda"
            major, minor = torch.cuda.get_device_capability(ctx.device) if is_gpu else (0, 0)
            capability = major + minor / 10 if is_gpu else None
            device = "the GPU" if is_gpu else f"a {ctx.device.type}"
            if lack := check_capability(self.recipe, capability, device, *fixes):
                problems.append(lack)
        if refusal := check_own_emulation(self.product, self.emulate, on_gpu=ctx.device.type == "cuda"):
            problems.append(refusal)
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Give the layers another ``product``.

        Raises:
            PipelineError: no layer is left to convert, or an entry of ``filter_fqns`` names nothing.
        """
        skipped = self._find_skipped(model, ctx)
        # _find_skipped leaves only the model's own Linear
        layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and name not in skipped}
        if ctx.facts.head:
            skipped[ctx.facts.head] = "the head stays in high precision: the loss uses its weight itself"
        if not layers:
            raise self._no_layer(skipped)
        product = self._make_product(ctx)
        for layer in layers.values():  # one object for all: equal blocks then share one compiled graph
            layer.product = product
        summary = self._summary(len(layers), ctx)
        if self.float8_gather and self.product == "own":
            summary = f"{summary}; {self._gather_in_float8(layers, ctx)}"
        elif self.float8_gather:
            assert isinstance(product, float8.Float8Matmul), "mxfp8 weights are not gathered in float8"
            for layer in layers.values():
                layer.weight = product.wrap_for_gather(cast(nn.Parameter, layer.weight))
        return model, Change(summary, list(layers), skipped)

    def _no_layer(self, skipped: dict[str, str]) -> PipelineError:
        reasons = "; ".join(Change("", [], skipped).left_alone())
        fix = "quant.recipe=none"
        if self.filter_fqns:
            fix = "quant.filter_fqns=[]"
        if self.auto_filter_small_kn:
            fix = "quant.auto_filter_small_kn=false"
        message = f"{self.recipe} was asked for, and no layer can be converted: {reasons}"
        return PipelineError(message, key="quant.recipe", hint=fix)

    def _make_product(self, ctx: Context) -> Callable[..., Tensor]:
        if self.recipe == "mxfp8":
            return float8.MXMatmul(emulate=self.emulate)
        if self.product == "torchao":
            return float8.Float8Matmul(self.recipe, emulate=self.emulate, recast_weight=self.recast_weight)
        return OwnFloat8Matmul(
            self.recipe,
            fast_accum=self.fast_accum,
            grad_dtype=self.grad_dtype,
            fused=ctx.kernels.fused,
            recast_weight=self.recast_weight,
        )

    def _gather_in_float8(self, layers: dict[str, Linear], ctx: Context) -> str:
        """Have FSDP gather the weights in float8, for own GEMMs; returns a summary of what is gathered how.

        Raises:
            PipelineError: no weight has equally many rows on each rank.
        """
        ranks = ctx.dims.shard_degree
        # A cast per gather, FSDP's usual hook, would be some thirty launches a block, twice a step (83 of 614 ms on two
        # H200). A copy that is kept costs one byte a number of a shard.
        self.gathered_weights, uneven = Float8Gather(dtype=ctx.compute_dtype, fused=ctx.kernels.fused), []
        for name, layer in layers.items():
            rows = local_shape(name, layer, ctx)[0]
            if rows % ranks:  # FSDP would pad the shards
                uneven.append(f"{name} ({rows} rows)")
            else:
                self.gathered_weights.add(layer)
        count = len(self.gathered_weights.layers)
        if not count:
            key, message = "quant.fsdp_float8_all_gather", f"asked for, but no weight divides by {ranks} ranks"
            raise PipelineError(f"{message}: {first_names(uneven)}", key=key, hint=f"{key}=false")
        time = "right after each update" if self.precompute_scale else "by the first gather after an update"
        high = f"{first_names(uneven)}, not a multiple of {ranks} ranks, and all else" if uneven else "all else"
        high_precision = dtype_name(ctx.compute_dtype)
        gathered = f"FSDP gathers {count} weights in float8, 1 byte a number, and {high} in {high_precision}"
        return f"{gathered}; shards are cast {time} and kept, 1 byte a number"

    def _find_skipped(self, model: nn.Module, ctx: Context) -> dict[str, str]:
        """Linear layers that stay as they are, and why."""
        names = [name for name, _ in model.named_modules()]
        names += [name.rpartition(".")[0] for name in getattr(model, "elsewhere", ())]  # on other pipeline ranks
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if refusal := check_filters(self.filter_fqns, names, example=next(iter(linears), "")):
            raise PipelineError([refusal])
        reasons = {name: self._reason(name, module, ctx) for name, module in linears.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def _reason(self, name: str, layer: nn.Linear, ctx: Context) -> str:
        if type(layer) is not Linear:
            return f"a {type(layer).__name__}, not the model's own Linear: its product cannot be exchanged"
        n, k = local_shape(name, layer, ctx)
        return reason_for_high_precision(self, name, n, k, tp=ctx.dims.tp)

    def _summary(self, count: int, ctx: Context) -> str:
        notes = [f"{count} linear layers multiply in {self.recipe}"]
        if self.product == "own":
            accumulation = "fast" if self.fast_accum else "full"
            notes.append(f"own casts and products, gradients in {self.grad_dtype} with {accumulation} accumulation")
        if self.emulate:
            notes.append("emulated: cast to float8, multiplied in high precision")
        elif "compile" not in ctx.active:
            notes.append("not compiled: unfused casts usually cost more than float8 gains")
        if self.float8_gather and self.product != "own":
            scales = ", scales precomputed" if self.precompute_scale else ""
            notes.append(f"FSDP gathers them in float8{scales}")
        return "; ".join([*notes, f"weights stay {dtype_name(ctx.param_dtype)}"])

    def after_step(self, model: nn.Module) -> None:
        """Refresh the scales, or the copies, of weights that are gathered in float8."""
        if self.gathered_weights is not None:
            self.gathered_weights.expire()  # also without precompute_scale: the next gather casts anew
            if self.precompute_scale:
                self.gathered_weights.cast()
        elif self.precompute_scale:  # one reduction for the scales of all weights
            float8.precompute_scales([p for p in model.parameters() if float8.is_gathered_in_float8(p)])

    def verify(self, model: nn.Module, ctx: Context) -> Change | None:
        """FSDP did gather every weight in float8 that it was to.

        Raises:
            PipelineError: it did not.
        """
        if self.gathered_weights is None:
            return None
        expected, count = len(self.gathered_weights.layers), self.gathered_weights.num_gathered
        if count != expected:
            raise PipelineError(
                f"asked for, but {count} of {expected} weights were gathered in float8 in the first step",
                key="quant.fsdp_float8_all_gather",
                hint="quant.fsdp_float8_all_gather=false, or find the plugin that replaced the weights",
            )
        return Change(f"{count} weights were gathered in float8", ["*"])


def local_shape(name: str, layer: nn.Linear, ctx: Context) -> tuple[int, int]:
    """(N, K) of the weight that a tp rank multiplies with."""
    # FSDP's shards do not count: a weight is whole when it is used
    n, k, tp = layer.out_features, layer.in_features, ctx.dims.tp
    for block, layout in zip(ctx.facts.blocks, ctx.facts.layouts, strict=True):
        if name in [f"{block}.{inner}" for inner in layout.column]:
            return n // tp, k
        if name in [f"{block}.{inner}" for inner in layout.row]:
            return n, k // tp
    return n, k
