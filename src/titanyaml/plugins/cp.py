"""Context parallelism: every rank holds a part of each sequence, and attention looks across the ranks.

The model's inputs are cut before its forward: tokens, labels and positions follow each other, so that rotary angles
and losses belong to the tokens that are there. Document numbers stay whole, since a mask speaks of keys that lie
elsewhere. Weights are whole on every rank; FSDP shards them over dp_shard*cp and sums their gradients.
"""

from typing import Any

import torch
from torch import Tensor, nn

from titanyaml.config.rules.context_parallel import check_cp_divides_seq_len, check_ulysses_divides_heads
from titanyaml.config.rules.values import check_values
from titanyaml.distributed import context_parallel
from titanyaml.distributed.tensor import TensorGroup
from titanyaml.errors import PipelineError, Problem
from titanyaml.kernels.attention import AttentionKernel, choose_attention_kernel
from titanyaml.kernels.context_attention import attend_across_ranks
from titanyaml.models.attention import Attention, Mask
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.pipeline.split_modules import find_module
from titanyaml.pipeline_parallel.staged import model_parts


class ContextParallel:
    """Split sequences over ``mesh["cp"]``.

    Args:
        method: ``allgather``: keys and values of all ranks come at once; takes document masks. ``ring``: they go
            around, one rank's at a time (Liu et al. 2023); causal only. ``ulysses``: attention is done on all
            positions of some heads, by an all-to-all before and after it (Jacobs et al. 2023); takes document masks.
            The first two deal out positions so that causal attention is equally much work on every rank.
    """

    stage = "cp"

    def __init__(self, *, method: str = "allgather") -> None:
        self.method = method

    def reason_off(self, ctx: Context) -> str:
        return "parallel.cp is 1" if ctx.dims.cp == 1 else ""

    def check(self, ctx: Context) -> list[Problem]:
        """The method exists and divides what it deals out (``config/rules/context_parallel.py``)."""
        facts, cp, tp = ctx.facts, ctx.dims.cp, ctx.dims.tp
        problems = check_values("parallel", cp_method=self.method)
        checks = [check_cp_divides_seq_len(ctx.seq_len, cp=cp, tp=tp)]
        if self.method == "ulysses":
            checks.append(check_ulysses_divides_heads(facts.num_heads, facts.num_kv_heads, cp=cp, tp=tp))
        return problems + [refusal for refusal in checks if refusal]

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Cut the inputs; let attention look across.

        Raises:
            PipelineError: an earlier plugin left an attention of another kind.
        """
        assert ctx.mesh is not None, "more than one rank and no mesh"
        group = TensorGroup.of(ctx.mesh["cp"])
        kernel = choose_attention_kernel(ctx.device, ctx.compute_dtype, head_dim=ctx.facts.head_dim)
        layouts = zip(ctx.facts.blocks, ctx.facts.layouts, strict=True)
        names = [f"{block}.{layout.attention}" for block, layout in layouts]
        for name in names:
            module: Any = find_module(model, name, Attention, axis="cp")
            module.__class__, module.group, module.kernel = _ATTENTION[self.method], group, kernel
            module.fused = ctx.kernels.fused  # merge the parts of an output by Triton
        # inputs are cut once, before the forward, so that labels, positions and tokens stay together
        for part in model_parts(model):
            part.register_forward_pre_hook(_CutInputs(group, self.method), with_kwargs=True)
        is_ulysses = self.method == "ulysses"
        runs = "one run" if is_ulysses else "a head and a tail run"
        kernels = "the usual attention kernel" if is_ulysses else f"{kernel} kernels"
        summary = (
            f"{len(names)} attentions over cp({group.size}) by {self.method}, {kernels}; each rank holds "
            f"{ctx.seq_len // group.size} of {ctx.seq_len} positions, {runs}"
        )
        return model, Change(summary, names)


class _CutInputs:
    """Hook before the model's forward: keeps this rank's positions of tokens and labels."""

    def __init__(self, group: TensorGroup, method: str) -> None:
        self.group, self.is_ulysses = group, method == "ulysses"

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens_BT = args[0] if args else kwargs.pop("tokens_BS")
        labels_BT: Any = kwargs.get("labels_BS")
        # a pipeline stage after the first gets a hidden state, which an earlier rank has cut already
        is_whole = getattr(model, "embeds", True)
        length = (tokens_BT if is_whole else labels_BT).shape[1]
        choose = context_parallel.even_positions if self.is_ulysses else context_parallel.head_tail_positions
        positions_S = choose(length, rank=self.group.rank, size=self.group.size, device=tokens_BT.device)
        cut = {
            "labels_BS": None if labels_BT is None else labels_BT[:, positions_S],
            "positions_S": positions_S,
            # rows of a mask; None: after its exchange ulysses sees all positions, in order
            "rows_S": None if self.is_ulysses else positions_S,
        }
        return (tokens_BT[:, positions_S] if is_whole else tokens_BT,), kwargs | cut


class _ContextAttention(Attention):
    group: TensorGroup
    kernel: AttentionKernel
    fused: bool

    def attend_across(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, is_ring: bool) -> Tensor:
        return attend_across_ranks(
            q_BNSH, k_BKSH, v_BKSH, self.group, is_ring=is_ring, kernel=self.kernel, fused=self.fused
        )


class GatheredAttention(_ContextAttention):
    """All keys and values at once."""

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        """Of this rank's queries over all keys; the mask has a row for each query and a column for each position."""
        if mask is None:
            return self.attend_across(q_BNSH, k_BKSH, v_BKSH, is_ring=False)
        # one gather for both; with a mask attention is one call of FlexAttention, so that nothing can be overlapped
        gathered = context_parallel.gather_positions(torch.cat((k_BKSH, v_BKSH), dim=1), self.group)
        k_BKTH, v_BKTH = gathered.chunk(2, dim=1)
        return super().attend(q_BNSH, k_BKTH, v_BKTH, mask)


class RingAttention(_ContextAttention):
    """Keys and values of one rank at a time."""

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        """Of this rank's queries over all keys, causal."""
        if mask is not None:  # document numbers come with a batch, so that no check before the first step sees them
            raise PipelineError("ring takes no mask", key="parallel.cp_method", hint="parallel.cp_method=allgather")
        return self.attend_across(q_BNSH, k_BKSH, v_BKSH, is_ring=True)


class UlyssesAttention(_ContextAttention):
    """All positions of some heads."""

    # what is exchanged costs memory: selective_op keeps it (plugins/ac.py), ac=full does not
    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Mask | None) -> Tensor:
        """Exchange, attend as one rank does, exchange back."""
        q_BNTH, k_BKTH, v_BKTH = context_parallel.sequence_to_heads((q_BNSH, k_BKSH, v_BKSH), self.group)
        return context_parallel.heads_to_sequence(super().attend(q_BNTH, k_BKTH, v_BKTH, mask), self.group)


_ATTENTION = {"allgather": GatheredAttention, "ring": RingAttention, "ulysses": UlyssesAttention}
