"""Keys of the model transforms. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanyaml.config.keys import key

FLOAT8 = ["float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp"]
RECIPES = [*FLOAT8, "mxfp8"]


@dataclass
class PluginNode:
    """A node of pipeline.plugins. ``_target_: null`` means off."""

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
        False, "FSDP casts weights before it gathers them: half the bytes (float8_tensorwise)", when=("recipe", FLOAT8)
    )
    precompute_scale: bool = key(
        False,
        "scales of gathered weights by one reduction after each optimizer step, not one a weight; with own "
        "products always one, and true: weights are cast right after the step, not by its first gather",
        when=("fsdp_float8_all_gather", [True]),
    )
    force_recompute_weight: bool = key(
        True,
        "cast weights again in the backward pass; false: keep their float8 copies (1 byte a parameter)",
        when=("recipe", FLOAT8),
    )
    product: str = key(
        "torchao",
        "who casts and multiplies; own: one pass makes both copies of an operand, and keeps those of inputs "
        "for the backward pass",
        choices=["torchao", "own"],
        when=("recipe", FLOAT8),
    )
    fast_accum: bool | None = key(
        None,
        "the gradients' products add in the tensor core's short accumulator, as the forward's does; null: true, "
        "or false where products are emulated",
        when=("product", ["own"]),
    )
    grad_dtype: str = key(
        "auto",
        "format of the gradients that are multiplied; e5m2: more range, one bit less; auto: e5m2 with one "
        "scale a tensor, e4m3 with one a row",
        choices=["auto", "e4m3", "e5m2"],
        when=("product", ["own"]),
    )
    filter_fqns: list[str] = key(
        [], "parts of the names of linear layers that stay in high precision", when=("recipe", RECIPES)
    )
    auto_filter_small_kn: bool = key(False, "leave layers alone that are too small to gain", when=("recipe", RECIPES))
    emulate: bool = key(
        False,
        "cast as the recipe says, multiply in high precision; runs on any device, slowly",
        when=("recipe", RECIPES),
    )


@dataclass
class ActivationCheckpointing(PluginNode):
    """Recompute activations in the backward pass."""

    _target_: str | None = key("titanyaml.plugins.ac.ActivationCheckpointing", "class of the transform")
    mode: str = key(
        "none",
        "what is recomputed; auto: the fastest of the others that is planned to fit into the memory",
        choices=["none", "full", "selective_op", "selective_layer", "memory_budget", "auto"],
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
        "selective_op: matrix products that are kept, as a share of all; 0.5: every second one of each block; "
        "above, some blocks keep every one, below, some keep none",
        low=0,
        high=1,
        when=("mode", ["selective_op"]),
    )
    memory_gib: float | None = key(
        None,
        "auto: memory that a rank is planned to reserve at most (GiB); null, and where it is less: the device's "
        "less hardware.reserve_gib and 5 %",
        above=0,
        when=("mode", ["auto"]),
    )


@dataclass
class Compile(PluginNode):
    """torch.compile."""

    _target_: str | None = key("titanyaml.plugins.compile.Compile", "class of the transform")
    mode: str = key(
        "auto",
        "none, block (each block by itself), model; auto: block on GPU, none on CPU",
        choices=["auto", "none", "block", "model"],
    )
    backend: str = key("inductor", "torch.compile backend", when=("mode", ["auto", "block", "model"]))
    async_tp: bool = key(False, "overlap transfers of the tp ranks with the matrix products next to them, in pieces")
    async_tp_ops: list[str] = key(
        ["all_gather", "reduce_scatter"],
        "what is overlapped: the gather before a product, the reduce-scatter behind one; or auto alone: what is "
        "measured to gain, before compilation",
        choices=["all_gather", "reduce_scatter", "auto"],
        when=("async_tp", [True]),
    )
    loss: bool = key(
        False,
        "compile what torch computes between the products of a chunk of the loss, where no Triton kernel does",
        when=("mode", ["auto", "block", "model"]),
    )
    optimizer: bool = key(
        False,
        "compile clipping, update and publication of a weight into one graph, where no Triton kernel does that",
        when=("mode", ["auto", "block", "model"]),
    )
    cuda_graphs: bool = key(
        False, "replay compiled blocks as CUDA graphs: the host launches one thing a block; for one GPU"
    )
    cache_dir: str = key(
        "${oc.env:TITANYAML_CACHE,.cache/titanyaml}/compile",
        "folder of compiled kernels, kept between runs; TORCHINDUCTOR_CACHE_DIR in the environment goes first",
        when=("mode", ["auto", "block", "model"]),
        resume="free",
    )


@dataclass
class Pipeline:
    """The transforms between the model and the loop."""

    plugins: dict[str, Any] = key({}, "node name to plugin node; built-ins are references such as ${ac}")
