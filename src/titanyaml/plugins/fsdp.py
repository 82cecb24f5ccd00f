"""Data parallelism by FSDP2 (FSDP, HSDP and plain replication by one call), and the compute dtype without it.

Every data rank has the sum of its own tokens' losses, divided by the number of tokens of all ranks: so gradients are
*summed* over the ranks, never averaged.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanyaml.config.rules.fsdp import check_prefetch, check_reuse_memory, check_sharded
from titanyaml.config.rules.values import check_values
from titanyaml.config.rules.view import problem
from titanyaml.errors import Problem
from titanyaml.pipeline.protocol import Change, Context, dtype_name
from titanyaml.pipeline_parallel.staged import model_parts


class FullyShard:
    """Shard (or replicate) the parameters over the data ranks, computing in ``compute_dtype``.

    On one data rank nothing is sharded. Parameters are then stored in ``compute_dtype`` where that is narrower than
    ``param_dtype``, and the optimizer keeps the full-precision masters.

    Args:
        reshard_after_forward: when gathered weights are freed. ``auto``: after a block's forward, except the last
            block, which the backward pass needs at once, and except in a pipeline, whose next microbatch needs them.
            ``always``: also those of the last block and of embedding, final norm and head. ``never``: not at all.
        prefetch: blocks whose weights are gathered ahead, forward and backward. None: FSDP's own order, which gathers
            the next block as soon as the computation of this one is queued.
        cpu_offload: weights, gradients and optimizer state live in host memory; weights visit the device.
        reuse_memory: reduced gradients take the place of freed activations (``ReduceIntoFreedMemory``).
        master: ``float32``: shards are masters in ``param_dtype``. ``split``: shards are in ``compute_dtype``, the
            optimizer has the missing bits, and FSDP rounds summed gradients to ``compute_dtype``.
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
        """The constraints of ``config/rules/fsdp.py``, and a compute dtype no wider than the parameters'."""
        ranks, param, compute = ctx.dims.token_degree, dtype_name(ctx.param_dtype), dtype_name(ctx.compute_dtype)
        prefetch = check_prefetch(self.prefetch, num_layers=len(ctx.facts.blocks), token_degree=ranks, pp=ctx.dims.pp)
        offload = check_sharded("fsdp_cpu_offload", ranks) if self.cpu_offload else None
        reuse = self._check_reuse(ctx) if self.reuse_memory else None
        problems = check_values("parallel", fsdp_reshard_after_forward=self.reshard_after_forward)
        problems += [refusal for refusal in (prefetch, offload, reuse) if refusal]
        if ctx.compute_dtype.itemsize > ctx.param_dtype.itemsize:
            message, fix = f"is {compute}, wider than train.param_dtype", f"train.param_dtype={compute}"
            problems.append(problem("train.compute_dtype", message, f"{param} or narrower", fix))
        return problems

    def _check_reuse(self, ctx: Context) -> Problem | None:
        return check_sharded("fsdp_reuse_memory", ctx.dims.token_degree) or check_reuse_memory(
            pp=ctx.dims.pp,
            cpu_offload=self.cpu_offload,
            master=self.master,
            microbatches=ctx.accumulation,
            param_dtype=dtype_name(ctx.param_dtype),
            reduce_dtype=dtype_name(ctx.reduce_dtype),
        )

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Shard each block, then what is left of the model; on one data rank store it in the compute dtype."""
        if ctx.dims.token_degree == 1:
            return _store_in_compute_dtype(model, ctx)
        assert ctx.mesh is not None, "more than one rank and no mesh"
        names = ctx.facts.blocks
        in_blocks = tuple(f"{name}." for name in names)
        outside = [name for name in _parameter_owners(model) if not name.startswith(in_blocks)]
        if self._stores_narrow(ctx):
            _store(model, ctx.compute_dtype)
        options: dict[str, Any] = {"mesh": ctx.dims.shard_mesh(ctx.mesh), "mp_policy": _policy(ctx)}
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
        self._shard_blocks(model, ctx, options)
        for part in model_parts(model):
            # after the blocks: a root takes the parameters that no FSDP module below it has
            fully_shard(part, reshard_after_forward=self.reshard_after_forward == "always", **options)
            for module in _fsdp_modules(part):
                self._set_reduction(module)
            part.register_forward_hook(_reshard_without_backward)
        self._set_prefetch([model.get_submodule(name) for name in names])
        return model, Change(self._summary(ctx, len(outside)), [*names, *outside])

    def _shard_blocks(self, model: nn.Module, ctx: Context, options: dict[str, Any]) -> None:
        names = ctx.facts.blocks
        for name, layout in zip(names, ctx.facts.layouts, strict=True):
            reshard = self.reshard_after_forward == "always" or not (name == names[-1] or self._keeps_all(ctx))
            if layout.experts and ctx.dims.ep > 1:
                # ep has split dimension 0, the experts. Cutting it twice would need strided shards, which checkpoints
                # and norms would have to know; and few experts on a rank cannot be cut evenly.
                placed = {"mesh": _expert_mesh(ctx), "shard_placement_fn": lambda parameter: Shard(1)}
                experts = model.get_submodule(f"{name}.{layout.experts}")
                fully_shard(experts, reshard_after_forward=reshard, **options | placed)
            fully_shard(model.get_submodule(name), reshard_after_forward=reshard, **options)

    def _set_reduction(self, module: FSDPModule) -> None:
        module.set_gradient_divide_factor(1.0)
        # a plain SUM: with the factor alone FSDP asks for PREMUL_SUM, which NCCL has and gloo has not
        module.set_force_sum_reduction_for_comms(True)
        if self.reuse_memory:
            reduce_scatter: Any = ReduceIntoFreedMemory()  # the abstract class that torch asks for is private
            module.set_custom_reduce_scatter(reduce_scatter)

    def _set_prefetch(self, blocks: list[Any]) -> None:
        if self.prefetch is None:
            return
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + self.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(i - self.prefetch, 0) : i][::-1])

    def _keeps_all(self, ctx: Context) -> bool:
        """Whether gathered weights stay until the end of the step."""
        return self.reshard_after_forward == "never" or (ctx.dims.pp > 1 and self.reshard_after_forward == "auto")

    def _stores_narrow(self, ctx: Context) -> bool:
        return self.master == "split" and ctx.compute_dtype != ctx.param_dtype

    def _summary(self, ctx: Context, num_others: int) -> str:
        param, compute, reduce = map(dtype_name, (ctx.param_dtype, ctx.compute_dtype, ctx.reduce_dtype))
        storage = rounding = ""
        if self._stores_narrow(ctx):
            storage = f"stored in {compute}, the optimizer keeps what is missing for the {param} masters, "
            rounding = f", then rounded to {compute}" if reduce != compute else ""
        # Deferring the reduction to the last microbatch would keep a whole unsharded gradient in full precision on
        # every rank. torch's pipeline schedules do defer it, because a backward for the weights may come long after the
        # one for the input; a rank then has the unsharded gradients of its own stages.
        frequency = "once a step" if ctx.dims.pp > 1 else "after every microbatch"
        freed = "none" if self._keeps_all(ctx) else "all blocks but the last"
        freed = "all" if self.reshard_after_forward == "always" else freed
        notes = [
            f"{len(ctx.facts.blocks)} blocks and {num_others} other modules over {_axes(ctx)}, {storage}computing in "
            f"{compute}; gradients summed in {reduce} {frequency}{rounding}; freed after forward: {freed}",
            f"{self.prefetch} blocks gathered ahead" if self.prefetch else "",
            "state in host memory" if self.cpu_offload else "",
            "gradients in memory of freed activations" if self.reuse_memory else "",
        ]
        return "; ".join(filter(None, notes))


class ReduceIntoFreedMemory:
    """A reduce-scatter for FSDP whose result lies in memory of the stream that computes."""

    # FSDP allocates the result on the stream of its reduction. CUDA's allocator never gives memory of one stream to
    # another, so a step's gradients are reserved beside activations, most of which are gone when the gradients come
    # (3B on two H200: 50.4 GiB reserved, 40.6 ever in use).
    #
    # Why memory of the computing stream is safe: the reduction waits for all computation queued so far, which is done
    # by then with what it has freed; and computation waits for the reduction before it reads gradients, which are freed
    # after that. A result that is freed earlier, a summand or a sum that is rounded, would still be read by the
    # reduction. So the result must be the gradient itself (config.rules.fsdp.check_reuse_memory).

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised."""
        computing = torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else nullcontext()
        with computing:
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum over the ranks of ``group``, a slice to each."""
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def _expert_mesh(ctx: Context) -> DeviceMesh:
    """The ranks that hold the same experts."""
    assert ctx.expert_mesh is not None, "more than one ep rank and no mesh of experts"
    if ctx.dims.dp_replicate == 1:
        return ctx.expert_mesh["expert_shard"]
    return ctx.expert_mesh["dp_replicate", "expert_shard"]


def _axes(ctx: Context) -> str:
    degrees = {axis: getattr(ctx.dims, axis) for axis in ("dp_replicate", "dp_shard", "cp")}
    axes = " x ".join(f"{axis}({degree})" for axis, degree in degrees.items() if degree > 1)
    if ctx.expert_mesh is None:
        return axes
    return f"{axes}, experts over expert_shard({ctx.expert_mesh['expert_shard'].size()})"


def _policy(ctx: Context) -> MixedPrecisionPolicy:
    """Weights gathered in the compute dtype, gradients reduced in the reduce dtype, activations left as they are.

    A shard stored in the compute dtype is gathered as it is.
    """
    return MixedPrecisionPolicy(
        param_dtype=ctx.compute_dtype,
        reduce_dtype=ctx.reduce_dtype,
        output_dtype=None,  # the loss is a full-precision sum
        # the hidden state is in the compute dtype already, and rotary tables must stay in full precision
        cast_forward_inputs=False,
    )


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard_without_backward(model: nn.Module, args: Any, output: Any) -> None:
    """Free what a forward kept gathered, where no backward pass will."""
    # whoever reads parameters next, e.g. a checkpoint after a validation, must find shards, not gathered copies
    if not torch.is_grad_enabled():
        for module in _fsdp_modules(model):
            module.reshard()


def _store_in_compute_dtype(model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
    count = _store(model, ctx.compute_dtype)
    stored = f"one data rank: {count} parameters stored in {dtype_name(ctx.compute_dtype)}"
    masters = f"the optimizer keeps the {dtype_name(ctx.param_dtype)} masters"
    return model, Change(f"{stored}, {masters}", _parameter_owners(model))


def _store(model: nn.Module, dtype: torch.dtype) -> int:
    """Give every parameter a dtype; returns their number. Buffers (rotary tables) keep theirs."""
    stored: dict[nn.Parameter, nn.Parameter] = {}  # by the old one, so that tied modules keep sharing
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            # new parameters, since assigning to .data silently leaves a DTensor as it is
            if parameter not in stored:
                stored[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(module, leaf, stored[parameter])
    return len(stored)


def _parameter_owners(model: nn.Module) -> list[str]:
    """Names of the modules with parameters of their own; one that only shares a tied weight is not named again."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
