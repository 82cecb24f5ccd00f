"""Keys of the model transforms. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanyaml.config.keys import key

FLOAT8 = ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"]
RECIPES = [*FLOAT8, "mxfp8"]
AC_MODES = ["none", "full", "selective_op", "selective_layer", "memory_budget", "auto"]
_COMPILING = ["auto", "block", "model"]
_PRODUCT = "who casts and multiplies; own: one pass makes both copies of an operand, those of inputs are kept"
_GRAD_DTYPE = (
    "format of gradients; e5m2: more range, one bit less; auto: e5m2 with one scale a tensor, e4m3 with one a row"
)
# when keys are read: (sibling, its values)
_FLOAT8, _ANY_RECIPE, _OWN = ("recipe", FLOAT8), ("recipe", RECIPES), ("product", ["own"])
_COMPILED = ("mode", _COMPILING)


@dataclass
class PluginNode:
    """A node of pipeline.plugins. ``_target_: null`` means off."""

    # leading underscores: the other keys are arguments of the class
    _target_: str | None = key(None, "class of the transform; null: off")
    _stage_: str | None = key(None, "overrides the class's stage")
    _after_: list[str] = key([], "nodes that must come before, where present")
    _before_: list[str] = key([], "nodes that must come after, where present")
    _requires_: list[str] = key([], "nodes that must be on")
    _conflicts_: list[str] = key([], "nodes that must be off")


@dataclass
class Quant(PluginNode):
    """Linear layers in 8 bits while training; weights and optimizer stay in full precision."""

    _target_: str | None = key("titanyaml.plugins.quant.Quantize", "class of the transform")
    recipe: str = key("none", "format and scales of the operands of linear layers", choices=["none", *RECIPES])
    fsdp_float8_all_gather: bool = key(
        False, "FSDP casts weights before it gathers them: half the bytes (float8_tensorwise)", when=_FLOAT8
    )
    precompute_scale: bool = key(
        False,
        "scales of gathered weights by one reduction after each optimizer step, not one a weight; with own "
        "products always one, and true: weights are cast right after the step, not by its first gather",
        when=("fsdp_float8_all_gather", [True]),
    )
    # the copies would take a byte a parameter for the whole step
    force_recompute_weight: bool = key(
        True, "cast weights again in the backward pass; false: keep float8 copies (1 byte a parameter)", when=_FLOAT8
    )
    product: str = key("torchao", _PRODUCT, choices=["torchao", "own"], when=_FLOAT8)
    fast_accum: bool | None = key(
        None, "gradient matmuls add in the tensor core's short accumulator; null: unless emulated", when=_OWN
    )
    grad_dtype: str = key("auto", _GRAD_DTYPE, choices=["auto", "e4m3", "e5m2"], when=_OWN)
    filter_fqns: list[str] = key([], "parts of names of linear layers that stay in high precision", when=_ANY_RECIPE)
    auto_filter_small_kn: bool = key(False, "leave layers alone that are too small to gain", when=_ANY_RECIPE)
    emulate: bool = key(False, "cast, but multiply in high precision; on any device, slowly", when=_ANY_RECIPE)


@dataclass
class ActivationCheckpointingConfig(PluginNode):
    """Recompute activations in the backward pass."""

    _target_: str | None = key("titanyaml.plugins.ac.ActivationCheckpointing", "class of the transform")
    mode: str = key(
        "none",
        "what is recomputed; auto: the fastest of the others that is planned to fit into memory",
        choices=AC_MODES,
    )
    every: int = key(
        2, "selective_layer: one block in this many is recomputed", low=1, when=("mode", ["selective_layer"])
    )
    budget: float = key(
        0.8,
        "memory_budget: activations that a compiled graph keeps, as a share of all; the rest is recomputed",
        low=0,
        below=1,
        when=("mode", ["memory_budget"]),
    )
    keep_products: float = key(
        0.5,
        "selective_op: share of matmul outputs that are kept; 0.5: every second one of each block; above, some blocks "
        "keep every one, below, some keep none",
        low=0,
        high=1,
        when=("mode", ["selective_op"]),
    )
    memory_gib: float | None = key(
        None,
        "auto: memory that a rank may be planned to reserve (GiB); null, and where it is less: the device's less "
        "hardware.reserve_gib and 5 %",
        above=0,
        when=("mode", ["auto"]),
    )


@dataclass
class CompileConfig(PluginNode):
    """torch.compile."""

    _target_: str | None = key("titanyaml.plugins.compile.Compile", "class of the transform")
    mode: str = key(
        "auto",
        "none, block (each block by itself), model; auto: block on GPU, none on CPU",
        choices=["auto", "none", "block", "model"],
    )
    backend: str = key("inductor", "torch.compile backend", when=_COMPILED)
    # off by default: it gains only where a transfer takes longer than the pieces lose
    async_tp: bool = key(False, "overlap transfers of the tp ranks with the matrix products next to them, in pieces")
    async_tp_ops: list[str] = key(
        ["all_gather", "reduce_scatter"],
        "gathers before matmuls, reduce-scatters behind them; auto alone: those measured to gain, before compilation",
        choices=["all_gather", "reduce_scatter", "auto"],
        when=("async_tp", [True]),
    )
    loss: bool = key(False, "compile torch's part of the loss, where no Triton kernel does it", when=_COMPILED)
    optimizer: bool = key(
        False, "compile clipping and update of a weight into one graph, where no Triton kernel does it", when=_COMPILED
    )
    cuda_graphs: bool = key(False, "replay compiled blocks as CUDA graphs, one launch a block; for one GPU")
    cache_dir: str = key(
        "${oc.env:TITANYAML_CACHE,.cache/titanyaml}/compile",
        "folder of compiled kernels, kept between runs; TORCHINDUCTOR_CACHE_DIR in the environment goes first",
        when=_COMPILED,
        resume="free",
    )


@dataclass
class Pipeline:
    """The transforms between the model and the loop."""

    # a dict, not a list: an override names a node, and Hydra cannot merge into a list
    plugins: dict[str, Any] = key({}, "node name to plugin node; built-ins are references such as ${ac}")
