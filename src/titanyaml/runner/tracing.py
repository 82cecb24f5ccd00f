"""The real pipeline on fake tensors: which products and collectives one rank really does (``runner.trace=true``).

The model is built with two blocks, goes through ``setup.transform`` under a fake process group of the mesh's size, and
runs a forward and a backward in which tensors have shapes and no values. Products and collectives are noted as they
pass; the plan of the same two blocks must name the same. Eager and in high precision, without async TP: what these
change is not which products there are. It is checked for one microbatch, on rank 0.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanyaml.config import ranks
from titanyaml.config.schema import Compile, Config
from titanyaml.dist import compat
from titanyaml.dist.env import Env
from titanyaml.dist.mesh import ParallelDims
from titanyaml.kernels.context_attention import BODIES
from titanyaml.planner import configured, operators, step
from titanyaml.planner.inputs import Job
from titanyaml.runner import setup

BLOCKS = 2
_OPS = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
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
    """Notes products and collectives of plain tensors; DTensors are left to turn into them first."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes, self.work = axes, Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in _OPS:  # FSDP's
            axis = "dp_replicate" if name == "allreduce_" else "shard"
            self.work.send(axis, _OPS[name], _whole_bytes(name, args))
        elif func.namespace == "_c10d_functional" and name in _OPS:  # the plugins' own
            group = next(part for part in reversed(args) if isinstance(part, str))
            self.work.send(self.axes[group], _OPS[name], _whole_bytes(name, args))
        elif name in ("mm", "addmm"):
            left, right = args[-2:]
            self.work.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
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
    return size * args[1] if name == "all_gather_into_tensor" else \
        args[1].numel() * args[1].element_size() if name == "_reduce_scatter_base_" else size


def traced(config: Config) -> Work:
    """What rank 0 does in one forward and backward of ``BLOCKS`` blocks."""
    world = ranks.world_size(config)
    dims = ParallelDims.resolve(config.parallel, world)
    env = Env(0, world, 0, torch.device("cpu"), "gloo")
    with compat.fake_process_group(world):
        mesh = dims.build("cpu") if world > 1 else None
        model, ctx, _, _ = setup.transform(config, env, dims, mesh=mesh)
        notes = _Notes(_axes(mesh, dims))
        with compat.fake_tensors(), _few_threads():
            model.to_empty(device="cpu")
            model.init_buffers(torch.device("cpu"))
            tokens_BS = torch.zeros(config.train.local_batch, config.train.seq_len, dtype=torch.int64)
            documents_BS = tokens_BS if config.model.document_mask else None
            with notes:
                loss = model(tokens_BS=tokens_BS, labels_BS=tokens_BS, documents_BS=documents_BS,
                             loss_fn=setup.loss_function(config, ctx))
                loss.backward()
    return notes.work


@contextmanager
def _few_threads() -> Iterator[None]:
    """Nothing is computed; the backward's threads only need to see the modes of this one."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def _axes(mesh: DeviceMesh | None, dims: ParallelDims) -> dict[str, str]:
    """Axis of the plugins' process groups by name."""
    axes = [axis for axis in ("tp", "cp") if getattr(dims, axis) > 1]
    return {mesh[axis].get_group().group_name: axis for axis in axes}


def reduced(config: Config) -> Config:
    """``config`` with two blocks, one microbatch, eager and in high precision."""
    made = copy.deepcopy(config)
    made.model.num_layers = BLOCKS
    made.compile = dataclasses.replace(made.compile, mode="none", async_tp=False, loss=False, optimizer=False,
                                       cuda_graphs=False, async_tp_ops=Compile().async_tp_ops)
    made.train.compute_dtype = "bfloat16" if made.train.compute_dtype == "auto" else made.train.compute_dtype
    made.train.global_batch = None
    made.ac.mode = "full" if made.ac.mode == "memory_budget" else made.ac.mode
    if getattr(made, "quant", None) is not None:
        made.quant = type(made.quant)()
    nodes = made.pipeline.plugins
    for node, spec in (("compile", made.compile), ("ac", made.ac), ("quant", getattr(made, "quant", None))):
        if node in nodes and spec is not None:
            nodes[node] = dataclasses.asdict(spec)
    if "async_tp" in nodes:
        nodes["async_tp"] = {**nodes["async_tp"], "enabled": False}
    return made


def planned(job: Job) -> Work:
    """The same from the closed form."""
    work = Work()
    lists = [operators.head(job)]
    for layer in range(job.shape.num_layers):
        again = job.ac != "none" and (job.ac != "selective_layer" or layer % job.ac_every == 0)
        lists += [operators.block_forward(job), operators.block_backward(job)]
        lists += [operators.block_recompute(job)] if again else []
    work.flops = sum(operators.flops(one) for one in lists)
    for (axis, op), (count, size, _, _) in step.plan_step(job).times.comm.items():
        work.comm[axis, op] = [round(count), size]
    return work


def compare(config: Config) -> list[dict[str, str]]:
    """Rows of the report: what, planned, traced."""
    small = reduced(config)
    mine, real = planned(configured.job(small)), traced(small)
    rows = [{"what": f"product FLOPs of {BLOCKS} blocks and the ends", "planned": f"{mine.flops:,}",
             "traced": f"{real.flops:,}"}]
    for key in sorted({*mine.comm, *real.comm}):
        texts = [f"{count:,} x, {size:,.0f} bytes" for count, size in
                 (work.comm.get(key, [0, 0]) for work in (mine, real))]
        rows.append({"what": " ".join(key), "planned": texts[0], "traced": texts[1]})
    return rows
