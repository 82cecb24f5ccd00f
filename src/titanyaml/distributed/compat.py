"""The home of private torch API, so that a new torch release has one file to break.

What compilation uses stands in ``compat_compile.py``, what pipelines run on in ``compat_pipeline.py``, what only async
tensor parallelism uses in ``compat_async_tp.py``, which takes seconds to import.

Checked with torch 2.11 to 2.13. A name that a release took away gets a public, slower way where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group of this rank that exists now."""
    return list(distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Change the time-out of a live process group; torch has no public function for it."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def flat_mesh(mesh: DeviceMesh, *, outer: str | None, axes: list[str]) -> DeviceMesh:
    """The product of some axes as one axis, behind ``outer`` if given."""
    flat = mesh[tuple(axes)]._flatten("_".join(axes))
    if outer is None:
        return flat
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([mesh[outer], flat])
    return mesh[outer, "_".join(axes)]


def foreach_norms(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """``torch.linalg.vector_norm`` of each tensor, accumulated in ``dtype``; a few kernels in all on a GPU."""
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place by the 0-dim ``factor``."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_copy_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, rounding to the target's dtype."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    *,
    fast_accum: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """The product of two float8 matrices times their inverse scales: [M, 1] and [1, N], or both 0-dim."""
    place = {} if out is None else {"out": out}
    return torch._scaled_mm(
        a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=fast_accum, **place
    )


def produce_and_exchange(produce: Callable[[int, Tensor], None], output: Tensor, group_name: str) -> None:
    """Fill ``output``, cut along its first dimension, with what each rank has produced for this one: while one piece
    travels over symmetric memory the next is produced.

    Args:
        produce: of a rank and a tensor to write to.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_produce_and_all2all(produce, output, group_name)


def all_reduce(tensor: Tensor, operation: str, group_name: str) -> Tensor:
    """A new tensor, reduced over a group; ``operation`` "sum" or "max". A functional operator: compilers see it.

    The public functions around these operators return before the result is there, and their names changed in 2.13.
    """
    pending = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), operation, group_name)
    return torch.ops._c10d_functional.wait_tensor(pending)


def all_gather(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """Every rank's tensor (contiguous), one after the other along dimension 0; functional."""
    return wait(start_all_gather(tensor, size, group_name))


def start_all_gather(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """``all_gather`` that is still on its way: other work may go on until ``wait``."""
    return torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, group_name)


def start_exchange(tensor: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    """All-to-all along dimension 0 that is still on its way.

    Args:
        received, sent: rows from and to each rank, in rank order. Gradients do not flow through it.
    """
    return torch.ops._c10d_functional.all_to_all_single(tensor, received, sent, group_name)


def wait(tensor: Tensor) -> Tensor:
    """What a ``start_...`` of this file promised."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def reduce_scatter(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """This rank's slice along dimension 0 of the sum over a group; functional."""
    pending = torch.ops._c10d_functional.reduce_scatter_tensor(tensor, "sum", size, group_name)
    return torch.ops._c10d_functional.wait_tensor(pending)


def all_to_all(tensor: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    """The first ``sent[0]`` rows to rank 0, and so on; ``received[r]`` rows from rank r, in the order of ranks."""
    return wait(start_exchange(tensor.contiguous(), received, sent, group_name))


def grouped_mm(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to ``ends_E[0]`` (int32) times the first matrix, up to ``ends_E[1]`` times the second, ...: [M, O]."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return grouped(x_MI, weight_EIO, offs=ends_E)


def record_memory_history(max_entries: int | None) -> None:
    """Start to record CUDA allocations and frees, the newest ``max_entries`` of them; None: stop and forget."""
    if max_entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_snapshot(path: Path) -> None:
    """Write what was recorded, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def local_shard_object(tensor: Tensor) -> Tensor:
    """The tensor object in which a DTensor keeps this rank's shard; ``to_local`` of a parameter gives a view (2.13)."""
    return tensor._local_tensor


def wrapper(kind: type[Tensor], like: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """A tensor of a subclass ``kind`` that has no memory of its own, and looks like ``like``; dtype: None: its."""
    return Tensor._make_wrapper_subclass(
        kind,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=dtype or like.dtype,
        layout=like.layout,
        device=like.device,
        requires_grad=like.requires_grad,
    )


#: ``__torch_function__`` of a subclass that is told of operators alone (``__torch_dispatch__``).
no_torch_function = torch._C._disabled_torch_function_impl


def ignore_profiler_ops_in_recomputation() -> None:
    """Let selective recomputation go around FSDP modules inside a block (torch 2.13).

    FSDP marks what it does for profilers, by operators of which a backward pass makes others than a forward; selective
    recomputation counts operators, and refuses one that it has not seen as often before.
    """
    from torch.utils import checkpoint

    marks = torch.ops.profiler
    ignored = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    if ignored is not None:
        ignored |= {marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction}


@contextmanager
def fake_process_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Stand as one of ``world_size`` ranks that do not exist: collectives return at once, without data."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - torch 2.11 registers the backend here

    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()


def clear_mesh_caches() -> None:
    """DTensors remember how results of operators are placed, with the mesh that was first seen: of groups now gone.

    What is remembered keeps groups alive, and each gloo group has three threads, one of which wakes every 10 ms.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for owner, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        getattr(owner, name, lambda: None)()
    topology = getattr(_collective_utils, "MeshTopoInfo", None)
    for cached in (getattr(_redistribute, "_gen_transform_infos", None), getattr(topology, "build_from_mesh", None)):
        getattr(cached, "cache_clear", lambda: None)()


def group_name(arguments: Sequence[Any]) -> str:
    """Name of the process group among the arguments of a collective operator: functional ones are given the name."""
    for one in reversed(arguments):
        if isinstance(one, str):
            return one
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return torch._C._distributed_c10d.ProcessGroup.unbox(one).group_name
    raise ValueError("no process group among the arguments")


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors made inside have shapes, dtypes and devices, and no values; real ones may join them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has no values that could be looked at."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [B, N, S] (float32) of a fused attention kernel: "cudnn" or "flash".

    The public function hides the log-sum-exp, without which parts of an attention cannot be put together.
    """
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return out, lse.reshape(q.shape[:3])  # a trailing dimension of 1 in some releases
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by the backward of ``attention_forward``'s kernel."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
    )


def schedule_rows(name: str, *, owners: Sequence[int], microbatches: int) -> list[list[str]]:
    """The computations of torch's pipeline schedule ``name``, as the cells of its CSV file: a row a rank.

    Args:
        owners: the rank of each stage.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    # a schedule is a pure function of these numbers; stages with a model and a process group are not needed for it
    numbers = {"num_stages": len(owners), "group_size": max(owners) + 1, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=stage, **numbers) for stage, owner in enumerate(owners) if owner == 0]
    kind = get_schedule_class(name)
    schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, microbatches, loss_fn=abs)
    order = schedule.pipeline_order if hasattr(schedule, "pipeline_order") else schedule._get_pipeline_order()
    return [
        ["" if action is None else str(action) for action in order[rank] if not str(action).endswith("REDUCE_GRAD")]
        for rank in range(max(owners) + 1)
    ]
