"""Private torch API, gathered here so that a new torch release can break one place.

What compilation, pipelines and async tensor parallelism use stands in other ``compat_*.py`` files: Dynamo and Inductor
take seconds to import.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # re-exported
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

#: First and last release that this file was run with: 2.11 on GPUs, 2.13 on CPU ranks.
TRIED_TORCH = ("2.11", "2.13")

#: Operators by which compiled graphs and selective recomputation recognise collectives and float8 GEMMs.
COLLECTIVES = torch.ops._c10d_functional
ALL_GATHER = COLLECTIVES.all_gather_into_tensor.default
REDUCE_SCATTER = COLLECTIVES.reduce_scatter_tensor.default
WAIT = COLLECTIVES.wait_tensor.default
SCALED_MM = torch.ops.aten._scaled_mm.default
TO_COPY = torch.ops.aten._to_copy.default


@functools.cache  # once a feature
def warn_if_untried(feature: str, tried: tuple[str, ...] = TRIED_TORCH) -> None:
    """Warn that ``feature`` changes internals of torch, if this release lies outside ``tried`` (ascending)."""
    as_numbers = [tuple(map(int, version.split(".")[:2])) for version in (tried[0], torch.__version__, tried[-1])]
    if sorted(as_numbers) != as_numbers:
        logging.getLogger("titanyaml").warning(
            f"{feature} relies on internals of torch and was tried with {tried[0]} to {tried[-1]}, not with "
            f"{torch.__version__}"
        )


def process_groups() -> list[dist.ProcessGroup]:
    return list(distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    # torch has no public function for a live group
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def flat_mesh(mesh: DeviceMesh, *, outer: str | None, axes: list[str]) -> DeviceMesh:
    """``axes`` merged into one axis, preceded by the axis ``outer`` if given."""
    flat = mesh[tuple(axes)]._flatten("_".join(axes))
    if outer is None:
        return flat
    if hasattr(DeviceMesh, "_concatenate"):  # slicing a flattened axis by name warns where this exists
        return DeviceMesh._concatenate([mesh[outer], flat])
    return mesh[outer, "_".join(axes)]


@contextmanager
def fake_process_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Act as one of ``world_size`` ranks that do not exist: collectives return at once, without data."""
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
    """Drop DTensor's caches of operator placements, which hold the meshes, and so the groups, of a job that is over."""
    # A gloo group has three threads, one of which wakes every 10 ms: hundreds of groups took half of the machine that
    # ran the tests.
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    for owner, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        getattr(owner, name, lambda: None)()
    topology = getattr(_collective_utils, "MeshTopoInfo", None)
    for cached in (getattr(_redistribute, "_gen_transform_infos", None), getattr(topology, "build_from_mesh", None)):
        getattr(cached, "cache_clear", lambda: None)()


def group_name(arguments: Sequence[Any]) -> str:
    """Name of the process group among the arguments of a collective operator; ValueError without one."""
    for argument in reversed(arguments):
        if isinstance(argument, str):  # functional collectives take the name itself
            return argument
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return torch._C._distributed_c10d.ProcessGroup.unbox(argument).group_name
    raise ValueError("no process group among the arguments")


# Collectives are called as functional operators, which compilers see in a graph. The public functions around them
# return before the result is there, and their names changed in 2.13.


def all_reduce(tensor: Tensor, operation: str, group_name: str) -> Tensor:
    """A new tensor, reduced over a group; ``operation`` is "sum" or "max"."""
    return wait(COLLECTIVES.all_reduce(tensor.contiguous(), operation, group_name))


def all_gather(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """Every rank's tensor (contiguous), concatenated along dimension 0 in rank order."""
    return wait(start_all_gather(tensor, size, group_name))


def start_all_gather(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """Begin ``all_gather``; the result may be read after ``wait``."""
    return COLLECTIVES.all_gather_into_tensor(tensor, size, group_name)


def reduce_scatter(tensor: Tensor, size: int, group_name: str) -> Tensor:
    """This rank's slice along dimension 0 of the sum over a group."""
    return wait(COLLECTIVES.reduce_scatter_tensor(tensor, "sum", size, group_name))


def all_to_all(tensor: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    """The first ``sent[0]`` rows go to rank 0, and so on; ``received[r]`` rows come from rank r, in rank order."""
    return wait(start_all_to_all(tensor.contiguous(), received, sent, group_name))


def start_all_to_all(tensor: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    """Begin ``all_to_all``; the result may be read after ``wait``. Gradients do not flow through it."""
    return COLLECTIVES.all_to_all_single(tensor, received, sent, group_name)


def wait(tensor: Tensor) -> Tensor:
    """The result of a collective that a ``start_...`` function of this file began."""
    return COLLECTIVES.wait_tensor(tensor)


def produce_and_exchange(produce: Callable[[int, Tensor], None], output: Tensor, group_name: str) -> None:
    """Fill ``output``, cut evenly along dimension 0, with the slices that the ranks produced for this one.
    ``produce`` writes a rank's slice to a tensor. Each travels over symmetric memory while the next is produced.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory._pipelined_produce_and_all2all(produce, output, cast(Any, group_name))


#: Operators on lists of tensors, a few kernels for all of them on a GPU: norms of each, accumulated in ``dtype``;
#: multiplication by one factor, and copies that round to the targets' dtypes, in place.
foreach_norm, foreach_mul_, foreach_copy_ = torch._foreach_norm, torch._foreach_mul_, torch._foreach_copy_


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
    """GEMM of float8 a [M, K] and b [K, N], times their inverse scales, which are [M, 1] and [1, N] or both 0-dim.
    ``fast_accum`` adds in the tensor core's short accumulator. The result has ``dtype``, and is written to ``out``.
    """
    options: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast_accum}
    if out is not None:
        options["out"] = out
    return torch._scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b, **options)


def grouped_mm(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to ``ends_E[0]`` (int32) times the first matrix, up to ``ends_E[1]`` times the second, ...: [M, O]."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return grouped(x_MI, weight_EIO, offs=ends_E)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, H] and log-sum-exp [B, N, S] (float32) of the fused attention kernel "cudnn" or "flash"."""
    # the public function hides the log-sum-exp, without which partial attentions cannot be merged
    if kernel == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        return out, lse.reshape(q.shape[:3])  # some releases append a dimension of 1
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by the backward of ``attention_forward``'s kernel."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
    lengths = q.shape[2], k.shape[2]
    if kernel == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, *lengths, 0.0, causal
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, seed
    )


#: ``__torch_function__`` of a subclass that only wants ``__torch_dispatch__``: operators, not Python functions.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def make_wrapper_tensor(kind: type[Tensor], like: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    """A tensor of the subclass ``kind`` without memory of its own, with the metadata of ``like``; dtype None: its."""
    memory: dict[str, Any] = {"strides": like.stride(), "storage_offset": like.storage_offset(), "layout": like.layout}
    options: dict[str, Any] = {"device": like.device, "requires_grad": like.requires_grad}
    return Tensor._make_wrapper_subclass(kind, like.size(), dtype=dtype or like.dtype, **memory, **options)


def local_shard_object(tensor: DTensor) -> Tensor:
    """The very object in which a DTensor keeps its shard; ``to_local`` of a parameter makes a view (torch 2.13)."""
    return tensor._local_tensor


def write_count(tensor: Tensor) -> int:
    """How often the tensor was written in place, as autograd counts it."""
    return tensor._version


def writes_its_input(operator: Any) -> bool:
    return operator._schema.is_mutable


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors made inside have shapes, dtypes and devices, but no values; real ones may be mixed with them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def ignore_profiler_ops_in_recomputation() -> None:
    """Let selective recomputation wrap blocks that contain FSDP modules (torch 2.13)."""
    # FSDP marks its work for profilers by operators, and its backward makes other marks than its forward. Selective
    # recomputation counts operators and refuses one that it has not seen as often before.
    from torch.utils import checkpoint

    ignored_ops = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    if ignored_ops is not None:  # 2.11 has no such set
        warn_if_untried("selective recomputation of blocks with FSDP modules")
        marks = torch.ops.profiler
        # monkeypatch: torch.utils.checkpoint.SAC_IGNORED_OPS, extended in place. May go when torch's own set holds the
        # operators of torch.profiler.record_function.
        ignored_ops |= {marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction}


def record_memory_history(max_entries: int | None) -> None:
    """Record the newest ``max_entries`` CUDA allocations and frees from now on; None stops and forgets."""
    options: dict[str, Any] = {"enabled": None} if max_entries is None else {"max_entries": max_entries}
    torch.cuda.memory._record_memory_history(**options)


def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded history, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def schedule_rows(name: str, *, owners: Sequence[int], microbatches: int) -> list[list[str]]:
    """Cells of the CSV file of torch's pipeline schedule ``name``, one row a rank. owners: the rank of each stage."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    # A schedule is a pure function of these numbers: stand-ins for stages spare a model and a process group.
    numbers = {"num_stages": len(owners), "group_size": max(owners) + 1, "group_rank": 0, "submod": None}
    first_rank_stages = [stage for stage, owner in enumerate(owners) if owner == 0]
    stages: list[Any] = [SimpleNamespace(stage_index=stage, **numbers) for stage in first_rank_stages]
    schedule_class: Any = get_schedule_class(name)
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if is_single else stages, microbatches, loss_fn=abs)
    order = schedule.pipeline_order if hasattr(schedule, "pipeline_order") else schedule._get_pipeline_order()
    return [
        ["" if action is None else str(action) for action in order[rank] if not str(action).endswith("REDUCE_GRAD")]
        for rank in range(max(owners) + 1)
    ]
