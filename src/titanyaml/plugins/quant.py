"""Float8 training: the linear layers multiply in float8, by torchao; weights and optimizer stay in high precision.

A layer keeps its class, its parameters and their names; only its ``product`` is another one. So tensor parallelism
splits it as it splits any, and calls the same product on local shards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanyaml import float8
from titanyaml.config.decoder_layers import ALIGNMENT, filter_without_module, reason_for_high_precision
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError, Problem
from titanyaml.kernels.float8_gather import Float8Gather
from titanyaml.kernels.float8_linear import Float8Operand, Float8Options, cast_operand, float8_linear, gather_operand
from titanyaml.models.layers import Linear
from titanyaml.pipeline.protocol import Change, Context, dtype_name, first_names


class OwnProduct:
    """x @ weight^T (+ bias) by ``kernels.float8_linear``. One object for all layers."""

    def __init__(
        self, recipe: str, *, fast_accum: bool, grad_dtype: str, fused: bool, recast_weight: bool = True
    ) -> None:
        self.options = Float8Options(
            recipe.removeprefix("float8_"),
            fast_accum=fast_accum,
            fused=fused,
            recast_weight=recast_weight,
            grad_dtype={"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[grad_dtype],
        )

    def operand(self, x: Tensor) -> Float8Operand:
        """``x`` and its casts, for several layers."""
        return cast_operand(x, self.options)

    def of_parts(self, group: TensorGroup) -> PartsProduct | None:
        """The same for layers of whose input each rank holds a part; None: their input cannot be cast in parts."""
        return None if self.options.rowwise else PartsProduct(self.options, group)

    def __call__(self, x: Tensor | Float8Operand, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = float8_linear(x, weight, self.options)
        return out if bias is None else out + bias


class PartsProduct(OwnProduct):
    """Products with a sequence of which each rank of ``group`` holds a part: it is gathered in float8."""

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
            own products that is so in any case, and all are cast at once: after the step, or by its first gather.
        force_recompute_weight: no float8 copy of a weight is kept from the forward to the backward pass.
        filter_fqns: parts of the names of layers that stay in high precision.
        auto_filter_small_kn: leave layers alone whose float8 product is likely to be no faster.
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
        if grad_dtype == "auto":  # one scale must serve the largest and the smallest gradient: range before precision
            grad_dtype = "e5m2" if recipe == "float8_tensorwise" else "e4m3"
        self.product, self.grad_dtype = product, grad_dtype
        self.fast_accum = not emulate if fast_accum is None else fast_accum
        self.recipe, self.emulate = recipe, emulate
        self.gathers, self.precomputes = fsdp_float8_all_gather, precompute_scale
        self.recasts = force_recompute_weight
        self.filter_fqns, self.auto_filter_small_kn = list(filter_fqns or []), auto_filter_small_kn
        self.gather: Float8Gather | None = None  # of own products

    def reason_off(self, ctx: Context) -> str:
        """Off where the recipe is none."""
        return "quant.recipe is none" if self.recipe == "none" else ""

    def check(self, ctx: Context) -> list[Problem]:
        """The device multiplies in the recipe's format. What needs no device is in the rule table."""
        problems = []
        if self.recipe not in ALIGNMENT:
            problems.append(Problem("quant.recipe", f"is {self.recipe!r}", allowed=", ".join(["none", *ALIGNMENT])))
        elif not self.emulate and (lack := _lack(self.recipe, ctx.device)):
            problems.append(
                Problem(
                    "quant.recipe",
                    f"is {self.recipe}, but {lack}",
                    hint="quant.emulate=true (for tests: it is slow), or quant=none",
                )
            )
        if self.product == "own" and self.emulate and ctx.device.type == "cuda":
            problems.append(
                Problem(
                    "quant.emulate",
                    "is true, but quant.product=own emulates on a CPU only",
                    hint="quant.emulate=false or quant.product=torchao",
                )
            )
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Give the layers their new product.

        Raises:
            PipelineError: no layer is left to convert, or an entry of ``filter_fqns`` names nothing.
        """
        skipped = self._skipped(model, ctx)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in skipped}
        if ctx.facts.head:
            skipped[ctx.facts.head] = "the head stays in high precision: the loss uses its weight itself"
        if not layers:
            reasons = Change("", [], skipped).left_alone()
            raise PipelineError(
                f"{self.recipe} was asked for, and no layer can be converted: {'; '.join(reasons)}",
                key="quant.recipe",
                hint="quant.auto_filter_small_kn=false"
                if self.auto_filter_small_kn
                else "quant.filter_fqns=[]"
                if self.filter_fqns
                else "quant.recipe=none",
            )
        if self.recipe == "mxfp8":
            product = float8.MXMatmul(emulate=self.emulate)
        elif self.product == "own":
            product = OwnProduct(
                self.recipe,
                fast_accum=self.fast_accum,
                grad_dtype=self.grad_dtype,
                fused=ctx.kernels.fused,
                recast_weight=self.recasts,
            )
        else:
            product = float8.Float8Matmul(self.recipe, emulate=self.emulate, recast_weight=self.recasts)
        for layer in layers.values():  # one product for all: equal blocks then share one compiled graph
            layer.product = product
        summary = self._summary(len(layers), ctx)
        if self.gathers and self.product == "own":
            summary = f"{summary}; {self._gather(layers, ctx)}"
        elif self.gathers:
            for layer in layers.values():
                layer.weight = product.wrap_for_gather(layer.weight)
        return model, Change(summary, list(layers), skipped)

    def _gather(self, layers: dict[str, Linear], ctx: Context) -> str:
        """Have FSDP gather the weights in float8, for own products; what is gathered in what.

        Raises:
            PipelineError: no weight has as many rows on each rank.
        """
        ranks = ctx.dims.dp_shard * ctx.dims.cp
        self.gather, uneven = Float8Gather(dtype=ctx.compute_dtype, fused=ctx.kernels.fused), []
        for name, layer in layers.items():
            rows = local_shape(name, layer, ctx)[0]
            if rows % ranks:
                uneven.append(f"{name} ({rows} rows)")
            else:
                self.gather.add(layer)
        if not self.gather.layers:
            raise PipelineError(
                f"asked for, but no weight divides by {ranks} ranks: {first_names(uneven)}",
                key="quant.fsdp_float8_all_gather",
                hint="quant.fsdp_float8_all_gather=false",
            )
        when = "right after each update" if self.precomputes else "by the first gather after an update"
        high = dtype_name(ctx.compute_dtype)
        rest = f"{first_names(uneven)}, not a multiple of {ranks} ranks, and all else" if uneven else "all else"
        return (
            f"FSDP gathers {len(self.gather.layers)} weights in float8, 1 byte a number, and {rest} in {high}; "
            f"shards are cast {when} and kept, 1 byte a number"
        )

    def _skipped(self, model: nn.Module, ctx: Context) -> dict[str, str]:
        """Linear layers that stay as they are, and why."""
        names = [name for name, _ in model.named_modules()]
        names += [name.rpartition(".")[0] for name in getattr(model, "elsewhere", ())]  # of other pipeline ranks
        example = next((name for name, module in model.named_modules() if isinstance(module, nn.Linear)), "")
        if problem := filter_without_module(self.filter_fqns, names, example=example):
            raise PipelineError([problem])
        skipped = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and (reason := self._reason(name, module, ctx)):
                skipped[name] = reason
        return skipped

    def _reason(self, name: str, layer: nn.Linear, ctx: Context) -> str:
        if type(layer) is not Linear:
            return f"a {type(layer).__name__}, not the model's own Linear: its product cannot be exchanged"
        n, k = local_shape(name, layer, ctx)
        return reason_for_high_precision(self, name, n, k, tp=ctx.dims.tp)

    def _summary(self, count: int, ctx: Context) -> str:
        parts = [f"{count} linear layers multiply in {self.recipe}"]
        if self.product == "own":
            adds = "fast" if self.fast_accum else "full"
            parts.append(f"own casts and products, gradients in {self.grad_dtype} with {adds} accumulation")
        if self.emulate:
            parts.append("emulated: cast to float8, multiplied in high precision")
        elif "compile" not in ctx.active:
            parts.append("not compiled: unfused casts usually cost more than float8 gains")
        if self.gathers and self.product != "own":
            parts.append("FSDP gathers them in float8" + (", scales precomputed" if self.precomputes else ""))
        return "; ".join([*parts, f"weights stay {dtype_name(ctx.param_dtype)}"])

    def after_step(self, model: nn.Module) -> None:
        """Refresh the scales, or the copies, of weights that are gathered in float8."""
        if self.gather is not None:
            self.gather.expire()
            if self.precomputes:
                self.gather.cast()
        elif self.precomputes:
            float8.precompute_scales([p for p in model.parameters() if float8.is_gathered_in_float8(p)])

    def verify(self, model: nn.Module, ctx: Context) -> Change | None:
        """FSDP did gather every weight in float8 that it was to.

        Raises:
            PipelineError: it did not.
        """
        if self.gather is None:
            return None
        asked, found = len(self.gather.layers), self.gather.num_gathered
        if found != asked:
            raise PipelineError(
                f"asked for, but {found} of {asked} weights were gathered in float8 in the first step",
                key="quant.fsdp_float8_all_gather",
                hint="quant.fsdp_float8_all_gather=false, or find the plugin that replaced the weights",
            )
        return Change(f"{found} weights were gathered in float8", ["*"])


def local_shape(name: str, layer: nn.Linear, ctx: Context) -> tuple[int, int]:
    """(N, K) of the weight that a rank multiplies with. FSDP shards do not count: weights are whole when used."""
    n, k = layer.out_features, layer.in_features
    tp = ctx.dims.tp
    for block, layout in zip(ctx.facts.blocks, ctx.facts.layouts, strict=True):
        if name in [f"{block}.{inner}" for inner in layout.column]:
            return n // tp, k
        if name in [f"{block}.{inner}" for inner in layout.row]:
            return n, k // tp
    return n, k


def _lack(recipe: str, device: torch.device) -> str:
    """What the device lacks for the recipe, in words; empty where nothing."""
    needed = (10, 0) if recipe == "mxfp8" else (8, 9)
    if device.type != "cuda":
        return f"a {device.type} has no fast float8 products"
    found = torch.cuda.get_device_capability(device)
    if found >= needed:
        return ""
    have, want = (".".join(map(str, version)) for version in (found, needed))
    return f"the GPU has compute capability {have}; it needs {want} or higher"
