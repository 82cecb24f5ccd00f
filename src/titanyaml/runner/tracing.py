"""The real pipeline on fake tensors: which products and collectives a rank really does (``runner.trace=true``).

The model is built with few blocks, goes through ``setup.transform`` under a fake process group of the mesh's size, and
runs a forward and a backward in which tensors have shapes and no values. Products and collectives are noted as they
pass; the plan of the same blocks must name the same. Eager and in high precision, without async TP: what these
change is not which products there are. It is checked for one microbatch, or as many as fill a pipeline, on one rank of
each pipeline stage. Routers that have no values to choose by send equally many tokens to every rank.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanyaml.config import kept_matmuls, world
from titanyaml.config.schema import Compile, Config
from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.kernels.context_attention import BODIES
from titanyaml.pipeline.protocol import Context
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.planner.model import from_config, operators, step
from titanyaml.planner.model.inputs import Job
from titanyaml.runner import setup

BLOCKS = 2
_OPS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "receive",
}


@dataclass
class Work:
    """flops: of matrix products, attention left out. comm: (axis, op) to [count, bytes of what is whole]."""

    flops: int = 0
    comm: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def send(self, axis: str, op: str, size: float) -> None:
        """Note a collective."""
        entry = self.comm.setdefault((axis, op), [0, 0])
        entry[0] += 1
        entry[1] += size


class _Notes(TorchDispatchMode):
    """Notes products and collectives of plain tensors; DTensors are left to turn into them first. axes: by namespace
    ("c10d": FSDP's and the pipeline's, "_c10d_functional": the plugins' own), then by name of the group."""

    def __init__(self, axes: dict[str, dict[str, str]]) -> None:
        super().__init__()
        self.axes, self.work = axes, Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return 1  # a pipeline's ranks vote whether shapes are known; all say yes
        if func.namespace in self.axes and name in _OPS:
            size = _whole_bytes(name, args)
            if size > 8:  # else the sum of a loss
                axes = self.axes["exchanges" if name == "all_to_all_single" else func.namespace]
                self.work.send(axes[compat.group_name(args)], _OPS[name], size)
        elif name in ("mm", "addmm"):
            left, right = args[-2:]
            self.work.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif name in ("grouped_rows", "grouped_outer"):
            rows, (*_, outputs, inputs) = args[0].shape[0], args[1].shape
            outputs = args[0].shape[1] if name == "grouped_outer" else outputs
            self.work.flops += 2 * rows * outputs * inputs
        elif name == "chunked_cross_entropy":
            (tokens, width), rows = args[0].shape, args[1].shape[0]
            self.work.flops += 2 * tokens * width * rows * (1 + args[5] + args[6])
        elif name in BODIES:
            with self:  # its transfers are inside
                return BODIES[name](*args)
        return func(*args, **(kwargs or {}))


def _whole_bytes(name: str, args: tuple) -> float:
    first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    size = first.numel() * first.element_size()
    return (
        size * args[1]
        if name == "all_gather_into_tensor"
        else args[1].numel() * args[1].element_size()
        if name == "_reduce_scatter_base_"
        else size
    )


@dataclass
class Stand:
    """A model on fake ranks: built, transformed, on meta until ``materialise``.

    Args:
        config: of it. model, context: as ``setup.transform`` returns them.
    """

    config: Config
    model: nn.Module
    context: Context

    def materialise(self) -> None:
        """Give it memory without values; to be called under ``compat.fake_tensors``."""
        self.model.to_empty(device="cpu")
        for module in self.model.modules():
            if hasattr(module, "init_buffers"):
                module.init_buffers(torch.device("cpu"))

    def forward(self) -> Tensor:
        """The loss of one microbatch, of a model without pipeline."""
        return self.model(**self._inputs(), loss_fn=setup.loss_function(self.config, self.context))

    def _inputs(self) -> dict[str, Tensor | None]:
        train = self.config.train
        tokens_BS = torch.zeros(train.local_batch, train.seq_len, dtype=torch.int64)
        documents_BS = tokens_BS if self.config.model.document_mask else None
        return {"tokens_BS": tokens_BS, "labels_BS": tokens_BS, "documents_BS": documents_BS}

    def forward_backward(self) -> None:
        """One step's microbatches."""
        if not isinstance(self.model, StagedModel):
            self.forward().backward()
            return
        train, ctx = self.config.train, self.context
        slices = ctx.dims.tp if self.config.parallel.tp_sequence_parallel else 1
        length = train.seq_len // ctx.dims.cp // slices
        self.model.runtime.shape = (train.local_batch, length, ctx.facts.dim)
        loss_fn = setup.loss_function(self.config, ctx)
        self.model.train_step([self._inputs() for _ in range(ctx.accumulation)], loss_fn=loss_fn, divisor=1)


@contextmanager
def stand(config: Config, *, pipeline_rank: int = 0, context_rank: int = 0) -> Iterator[Stand]:
    """The first rank of a pipeline rank with this place in its sequence, among ranks that do not exist."""
    num_ranks = world.count_ranks(config)
    dims = ParallelDims.resolve(config.parallel, num_ranks)
    rank = pipeline_rank * num_ranks // dims.pp + context_rank * dims.tp
    env = Env(rank, num_ranks, 0, torch.device("cpu"), "gloo")
    # nothing is computed; the backward's threads only need to see the modes of this one
    with compat.fake_process_group(num_ranks, rank=rank), torch.autograd.set_multithreading_enabled(False):
        mesh = dims.build("cpu") if num_ranks > 1 else None
        model, ctx, _, _ = setup.transform(config, env, dims, mesh=mesh)
        yield Stand(config, model, ctx)


def traced(config: Config, *, pipeline_rank: int = 0) -> Work:
    """What the first rank of a pipeline rank does in one forward and backward of all its blocks."""
    with stand(config, pipeline_rank=pipeline_rank) as made, compat.fake_tensors():
        made.materialise()
        with _Notes(_axes(made.context)) as notes:
            made.forward_backward()
    return notes.work


def _axes(ctx: Context) -> dict[str, dict[str, str]]:
    """Axes of process groups by who uses them and by name: a group of all ranks may serve several."""
    dims, found = ctx.dims, {"c10d": {}, "_c10d_functional": {}, "exchanges": {}}
    if ctx.mesh is None:
        return found

    def note(users: tuple[str, ...], mesh: DeviceMesh, axis: str) -> None:
        for user in users:
            found[user][mesh.get_group().group_name] = axis

    for axis in ("tp", "cp"):
        if getattr(dims, axis) > 1:
            note(("_c10d_functional", "exchanges"), ctx.mesh[axis], axis)
    if dims.token_degree > 1:
        shards = dims.shard_mesh(ctx.mesh)
        note(("c10d",), shards[shards.mesh_dim_names[-1]], "shard")
    for mesh in filter(None, (ctx.mesh, ctx.expert_mesh)):
        for axis in ("dp_replicate", "expert_shard", "pp"):
            if axis in mesh.mesh_dim_names and mesh[axis].size() > 1:
                note(("c10d",), mesh[axis], axis)
    if ctx.expert_mesh is not None:
        note(("exchanges",), ctx.expert_mesh["ep"], "ep")
    return found


def reduced(config: Config) -> Config:
    """``config`` with two blocks, or one more than stages, as few microbatches as can be, eager, in high precision."""
    made = copy.deepcopy(config)
    parallel = made.parallel
    parallel.pp_stages, parallel.pp_first_stage_less_layers, parallel.pp_last_stage_less_layers = [], None, None
    job = from_config.job(config)
    made.model.num_layers = BLOCKS if job.mesh.pp == 1 else job.mesh.pp * job.stages_per_rank + 1
    made.compile = dataclasses.replace(
        made.compile,
        mode="none",
        async_tp=False,
        loss=False,
        optimizer=False,
        cuda_graphs=False,
        async_tp_ops=Compile().async_tp_ops,
    )
    made.train.compute_dtype = "bfloat16" if made.train.compute_dtype == "auto" else made.train.compute_dtype
    made.train.global_batch = None
    made.ac.mode = "full" if made.ac.mode == "memory_budget" else made.ac.mode
    if getattr(made, "quant", None) is not None:
        made.quant = type(made.quant)()
    nodes = made.pipeline.plugins
    if "pp" in nodes:
        nodes["pp"] = {**nodes["pp"], "stages": [], "first_less": None, "last_less": None}
    for node, spec in (("compile", made.compile), ("ac", made.ac), ("quant", getattr(made, "quant", None))):
        if node in nodes and spec is not None:
            nodes[node] = dataclasses.asdict(spec)
    if "async_tp" in nodes:
        nodes["async_tp"] = {**nodes["async_tp"], "enabled": False}
    return made


def planned(job: Job, *, pipeline_rank: int = 0) -> Work:
    """The same from the closed form."""
    work = Work()
    stages = job.stages_of(pipeline_rank)
    lists = [operators.head(job)] if any(stage.last for stage in stages) else []
    blocks = [block for stage in stages for block in stage.blocks]
    for layer, (block, keeps) in enumerate(zip(blocks, kept_matmuls.block_levels(job.ac_keep, blocks=len(blocks)), strict=True)):
        again = job.ac != "none" and (job.ac != "selective_layer" or layer % job.ac_every == 0)
        lists += [operators.block_forward(job, block), operators.block_backward(job, block)]
        lists += [operators.block_recompute(job, block, keeps)] if again else []
    work.flops = job.microbatches * sum(operators.flops(one) for one in lists)
    for (axis, op), (count, size, _, _) in step.plan_rank(job, pipeline_rank).times.comm.items():
        work.comm[axis, op] = [round(count), size]
    return work


def compare(config: Config) -> list[dict[str, str]]:
    """Rows of the report: what, planned, traced."""
    small = reduced(config)
    job, rows = from_config.job(small), []
    for rank in range(job.mesh.pp):
        mine, real = planned(job, pipeline_rank=rank), traced(small, pipeline_rank=rank)
        where = f"pipeline rank {rank}: " if job.mesh.pp > 1 else ""
        rows.append(
            {
                "what": f"{where}product FLOPs of {job.layers_of_ranks[rank]} blocks and the ends",
                "planned": f"{mine.flops:,}",
                "traced": f"{real.flops:,}",
            }
        )
        for key in sorted({*mine.comm, *real.comm}):
            texts = [
                f"{count:,} x, {size:,.0f} bytes"
                for count, size in (work.comm.get(key, [0, 0]) for work in (mine, real))
            ]
            rows.append({"what": where + " ".join(key), "planned": texts[0], "traced": texts[1]})
    return rows
