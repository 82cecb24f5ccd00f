"""The real pipeline on fake tensors: which GEMMs and collectives a rank really does (``runner.trace=true``).

The model is built with few blocks and goes through ``setup.transform`` under a fake process group of the mesh's size.
Then it runs a forward and a backward on tensors that have shapes and no values. GEMMs and collectives are recorded as
they pass; the plan of the same blocks must name the same.

The trace is eager, in high precision and without async TP: these change how fast a GEMM is, not which there are. It
covers one microbatch, or as many as fill a pipeline, on one rank of each pipeline stage. Routers, which have no values
to choose by, send equally many tokens to every rank.
"""

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

from titanyaml.config import kept_matmuls, schema, world
from titanyaml.config.schema import Config
from titanyaml.distributed import compat
from titanyaml.distributed.compat import TorchDispatchMode
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.kernels.context_attention import BODIES
from titanyaml.pipeline.protocol import Context
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.planner.model import from_config, operators, step
from titanyaml.planner.model.inputs import Job
from titanyaml.runner import setup

#: Blocks of a traced model without pipeline: one could not show what FSDP does for all but the last.
NUM_BLOCKS = 2
#: Collective by the name of torch's operator, of c10d and of its functional form.
_COLLECTIVES = {
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
class StepWork:
    """What one rank does in a step."""

    flops: int = 0  # of GEMMs; attention is left out, since a CPU's is another program
    comm: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # (axis, op): [count, bytes of the whole]


class _WorkRecorder(TorchDispatchMode):
    """Records GEMMs and collectives of plain tensors; DTensors turn into those first."""

    def __init__(self, axes: dict[str, dict[str, str]]) -> None:
        super().__init__()
        # by user ("c10d": FSDP and the pipeline; "_c10d_functional": our plugins; "exchanges": all-to-alls), then group
        self.axes, self.work = axes, StepWork()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return 1  # there is no value to read: a pipeline's ranks vote whether shapes are known, and all say yes
        if func.namespace in self.axes and name in _COLLECTIVES:
            num_bytes = _whole_bytes(name, args)
            if num_bytes > 8:  # else it is the sum of a loss, which a plan does not list
                axes = self.axes["exchanges" if name == "all_to_all_single" else func.namespace]
                entry = self.work.comm.setdefault((axes[compat.group_name(args)], _COLLECTIVES[name]), [0, 0])
                entry[0] += 1
                entry[1] += num_bytes
        elif name in ("mm", "addmm"):
            a_MK, b_KN = args[-2:]
            self.work.flops += 2 * a_MK.shape[0] * a_MK.shape[1] * b_KN.shape[1]
        elif name in ("grouped_rows", "grouped_outer"):
            rows, (*_, outputs, inputs) = args[0].shape[0], args[1].shape
            outputs = args[0].shape[1] if name == "grouped_outer" else outputs
            self.work.flops += 2 * rows * outputs * inputs
        elif name == "chunked_cross_entropy":
            (tokens, width), rows = args[0].shape, args[1].shape[0]
            self.work.flops += 2 * tokens * width * rows * (1 + args[5] + args[6])
        elif name in BODIES:
            with self:  # one operator to torch, with collectives inside
                return BODIES[name](*args)
        return func(*args, **(kwargs or {}))


def _whole_bytes(name: str, args: tuple[Any, ...]) -> float:
    """Bytes of what a collective gathers, or reduces, as a whole."""
    first: Tensor = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    if name == "all_gather_into_tensor":  # of c10d_functional: (shard, group size, group)
        return first.numel() * first.element_size() * float(args[1])
    reduced: Tensor = args[1] if name == "_reduce_scatter_base_" else first
    return reduced.numel() * reduced.element_size()


@dataclass
class FakeRank:
    """A transformed model on a rank that does not exist; on meta until ``materialise``."""

    config: Config
    model: nn.Module
    context: Context

    def materialise(self) -> None:
        """Give it memory without values; to be called under ``compat.fake_tensors``."""
        self.model.to_empty(device="cpu")
        for module in self.model.modules():
            if init_buffers := getattr(module, "init_buffers", None):
                init_buffers(torch.device("cpu"))

    def forward(self) -> Tensor:
        """The loss of one microbatch, of a model without pipeline."""
        loss: Tensor = self.model(**self._inputs(), loss_fn=setup.build_loss(self.config, self.context))
        return loss

    def _inputs(self) -> dict[str, Tensor | None]:
        train = self.config.train
        tokens_BS = torch.zeros(train.local_batch, train.seq_len, dtype=torch.int64)
        documents_BS = tokens_BS if self.config.model.document_mask else None
        return {"tokens_BS": tokens_BS, "labels_BS": tokens_BS, "documents_BS": documents_BS}

    def forward_backward(self) -> None:
        """Run the microbatches of one step."""
        if not isinstance(self.model, StagedModel):
            torch.autograd.backward(self.forward())
            return
        train, ctx = self.config.train, self.context
        slices = ctx.dims.tp if self.config.parallel.tp_sequence_parallel else 1
        length = train.seq_len // ctx.dims.cp // slices
        # told here, or the stages would send their shapes, which a peer that does not exist never answers
        self.model.runtime.stream_shape = (train.local_batch, length, ctx.facts.dim)
        loss_fn = setup.build_loss(self.config, ctx)
        self.model.runtime.train([self._inputs() for _ in range(ctx.accumulation)], loss_fn=loss_fn, divisor=1)


@contextmanager
def fake_rank(config: Config, *, pipeline_rank: int = 0, context_rank: int = 0) -> Iterator[FakeRank]:
    """The first rank with these places in pipeline and sequence, among ranks that do not exist."""
    num_ranks = world.count_ranks(config) or world.fixed_product(config.parallel)[0]
    dims = ParallelDims.resolve(config.parallel, num_ranks)
    rank = pipeline_rank * num_ranks // dims.pp + context_rank * dims.tp
    env = Env(rank, num_ranks, 0, torch.device("cpu"), "gloo")
    # A backward on threads of its own would not see the dispatch modes of this thread.
    with compat.fake_process_group(num_ranks, rank=rank), torch.autograd.set_multithreading_enabled(False):
        mesh = dims.build("cpu") if num_ranks > 1 else None
        model, ctx, _, _ = setup.transform(config, env, dims, mesh=mesh)
        yield FakeRank(config, model, ctx)


def trace_work(config: Config, *, pipeline_rank: int = 0) -> StepWork:
    """What the first rank of a pipeline rank does in one forward and backward of all its blocks."""
    with fake_rank(config, pipeline_rank=pipeline_rank) as rank, compat.fake_tensors():
        rank.materialise()
        recorder = _WorkRecorder(_axes_of_groups(rank.context))
        with recorder:
            rank.forward_backward()
    return recorder.work


def _axes_of_groups(ctx: Context) -> dict[str, dict[str, str]]:
    """Axes of process groups, by user and by name: a group of all ranks may serve several users for several axes."""
    dims = ctx.dims
    axes: dict[str, dict[str, str]] = {"c10d": {}, "_c10d_functional": {}, "exchanges": {}}
    if ctx.mesh is None:
        return axes

    def add(users: tuple[str, ...], mesh: DeviceMesh, axis: str) -> None:
        for user in users:
            axes[user][mesh.get_group().group_name] = axis

    for axis in ("tp", "cp"):
        if getattr(dims, axis) > 1:
            add(("_c10d_functional", "exchanges"), ctx.mesh[axis], axis)
    if dims.token_degree > 1:
        shards = dims.shard_mesh(ctx.mesh)
        add(("c10d",), shards[(shards.mesh_dim_names or ())[-1]], "shard")
    for mesh in filter(None, (ctx.mesh, ctx.expert_mesh)):
        for axis in ("dp_replicate", "expert_shard", "pp"):
            if axis in (mesh.mesh_dim_names or ()) and mesh[axis].size() > 1:
                add(("c10d",), mesh[axis], axis)
    if ctx.expert_mesh is not None:
        add(("exchanges",), ctx.expert_mesh["ep"], "ep")
    return axes


def reduce_config(config: Config) -> Config:
    """``config`` with few blocks and microbatches, eager and in high precision: what a trace can run in a second."""
    job = from_config.job(config)
    small = copy.deepcopy(config)
    parallel = small.parallel
    parallel.pp_stages, parallel.pp_first_stage_less_layers, parallel.pp_last_stage_less_layers = [], None, None
    # one more block than stages, so that stages differ in length
    small.model.num_layers = NUM_BLOCKS if job.mesh.pp == 1 else job.mesh.pp * job.stages_per_rank + 1
    eager: dict[str, Any] = dict.fromkeys(("async_tp", "loss", "optimizer", "cuda_graphs"), False)
    async_tp_ops = schema.CompileConfig().async_tp_ops
    small.compile = dataclasses.replace(small.compile, mode="none", async_tp_ops=async_tp_ops, **eager)
    small.train.compute_dtype = "bfloat16" if small.train.compute_dtype == "auto" else small.train.compute_dtype
    small.train.global_batch = None
    small.ac.mode = "full" if small.ac.mode == "memory_budget" else small.ac.mode  # a budget is the compiler's
    small.quant = schema.Quant()
    nodes = small.pipeline.plugins
    if "pp" in nodes:
        nodes["pp"] = {**nodes["pp"], "stages": [], "first_less": None, "last_less": None}
    for name in {"compile", "ac", "quant"} & nodes.keys():
        nodes[name] = dataclasses.asdict(getattr(small, name))
    if "async_tp" in nodes:
        nodes["async_tp"] = {**nodes["async_tp"], "enabled": False}
    return small


def plan_work(job: Job, *, pipeline_rank: int = 0) -> StepWork:
    """The same as ``trace_work``, from the planner's closed form."""
    work = StepWork()
    stages = job.stages_of(pipeline_rank)
    operator_lists = [operators.head(job)] if any(stage.last for stage in stages) else []
    blocks = [block for stage in stages for block in stage.blocks]
    levels = kept_matmuls.block_levels(job.ac_keep, blocks=len(blocks))
    for layer, (block, level) in enumerate(zip(blocks, levels, strict=True)):
        operator_lists += [operators.block_forward(job, block), operators.block_backward(job, block)]
        operator_lists += [operators.block_recompute(job, block, level)] if step.recomputes(job, layer) else []
    work.flops = job.microbatches * sum(map(operators.gemm_flops, operator_lists))
    for (axis, op), (count, size, _, _) in step.plan_rank(job, pipeline_rank).times.comm.items():
        work.comm[axis, op] = [round(count), size]
    return work


def compare(config: Config) -> list[dict[str, str]]:
    """Rows of the report: what, planned, traced."""
    small = reduce_config(config)
    job, rows = from_config.job(small), []
    for rank in range(job.mesh.pp):
        both = plan_work(job, pipeline_rank=rank), trace_work(small, pipeline_rank=rank)
        prefix = f"pipeline rank {rank}: " if job.mesh.pp > 1 else ""
        figures = {f"product FLOPs of {job.layers_of_ranks[rank]} blocks and the ends": [f"{w.flops:,}" for w in both]}
        for key in sorted({*both[0].comm, *both[1].comm}):
            entries = [work.comm.get(key, [0, 0]) for work in both]
            figures[" ".join(key)] = [f"{count:,} x, {num_bytes:,.0f} bytes" for count, num_bytes in entries]
        for name, (planned, traced) in figures.items():
            rows.append({"what": prefix + name, "planned": planned, "traced": traced})
    return rows
