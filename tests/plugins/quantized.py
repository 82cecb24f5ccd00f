"""What the tests of float8 training share: recipes, dtypes, sizes, a few steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.plugins.small import batch, loss, spec
from titanyaml import optim
from titanyaml.config import schema
from titanyaml.pipeline.resolve import after_step

TENSORWISE, ROWWISE, HIGH_PRECISION_GRADIENT, MX = RECIPES = (
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "mxfp8",
)
TP = {"_target_": "titanyaml.plugins.tp.TensorParallel"}
CP = {"_target_": "titanyaml.plugins.cp.ContextParallel"}
FLOAT32 = {"param_dtype": torch.float32, "compute_dtype": torch.float32, "reduce_dtype": torch.float32}
MIXED = {**FLOAT32, "compute_dtype": torch.bfloat16}
SIZES = {"vocab_size": 98, "dim": 64, "ffn_dim": 128, "num_kv_heads": 4, "num_layers": 2}
STEPS = 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def node(recipe: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": "titanyaml.plugins.quant.Quantize", "recipe": recipe, "emulate": True, **arguments}


def sizes(**changes: Any) -> schema.Model:
    return spec(**(SIZES | changes))


def train(built: Any, *, ranks: int = 1, rank: int = 0, keep: int = 0) -> dict[str, Any]:
    """Losses and the gradients of the step ``keep`` over the steps of AdamW on one fixed batch."""
    optimizer = optim.build(schema.Optim(), dict(built.model.named_parameters()), masters=built.masters, device="cpu")
    tokens, labels = batch(4)
    rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    losses, grads = [], {}
    for step in range(STEPS):
        value = loss(built.model, tokens[rows], labels[rows])
        (value / (labels != -100).sum()).backward()
        losses.append(value.item())
        if step == keep:
            grads = {n: whole(g) for n, g in zip(optimizer.names, optimizer.grads(), strict=True)}
        optimizer.step(3e-4)
        optimizer.zero_grad()
        after_step(built.model, built.resolved)
    return {"losses": losses, "grads": grads, "weights": {n: optimizer.master(n) for n in optimizer.names}}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
