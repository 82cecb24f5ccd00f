"""Tensor parallelism: every matrix is split over the tp ranks, the embedding and the head by rows of the vocabulary.

Parameters become DTensors under their old names, for FSDP, optimizer and checkpoints. The forward works on their local
shards with explicit collectives (``dist.tensor``), in modules that change their class in place. Per block, what enters
attention or feed-forward is gathered along the sequence and what leaves them is summed and scattered; between them,
with sequence parallelism, every rank holds its slice of the sequence only. Without it the residual stream is whole on
every rank, and there is one all-reduce each way instead (Shoeybi et al. 2019; Korthikanti et al. 2022).

Router and experts of a mixture work token by token. They are whole on every rank and, with sequence parallelism, do the
rank's own slice of the sequence: nothing is gathered for them. Splitting experts is the ep axis' work.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import (
    TensorGroup,
    all_reduce_gradient,
    all_reduce_sum,
    gather_sequence,
    local,
    local_rows,
    scatter_sum,
)
from titanyaml.errors import DataError, PipelineError, Problem
from titanyaml.models.layers import Linear, OutputProjection, RMSNorm
from titanyaml.models.moe import Experts, Router
from titanyaml.pipeline.protocol import Change, Context


class TensorParallel:
    """Split the model's matrices over ``mesh["tp"]``.

    Args:
        sequence_parallel: keep only 1/tp of the sequence between the split parts: less memory for activations, and the
            same bytes sent.
    """

    stage = "tp"

    def __init__(self, *, sequence_parallel: bool = True) -> None:
        self.sequence_parallel = sequence_parallel

    def reason_off(self, ctx: Context) -> str:
        """Off on one tp rank."""
        return "parallel.tp is 1" if ctx.dims.tp == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """All that is split divides by tp. The rule table says the same earlier, with the nearest legal values."""
        facts, tp = ctx.facts, ctx.dims.tp
        sizes = {
            "model.num_heads": facts.num_heads,
            "model.num_kv_heads": facts.num_kv_heads,
            "model.ffn_dim": facts.ffn_dim,
            "model.vocab_size": facts.vocab_size,
        }
        if self.sequence_parallel:
            sizes["train.seq_len"] = ctx.seq_len
        return [
            Problem(
                key,
                f"is {size}, not a multiple of parallel.tp={tp}",
                allowed=f"multiples of {tp}",
                hint=f"{key}={-(-size // tp) * tp}",
            )
            for key, size in sizes.items()
            if size % tp
        ]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Split blocks, embedding and head.

        Raises:
            PipelineError: an earlier plugin left a module of a kind that cannot be split.
        """
        assert ctx.mesh is not None, "more than one rank and no mesh"
        split = _Splitter(model, ctx.mesh["tp"], sequence=self.sequence_parallel, dtype=ctx.reduce_dtype)
        facts = ctx.facts
        for block, layout in zip(facts.blocks, facts.layouts, strict=True):
            for name in layout.column:
                split.column(f"{block}.{name}")
            for name in layout.row:
                split.row(f"{block}.{name}")
            for name in layout.stream_norms:
                split.norm(f"{block}.{name}", sees_a_part=self.sequence_parallel)
            for name in layout.head_norms:
                split.norm(f"{block}.{name}", sees_a_part=True)
            for name in layout.entries:
                columns = [f"{block}.{one}" for one in layout.column if one.startswith(f"{name}.")]
                split.entry(f"{block}.{name}", columns)
            if layout.router:
                split.router(f"{block}.{layout.router}")
            if layout.experts and ctx.dims.ep == 1:
                split.experts(f"{block}.{layout.experts}")
        if facts.embedding:
            split.embedding(facts.embedding)
        if facts.final_norm:
            split.norm(facts.final_norm, sees_a_part=self.sequence_parallel)
            model.get_submodule(facts.final_norm).register_forward_hook(split.leave)
        if facts.head and not facts.tied:
            split.head(facts.head)
        replicated = "norms, routers and experts" if facts.num_experts else "norms"
        stream = "the residual stream by sequence" if self.sequence_parallel else "the residual stream whole"
        if split.by_layers:
            stream += f", cast to float8 before it is gathered for {split.by_layers} entries"
        return model, Change(
            f"{len(split.sharded)} modules over tp({ctx.dims.tp}), {len(split.replicated)} {replicated} replicated; "
            f"vocabulary and loss by {facts.vocab_size // ctx.dims.tp} ids, {stream}",
            [*split.sharded, *split.replicated],
        )


class _Splitter:
    """Turns modules of one model into those below, and notes which."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, sequence: bool, dtype: torch.dtype) -> None:
        self.model, self.mesh, self.sequence, self.dtype = model, mesh, sequence, dtype
        self.group = TensorGroup.of(mesh)
        self.sharded: list[str] = []
        self.replicated: list[str] = []
        self.enter, self.leave = _Enter(self.group, sequence), _Leave(self.group, sequence)
        self.products: dict[Any, Any] = {}  # of layers, to those that gather their own input
        self.by_layers = 0

    def entry(self, name: str, columns: list[str]) -> None:
        """Let attention or a feed-forward see the whole sequence: gathered before it, or by its layers' product.

        Args:
            columns: the layers that take its input. A product that they share and that has a method ``of_parts(group)``
                may say how it multiplies with what every rank holds a part of.
        """
        layers = [self.model.get_submodule(column) for column in columns]
        product, *others = {layer.product for layer in layers} or {None}
        if self.sequence and not others and hasattr(product, "of_parts"):
            if product not in self.products:
                self.products[product] = product.of_parts(self.group)
            if (made := self.products[product]) is not None:
                for layer in layers:
                    layer.product = made
                self.by_layers += 1
                return
        self.model.get_submodule(name).register_forward_pre_hook(self.enter)

    def column(self, name: str) -> None:
        self._turn(name, Linear, ColumnLinear, weight=Shard(0), bias=Shard(0))
        self.sharded.append(name)

    def row(self, name: str) -> None:
        module = self._turn(name, Linear, RowLinear, weight=Shard(1), bias=Replicate())
        module.sequence, module.dtype = self.sequence, self.dtype
        self.sharded.append(name)

    def norm(self, name: str, *, sees_a_part: bool) -> None:
        module = self._turn(name, RMSNorm, ReplicatedNorm, weight=Replicate())
        module.sees_a_part, module.dtype = sees_a_part, self.dtype
        self.replicated.append(name)

    def router(self, name: str) -> None:
        module = self._turn(name, Router, ReplicatedRouter, weight=Replicate())
        module.peers, module.dtype = self.group if self.sequence else None, self.dtype
        self.replicated.append(name)

    def experts(self, name: str) -> None:
        module = self._turn(name, Experts, ReplicatedExperts, **dict.fromkeys(("w1", "w2", "w3"), Replicate()))
        module.sees_a_part, module.dtype = self.sequence, self.dtype
        self.replicated.append(name)

    def embedding(self, name: str) -> None:
        module = self._turn(name, nn.Embedding, VocabEmbedding, weight=Shard(0))
        module.sequence = self.sequence
        self.sharded.append(name)

    def head(self, name: str) -> None:
        self._turn(name, OutputProjection, OutputProjection, weight=Shard(0))
        self.sharded.append(name)

    def _turn(self, name: str, old: type, new: type, **placements: Placement) -> Any:
        module = self.model.get_submodule(name)
        if type(module) is not old:
            raise PipelineError(
                f"{name} is a {type(module).__name__}, which cannot be split; only {old.__name__} can",
                key="parallel.tp",
                hint="parallel.tp=1, or switch off the plugin that replaced it",
            )
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter.detach(), self.mesh, [placements[leaf]], src_data_rank=None)
            setattr(module, leaf, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        module.__class__, module.group = new, self.group
        return module


class _Enter:
    """Hook before attention and feed-forward: the whole sequence, whose gradients are summands."""

    def __init__(self, group: TensorGroup, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    def __call__(self, module: nn.Module, args: tuple) -> tuple:
        return (self.whole(args[0]), *args[1:])

    def whole(self, x_BSD: Tensor) -> Tensor:
        return gather_sequence(x_BSD, self.group) if self.sequence else all_reduce_gradient(x_BSD, self.group)


class _Leave(_Enter):
    """Hook after the final norm: the loss sees the whole sequence and a part of the vocabulary."""

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self.whole(output)


class ColumnLinear(Linear):
    """Some of the output features, of an input that is equal on all ranks."""

    group: TensorGroup

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowLinear(Linear):
    """All output features of some of the inputs, summed over the ranks; the bias is added once, to the sum."""

    group: TensorGroup
    sequence: bool
    dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x, local(self.weight), None)
        out = scatter_sum(out, self.group) if self.sequence else all_reduce_sum(out, self.group)
        if self.bias is None:
            return out
        bias = local(self.bias)
        return out + (all_reduce_gradient(bias, self.group, dtype=self.dtype) if self.sequence else bias)


class ReplicatedNorm(RMSNorm):
    """A whole weight on every rank. Where a rank sees a part of the tokens or heads, the gradients are summed."""

    group: TensorGroup
    sees_a_part: bool
    dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.sees_a_part:
            weight = all_reduce_gradient(weight, self.group, dtype=self.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class ReplicatedRouter(Router):
    """Whole on every rank; with ``peers`` it sees a slice of the sequence, and the gradients are summed."""

    group: TensorGroup
    dtype: torch.dtype

    def matrix(self) -> Tensor:
        weight = local(self.weight)
        return weight if self.peers is None else all_reduce_gradient(weight, self.group, dtype=self.dtype)


class ReplicatedExperts(Experts):
    """Whole on every rank. Where a rank sees a part of the tokens, the gradients are summed."""

    group: TensorGroup
    sees_a_part: bool
    dtype: torch.dtype

    def matrices(self) -> tuple[Tensor, ...]:
        whole = tuple(map(local, (self.w1, self.w2, self.w3)))
        return tuple(all_reduce_gradient(w, self.group, dtype=self.dtype) for w in whole) if self.sees_a_part else whole


class VocabEmbedding(nn.Embedding):
    """Some rows of the table. Ids of other ranks give zeros; the sum over the ranks is the embedding, exactly."""

    group: TensorGroup
    sequence: bool

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Embed int64 ids [B, S] as [B, S, D], or [B, S/tp, D] with sequence parallelism.

        Raises:
            DataError: an id is outside the vocabulary (CPU, eager; elsewhere the lookup itself fails).
        """
        looks = tokens_BS.device.type == "cpu" and not torch.compiler.is_compiling()
        if looks and not compat.is_fake(tokens_BS):
            _check_ids(tokens_BS, vocab_size=self.num_embeddings)
        weight = local(self.weight)
        rows_BS, mine_BS = local_rows(tokens_BS, rows=weight.shape[0], rank=self.group.rank, size=self.group.size)
        out_BSD = F.embedding(rows_BS, weight).where(mine_BS.unsqueeze(-1), 0)
        return scatter_sum(out_BSD, self.group) if self.sequence else all_reduce_sum(out_BSD, self.group)


def _check_ids(ids: Tensor, *, vocab_size: int) -> None:
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        raise DataError(
            f"token id {ids[bad][0].item()} is outside the vocabulary of {vocab_size} ids",
            key="model.vocab_size",
            hint="a tokenizer that fits the model, or a larger model.vocab_size",
        )
