"""A small decoder put through a real pipeline, its batch, and one step of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanyaml.config.schema import Model
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder
from titanyaml.models.init import materialise
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline.resolve import ResolvedPipeline, resolve, run

CPU = torch.device("cpu")
LAYERS, VOCAB, SEQ = 4, 97, 16
AC = {"_target_": "titanyaml.plugins.ac.ActivationCheckpointing"}
COMPILE = {"_target_": "titanyaml.plugins.compile.Compile", "mode": "block", "backend": "aot_eager"}
FSDP = {"_target_": "titanyaml.plugins.fsdp.FullyShard"}


def spec(**changes: Any) -> Model:
    """Four layers, seven matrix products each, grouped-query attention."""
    sizes = {
        "vocab_size": VOCAB,
        "dim": 32,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_dim": 56,
        "max_seq_len": SEQ,
        "init_std": 0.1,
    }
    return Model(**({"name": "small"} | sizes | changes))


@dataclass(frozen=True)
class Built:
    model: nn.Module
    masters: dict[str, Tensor]
    ctx: Context
    resolved: ResolvedPipeline
    changes: dict[str, Change]


def context(model_spec: Model, **changes: Any) -> Context:
    """One CPU rank in float64."""
    values = {
        "dims": ParallelDims(),
        "mesh": None,
        "device": CPU,
        "param_dtype": torch.float64,
        "compute_dtype": torch.float64,
        "reduce_dtype": torch.float64,
        "facts": decoder.build(model_spec).facts,
        "seq_len": SEQ,
        "local_batch": 2,
        "accumulation": 1,
    }
    return Context(**(values | changes))


def build(
    nodes: dict[str, dict[str, Any]], *, model_spec: Model | None = None, split: bool = False, **changes: Any
) -> Built:
    """Model on meta, pipeline, weights of seed 0; what the runner does. split: masters are."""
    model_spec = model_spec or spec()
    ctx = context(model_spec, **changes)
    if ctx.compute_dtype == ctx.param_dtype == torch.float64:
        model = decoder.build(model_spec).double()  # the one dtype that the decoder is not built in
    else:
        model = decoder.build(model_spec)
    resolved = resolve(nodes, ctx)
    model, applied = run(model, resolved, ctx)
    masters = materialise(model, device=ctx.device, seed=0, param_dtype=ctx.param_dtype, split=split)
    return Built(model, masters, ctx, resolved, dict(applied))


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [*shape, SEQ] of a fixed stream; one label in seven is ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, VOCAB, (*shape, SEQ), generator=generator) for _ in range(2))
    labels[torch.rand(labels.shape, generator=generator) < 1 / 7] = -100
    return tokens, labels


def loss(model: nn.Module, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum of token losses, computed inside the model's forward."""
    return model(tokens_BS, labels_BS=labels_BS, loss_fn=CrossEntropy(chunk_tokens=8))


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one batch."""
    tokens_BS, labels_BS = batch(2)
    value = loss(model, tokens_BS, labels_BS)
    value.backward()
    return value.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


class CountOperators(TorchDispatchMode):
    """How often each operator ran inside the ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
