"""Tensor parallelism: every matrix is split over the tp ranks, the embedding and the head by rows of the vocabulary.

Parameters become DTensors under their old names, for FSDP, optimizer and checkpoints. The forward works on their local
shards with explicit collectives (``distributed.tensor``), in modules that change their class in place.

Per block, the input of attention or feed-forward is all-gathered along the sequence and their output is
reduce-scattered; between them, with sequence parallelism, every rank holds its slice of the sequence only. Without it
the residual stream is whole on every rank, and there is one all-reduce each way instead (Shoeybi et al. 2019,
Megatron-LM; Korthikanti et al. 2022).

Router and experts of a mixture work token by token. They are whole on every rank and, with sequence parallelism, do
the rank's own slice of the sequence: nothing is gathered for them. Splitting experts is the ep axis' work.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from titanyaml.config.rules.tensor_parallel import check_tp_divides
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
from titanyaml.errors import DataError, Problem
from titanyaml.models.layers import Linear, OutputProjection, RMSNorm
from titanyaml.models.moe import Experts, Router
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline.split_modules import distribute_parameters, find_module

#: Sizes of the model's facts that are split, each a key of the section model.
_SPLIT_FACTS = ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")


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
        return "parallel.tp is 1" if ctx.dims.tp == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """All that is split divides by tp (``config/rules/tensor_parallel.py``)."""
        sizes = {f"model.{name}": getattr(ctx.facts, name) for name in _SPLIT_FACTS}
        if self.sequence_parallel:
            sizes["train.seq_len"] = ctx.seq_len
        checks = [check_tp_divides(key, size, ctx.dims.tp) for key, size in sizes.items()]
        return [refusal for refusal in checks if refusal]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Split blocks, embedding and head.

        Raises:
            PipelineError: a module was replaced by one that cannot be split.
        """
        assert ctx.mesh is not None, "more than one rank and no mesh"
        splitter = _ModelSplitter(model, ctx.mesh["tp"], sequence=self.sequence_parallel, dtype=ctx.reduce_dtype)
        facts = ctx.facts
        for block in zip(facts.blocks, facts.layouts, strict=True):
            splitter.split_block(*block, experts=ctx.dims.ep == 1)  # with ep its plugin spreads the experts
        # a pipeline stage may lack embedding, norm or head
        if facts.embedding:
            splitter.split_embedding(facts.embedding)
        if facts.final_norm:
            splitter.replicate_norm(facts.final_norm, sees_part=self.sequence_parallel)
            # the loss sees the whole sequence and a part of the vocabulary
            splitter.gather_output(facts.final_norm)
        if facts.head and not facts.tied:  # a tied head uses the embedding's shard
            splitter.split_head(facts.head)
        replicated = "norms, routers and experts" if facts.num_experts else "norms"
        stream = "the residual stream by sequence" if self.sequence_parallel else "the residual stream whole"
        if splitter.num_casting_entries:
            stream += f", cast to float8 before it is gathered for {splitter.num_casting_entries} entries"
        return model, Change(
            f"{len(splitter.sharded)} modules over tp({ctx.dims.tp}), {len(splitter.replicated)} {replicated} "
            f"replicated; vocabulary and loss by {facts.vocab_size // ctx.dims.tp} ids, {stream}",
            [*splitter.sharded, *splitter.replicated],
        )


class _ModelSplitter:
    """Changes modules of one model into those below, and notes which.

    Args:
        sequence: whether the residual stream is split by sequence.
        dtype: in which gradients of replicated parameters are summed over the tp ranks.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, sequence: bool, dtype: torch.dtype) -> None:
        self.model, self.mesh, self.sequence, self.dtype = model, mesh, sequence, dtype
        self.group = TensorGroup.of(mesh)
        self.sharded: list[str] = []
        self.replicated: list[str] = []
        self.gathering: dict[Any, Any] = {}  # products of layers, to those that gather their own input
        self.num_casting_entries = 0

    def split_block(self, block: str, layout: Any, *, experts: bool) -> None:
        for name in layout.column:
            self.sharded.append(f"{block}.{name}")
            self._change(f"{block}.{name}", Linear, ColumnLinear, weight=Shard(0), bias=Shard(0))
        for name in layout.row:
            self._split_row(f"{block}.{name}")
        for name in layout.stream_norms:
            self.replicate_norm(f"{block}.{name}", sees_part=self.sequence)
        for name in layout.head_norms:
            self.replicate_norm(f"{block}.{name}", sees_part=True)  # of the heads
        for entry in layout.entries:  # one gather for q, k and v, or for gate and up
            columns = [f"{block}.{name}" for name in layout.column if name.startswith(f"{entry}.")]
            self._gather_input(f"{block}.{entry}", columns)
        if layout.router:
            self._replicate_router(f"{block}.{layout.router}")
        if layout.experts and experts:
            self._replicate_experts(f"{block}.{layout.experts}")

    def _gather_input(self, name: str, columns: list[str]) -> None:
        """Let attention or a feed-forward see the whole sequence.

        Args:
            columns: the layers that take its input. If they share a product with a method
                ``with_gathered_input(group)``, that may return a product that gathers its input by itself.
        """
        layers: list[Any] = [self.model.get_submodule(column) for column in columns]
        products = {layer.product for layer in layers}
        if self.sequence and len(products) == 1 and hasattr(product := products.pop(), "with_gathered_input"):
            # one object for all layers, so that equal blocks share one compiled graph
            if product not in self.gathering:
                self.gathering[product] = product.with_gathered_input(self.group)
            if (gathering := self.gathering[product]) is not None:
                for layer in layers:
                    layer.product = gathering
                self.num_casting_entries += 1
                return
        self.model.get_submodule(name).register_forward_pre_hook(_GatherInput(self.group, self.sequence))

    def gather_output(self, name: str) -> None:
        self.model.get_submodule(name).register_forward_hook(_GatherOutput(self.group, self.sequence))

    def _split_row(self, name: str) -> None:
        module = self._change(name, Linear, RowLinear, weight=Shard(1), bias=Replicate())
        module.sequence, module.dtype = self.sequence, self.dtype
        self.sharded.append(name)

    def replicate_norm(self, name: str, *, sees_part: bool) -> None:
        module = self._change(name, RMSNorm, ReplicatedNorm, weight=Replicate())
        module.sees_part, module.dtype = sees_part, self.dtype
        self.replicated.append(name)

    def _replicate_router(self, name: str) -> None:
        module = self._change(name, Router, ReplicatedRouter, weight=Replicate())
        module.peers, module.dtype = self.group if self.sequence else None, self.dtype
        self.replicated.append(name)

    def _replicate_experts(self, name: str) -> None:
        module = self._change(name, Experts, ReplicatedExperts, w1=Replicate(), w2=Replicate(), w3=Replicate())
        module.sees_part, module.dtype = self.sequence, self.dtype
        self.replicated.append(name)

    def split_embedding(self, name: str) -> None:
        module = self._change(name, nn.Embedding, VocabEmbedding, weight=Shard(0))
        module.sequence = self.sequence
        self.sharded.append(name)

    def split_head(self, name: str) -> None:
        self._change(name, OutputProjection, OutputProjection, weight=Shard(0))
        self.sharded.append(name)

    def _change(self, name: str, old: type[nn.Module], new: type[nn.Module], **placements: Placement) -> Any:
        module: Any = find_module(self.model, name, old, axis="tp")
        distribute_parameters(module, self.mesh, placements)
        # a new class on the same object: names, hooks and references to the module stay as they are
        module.__class__, module.group = new, self.group
        return module


class _GatherInput:
    """Hook before attention and feed-forward: makes the sequence whole. Its gradients are summands of the ranks."""

    def __init__(self, group: TensorGroup, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.gather(args[0]), *args[1:])

    def gather(self, x_BSD: Tensor) -> Tensor:
        # a whole stream needs no transfer now, but each rank used it for other features: gradients are summed
        return gather_sequence(x_BSD, self.group) if self.sequence else all_reduce_gradient(x_BSD, self.group)


class _GatherOutput(_GatherInput):
    """The same as a hook after a module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:  # type: ignore[override]
        return self.gather(output)


# In the modules below gradients of replicated parameters are summed over the tp ranks in the backward pass, in
# ``dtype`` (train.reduce_dtype). Left as pending sums of DTensors, FSDP would sum them in the compute dtype.


class ColumnLinear(Linear):
    """Some of the output features, of an input that is equal on all ranks."""

    group: TensorGroup

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowLinear(Linear):
    """All output features of some of the inputs, summed over the ranks."""

    group: TensorGroup
    sequence: bool
    dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x, local(self.weight), None)
        out = scatter_sum(out, self.group) if self.sequence else all_reduce_sum(out, self.group)
        if self.bias is None:
            return out
        bias = local(self.bias)  # added to the sum: in the product each rank would add it once
        return out + (all_reduce_gradient(bias, self.group, dtype=self.dtype) if self.sequence else bias)


class ReplicatedNorm(RMSNorm):
    """A whole weight on every rank. If a rank sees a part of the tokens or heads, gradients are summed."""

    group: TensorGroup
    sees_part: bool
    dtype: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.sees_part:
            weight = all_reduce_gradient(weight, self.group, dtype=self.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class ReplicatedRouter(Router):
    """Whole on every rank; with ``peers`` it sees a slice of the sequence, and gradients are summed."""

    group: TensorGroup
    dtype: torch.dtype

    def matrix(self) -> Tensor:
        weight = local(self.weight)
        return weight if self.peers is None else all_reduce_gradient(weight, self.group, dtype=self.dtype)


class ReplicatedExperts(Experts):
    """Whole on every rank. If a rank sees a part of the tokens, gradients are summed."""

    group: TensorGroup
    sees_part: bool
    dtype: torch.dtype

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._whole(self.w1), self._whole(self.w2), self._whole(self.w3)

    def _whole(self, weight: Tensor) -> Tensor:
        weight = local(weight)
        return all_reduce_gradient(weight, self.group, dtype=self.dtype) if self.sees_part else weight


class VocabEmbedding(nn.Embedding):
    """Some rows of the table. Ids of other ranks give zeros: the sum over the ranks is the embedding, exactly."""

    group: TensorGroup
    sequence: bool

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Embed int64 ids [B, S] as [B, S, D], or as [B, S/tp, D] with sequence parallelism.

        Raises:
            DataError: an id is outside the vocabulary (CPU, eager; elsewhere the lookup itself fails).
        """
        # on a GPU the check would wait for the device, and a compiled graph would break
        can_check = tokens_BS.device.type == "cpu" and not torch.compiler.is_compiling()
        if can_check and not compat.is_fake(tokens_BS):
            _check_ids(tokens_BS, vocab_size=self.num_embeddings)
        weight = local(self.weight)
        rows_BS, is_local_BS = local_rows(tokens_BS, rows=weight.shape[0], rank=self.group.rank, size=self.group.size)
        out_BSD = F.embedding(rows_BS, weight).where(is_local_BS.unsqueeze(-1), 0)
        return scatter_sum(out_BSD, self.group) if self.sequence else all_reduce_sum(out_BSD, self.group)


def _check_ids(ids: Tensor, *, vocab_size: int) -> None:
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        raise DataError(
            f"token id {ids[bad][0].item()} is outside the vocabulary of {vocab_size} ids",
            key="model.vocab_size",
            hint="a tokenizer that fits the model, or a larger model.vocab_size",
        )
