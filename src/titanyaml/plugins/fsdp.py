"""Data parallelism by FSDP2 (FSDP, HSDP and plain replication by one call), and the compute dtype without it.

Every data rank holds the sum of its own tokens' losses, divided by the global token count: so gradients are *summed*
over the ranks, never averaged. They are reduced after every microbatch, since deferring it would keep a whole
unsharded gradient in full precision on every rank. In a pipeline torch's schedules do defer it, because a backward by
weight may come long after the one by input; a rank then has the unsharded gradients of its own stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanyaml.errors import Problem
from titanyaml.pipeline.protocol import Change, Context, dtype_name
from titanyaml.pipeline_parallel.staged import model_parts

RESHARD = ("auto", "always", "never")


class FullyShard:
    """Shard (or replicate) the parameters over the data ranks, computing in ``compute_dtype``.

    On one data rank nothing is sharded; parameters are then stored in ``compute_dtype`` where that is narrower than
    ``param_dtype``, and the optimizer keeps the full-precision masters. Shards are in ``param_dtype``; with split
    masters they are in ``compute_dtype`` too, so that they are gathered as they are, and FSDP rounds what it has summed
    in ``reduce_dtype`` to the dtype of the shard.

    Args:
        reshard_after_forward: whether gathered weights are freed after a block's forward. ``auto``: all blocks but the
            last, which the backward pass needs at once, and none in a pipeline, where the next microbatch needs them;
            ``always``: also the last block and the model's own weights (embedding, final norm, head); ``never``.
        prefetch: blocks whose weights are gathered ahead of the one that runs, forward and backward; None: FSDP's own
            order, which gathers the next block as soon as this one's computation is queued.
        cpu_offload: weights, gradients and optimizer state live in host memory; weights visit the device for a block's
            forward and backward.
        reuse_memory: reduced gradients take the place of freed activations (``_IntoFreed``).
        master: ``optim.master``: ``split``, or the master is the shard.
    """

    stage = "fsdp"

    def __init__(
        self,
        *,
        reshard_after_forward: str = "auto",
        prefetch: int | None = None,
        cpu_offload: bool = False,
        reuse_memory: bool = False,
        master: str = "float32",
    ) -> None:
        self.reshard_after_forward, self.prefetch, self.cpu_offload = reshard_after_forward, prefetch, cpu_offload
        self.reuse_memory, self.master = reuse_memory, master

    def reason_off(self, ctx: Context) -> str:
        """Off where one data rank computes in the dtype of its parameters."""
        if ctx.dims.token_degree == 1 and not self.cpu_offload and ctx.compute_dtype == ctx.param_dtype:
            return f"one data rank, compute dtype = parameter dtype ({dtype_name(ctx.param_dtype)})"
        return ""

    def check(self, ctx: Context) -> list[Problem]:
        """The compute dtype is no wider than the parameters', and the option exists."""
        problems = []
        if self.reshard_after_forward not in RESHARD:
            problems.append(
                Problem(
                    "parallel.fsdp_reshard_after_forward",
                    f"is {self.reshard_after_forward!r}",
                    allowed=", ".join(RESHARD),
                )
            )
        if self.prefetch is not None and not 1 <= self.prefetch < len(ctx.facts.blocks):
            problems.append(
                Problem(
                    "parallel.fsdp_prefetch",
                    f"is {self.prefetch}",
                    allowed=f"1 .. {len(ctx.facts.blocks) - 1}, or null",
                )
            )
        if ctx.dims.token_degree == 1 and self.cpu_offload:
            problems.append(
                Problem(
                    "parallel.fsdp_cpu_offload",
                    "is on, but one data rank has nothing to shard",
                    allowed="dp_shard, dp_replicate or cp above 1",
                    hint="parallel.fsdp_cpu_offload=false",
                )
            )
        if self.reuse_memory and not (
            ctx.accumulation == ctx.dims.pp == 1
            and self.master == "float32"
            and ctx.dims.token_degree > 1
            and ctx.reduce_dtype == ctx.param_dtype
            and not self.cpu_offload
        ):
            problems.append(
                Problem(
                    "parallel.fsdp_reuse_memory",
                    "is on, but what FSDP reduces is not, at once, the gradient of the step",
                    allowed="several data ranks, one backward pass a step, train.reduce_dtype = train.param_dtype, "
                    "float32 masters, no offloading",
                    hint="parallel.fsdp_reuse_memory=false",
                )
            )
        if ctx.compute_dtype.itemsize > ctx.param_dtype.itemsize:
            problems.append(
                Problem(
                    "train.compute_dtype",
                    f"is {dtype_name(ctx.compute_dtype)}, wider than train.param_dtype",
                    allowed=f"{dtype_name(ctx.param_dtype)} or narrower",
                    hint=f"train.param_dtype={dtype_name(ctx.compute_dtype)}",
                )
            )
        return problems

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Shard each block, then what is left of the model; or cast."""
        return self._shard(model, ctx) if ctx.dims.token_degree > 1 else _cast(model, ctx)

    def _shard(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        blocks = ctx.facts.blocks
        rest = [name for name in _owners(model) if not name.startswith(tuple(f"{block}." for block in blocks))]
        narrow = self.master == "split" and ctx.compute_dtype != ctx.param_dtype
        if narrow:
            _store(model, ctx.compute_dtype)
        options: dict[str, Any] = {"mesh": ctx.dims.shard_mesh(ctx.mesh), "mp_policy": _policy(ctx)}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
        staged = ctx.dims.pp > 1
        always, never = self.reshard_after_forward == "always", self.reshard_after_forward == "never" or staged
        for name, layout in zip(blocks, ctx.facts.layouts, strict=True):
            reshard = always or (name != blocks[-1] and not never)
            if layout.experts and ctx.dims.ep > 1:
                experts = {"mesh": _expert_mesh(ctx), "shard_placement_fn": lambda parameter: Shard(1)}
                fully_shard(
                    model.get_submodule(f"{name}.{layout.experts}"), reshard_after_forward=reshard, **options | experts
                )
            fully_shard(model.get_submodule(name), reshard_after_forward=reshard, **options)
        for part in model_parts(model):
            fully_shard(part, reshard_after_forward=always, **options)
            for module in _sharded(part):
                module.set_gradient_divide_factor(1.0)
                # a plain SUM: with the factor alone NCCL is asked for PREMUL_SUM, which gloo does not have
                module.set_force_sum_reduction_for_comms(True)
                if self.reuse_memory:
                    module.set_custom_reduce_scatter(_IntoFreed())
            part.register_forward_hook(_release)
        self._order([model.get_submodule(name) for name in blocks])
        freed = "all" if always else "none" if never else "all blocks but the last"
        # a pipeline's stage is gathered once, and its gradients are reduced when its last backward is done
        often = "once a step" if staged else "after every microbatch"
        compute, rounded = dtype_name(ctx.compute_dtype), narrow and ctx.reduce_dtype != ctx.compute_dtype
        return model, Change(
            f"{len(blocks)} blocks and {len(rest)} other modules over {_axes(ctx)}, "
            + (
                f"stored in {compute}, the optimizer keeps what is missing for the "
                f"{dtype_name(ctx.param_dtype)} masters, "
                if narrow
                else ""
            )
            + f"computing in {compute}; gradients summed in {dtype_name(ctx.reduce_dtype)} {often}"
            + (f", then rounded to {compute}" if rounded else "")
            + f"; freed after forward: {freed}"
            + (f"; {self.prefetch} blocks gathered ahead" if self.prefetch else "")
            + ("; state in host memory" if self.cpu_offload else "")
            + ("; gradients in memory of freed activations" if self.reuse_memory else ""),
            [*blocks, *rest],
        )

    def _order(self, blocks: list[FSDPModule]) -> None:
        """Which blocks are gathered ahead of which."""
        if self.prefetch is None:
            return
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + self.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(i - self.prefetch, 0) : i][::-1])


class _IntoFreed:
    """A reduce-scatter for FSDP whose result lies in the memory of the stream that computes.

    FSDP asks for the result inside the stream of its reduction, whose memory no activation ever takes: gradients of a
    step are reserved beside the activations, though most of these are gone when those come. The reduction waits for
    all that was queued for computing before it asks, and all of that is done with what it has freed. The other way
    round, computing waits for the reduction before gradients are read, and they are freed after that. A result that
    is given up before would not be safe: so it must be the gradient itself, not a summand and not to be rounded.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised."""
        computing = torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else nullcontext()
        with computing:
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum over the ranks of ``group``, a slice to each."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _expert_mesh(ctx: Context) -> Any:
    """The ranks that hold the same experts, which are sharded along their second dimension: the first is ep's."""
    mesh = ctx.expert_mesh
    return mesh["expert_shard"] if ctx.dims.dp_replicate == 1 else mesh["dp_replicate", "expert_shard"]


def _axes(ctx: Context) -> str:
    degrees = {axis: getattr(ctx.dims, axis) for axis in ("dp_replicate", "dp_shard", "cp")}
    axes = " x ".join(f"{axis}({degree})" for axis, degree in degrees.items() if degree > 1)
    return axes if ctx.dims.ep == 1 else f"{axes}, experts over expert_shard({ctx.expert_mesh['expert_shard'].size()})"


def _policy(ctx: Context) -> MixedPrecisionPolicy:
    """Weights gathered in the compute dtype, gradients reduced in the reduce dtype, activations left as they are.

    A shard that is stored in the compute dtype is not cast: FSDP copies it into the buffer of its gather.
    Inputs are not cast: the hidden state is in the compute dtype already, and rotary tables must stay in full
    precision. Outputs are not cast: the loss is a full-precision sum.
    """
    return MixedPrecisionPolicy(
        param_dtype=ctx.compute_dtype, reduce_dtype=ctx.reduce_dtype, output_dtype=None, cast_forward_inputs=False
    )


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _release(model: nn.Module, args: Any, output: Any) -> None:
    """Without a backward pass nothing else frees what the forward kept gathered.

    Whoever reads the parameters next (a checkpoint after a validation) must find the shards, not gathered copies.
    """
    if not torch.is_grad_enabled():
        for module in _sharded(model):
            module.reshard()


def _cast(model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
    """Store the parameters in the compute dtype."""
    count = _store(model, ctx.compute_dtype)
    return model, Change(
        f"one data rank: {count} parameters stored in {dtype_name(ctx.compute_dtype)}, "
        f"the optimizer keeps the {dtype_name(ctx.param_dtype)} masters",
        _owners(model),
    )


def _store(model: nn.Module, dtype: torch.dtype) -> int:
    """Give every parameter a dtype; how many there are. Buffers (rotary tables) keep theirs; ties keep their one
    parameter."""
    stored: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            # new ones: assigning to .data leaves a DTensor as it is, without a word
            if parameter not in stored:
                stored[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(module, leaf, stored[parameter])
    return len(stored)


def _owners(model: nn.Module) -> list[str]:
    """Names of the modules that hold parameters themselves; one that only shares a tied weight is not named again."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
