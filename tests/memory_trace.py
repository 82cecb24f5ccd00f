"""Live memory of the real pipeline on fake tensors, by who allocated it: what the planner is held against.

A dispatch mode sees every tensor that an operator returns and notes its storage; a storage is alive until nothing
refers to it, and is as large as it is at that moment (FSDP empties gathered weights without freeing the object). Who
allocated it is told by hooks: a block's forward, a block's backward, the loss, the optimizer.

What is seen is what torch's own semantics keep alive, in an eager program: neither rounding of an allocator, nor its
cached blocks, nor streams.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanyaml import loss, optim
from titanyaml.config import world
from titanyaml.config.schema import Config
from titanyaml.distributed import compat, norm
from titanyaml.distributed.tensor import local
from titanyaml.loss import wide_matmul
from titanyaml.runner import tracing

#: Labels that stay whoever uses the tensor.
_FIXED = ("parameters", "optimizer")


@dataclass
class Moment:
    """Bytes alive by label. when: what ran."""

    when: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


class Ledger(TorchDispatchMode):
    """Storages that are alive, by label. where: label of what is allocated now. peak: the fullest moment so far."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.peak = "start", Moment("")
        self._known: dict[int, tuple[weakref.ref, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return 1  # a pipeline's ranks vote whether shapes are known; all say yes
        if name == "chunked_cross_entropy":
            with self:  # one operator whose buffers would not be seen
                return loss.chunked_cross_entropy(*args)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor, self.where)
        if func.namespace == "fsdp":
            for tensor in tree_leaves((args, kwargs, out)):
                if isinstance(tensor, Tensor):
                    self.note(tensor, "transfers", again=True)
        self._weigh()
        return out

    def note(self, tensor: Tensor, label: str, *, again: bool = False) -> None:
        """Know a tensor's storage under a label; again: also where it has one. On meta there is none: what a pipeline
        is told of its transfers, which torch 2.11 keeps."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        old = self._known.get(key)
        if old is None or old[0]() is None or (again and old[1] not in _FIXED):
            self._known[key] = weakref.ref(storage), label

    def now(self) -> dict[str, int]:
        """Bytes alive by label."""
        parts: dict[str, int] = defaultdict(int)
        for key, (reference, label) in list(self._known.items()):
            storage = reference()
            if storage is None:
                del self._known[key]
            else:
                parts[label] += storage.nbytes()
        return dict(parts)

    def _weigh(self) -> None:
        parts = self.now()
        if sum(parts.values()) > self.peak.total:
            self.peak = Moment(self.where, parts)


@dataclass
class Measured:
    """Bytes of one rank.

    Args:
        parameters, optimizer, gradients: alive when the update begins. saved: by each block, until its backward; of
            all microbatches that are in flight at most. peak: of everything alive.
    """

    parameters: int
    optimizer: int
    gradients: int
    saved: list[int]
    peak: Moment


class _Norm(torch.autograd.Function):
    """RMSNorm as the GPU's one kernel: keeps its input and a number a row. On a CPU it is six operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Norms by ``_Norm``, and the loss's products without copies in float32. A function mode would not be there when
    the backward pass recomputes."""
    originals = F.rms_norm, wide_matmul.project, wide_matmul.add_outer, wide_matmul.outer
    original = F.rms_norm
    wide_matmul.project = lambda hidden_CD, weight_VD, *, dtype: hidden_CD.new_empty(
        (hidden_CD.shape[0], weight_VD.shape[0]), dtype=dtype
    )
    wide_matmul.add_outer = lambda *_: None
    wide_matmul.outer = lambda grad_CV, hidden_CD, *, dtype: hidden_CD.new_empty(
        (grad_CV.shape[1], hidden_CD.shape[1]), dtype=dtype
    )
    F.rms_norm = lambda x, shape, weight=None, eps=None: (
        _Norm.apply(x, weight) if weight is not None else original(x, shape, weight, eps)
    )
    try:
        yield
    finally:
        F.rms_norm, wide_matmul.project, wide_matmul.add_outer, wide_matmul.outer = originals


def compiled_block(config: Config) -> int:
    """Bytes that the last block, compiled, keeps for its backward pass: what the partitioner of its joint graph chose,
    weights and tables of positions left out.

    ``config`` compiles blocks with a backend that partitions as inductor does (``aot_eager_decomp_partition``).
    """
    with tracing.fake_rank(config) as rank, compat.fake_tensors():
        rank.materialise()
        _fuse_attention(rank.model)
        block = rank.model.get_submodule(rank.context.facts.blocks[-1])
        inner, runs, saved = block._compiled_call_impl, [], []

        def call(*args: Any, **kwargs: Any) -> Any:
            runs.append(True)
            out = inner(*args, **kwargs)
            runs.clear()
            return out

        def pack(tensor: Tensor) -> Tensor:
            if runs:
                saved.append(tensor)
            return tensor

        block._compiled_call_impl = call
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            rank.forward()
        not_saved = [*block.parameters(), *rank.model.buffers()]
        other_storages = {local(tensor.detach()).untyped_storage()._cdata for tensor in not_saved}
        sizes = {s._cdata: s.nbytes() for s in (local(tensor.detach()).untyped_storage() for tensor in saved)}
        return sum(size for key, size in sizes.items() if key not in other_storages)


def _fuse_attention(model: nn.Module) -> None:
    """Parts of attention by a GPU's kernel, which holds no scores."""
    for module in model.modules():
        if getattr(module, "kernel", None) == "plain":
            module.kernel = "cudnn"


def measured(config: Config, *, pipeline_rank: int = 0) -> Measured:
    """One step of ``config``, which is eager: forward, backward, clipping, update. Under cp on the second rank, whose
    queries have keys before them."""
    position = {"pipeline_rank": pipeline_rank, "context_rank": int(world.resolve_degree(config, "cp") > 1)}
    with tracing.fake_rank(config, **position) as rank, compat.fake_tensors():
        rank.materialise()
        _fuse_attention(rank.model)
        return _step(rank, Ledger())


def _step(rank: tracing.FakeRank, ledger: Ledger) -> Measured:
    model, named = rank.model, dict(rank.model.named_parameters())
    with ledger, _as_on_gpu():
        for parameter in named.values():
            ledger.note(local(parameter.detach()), "parameters", again=True)
        ledger.where = "optimizer"
        optimizer = _optimizer(rank, named)
        saved = _hook(ledger, model, model.facts.blocks)
        ledger.where = "inputs"
        rank.forward_backward()
        ledger.where = "update"
        grads = optimizer.grads()
        gradient_bytes = {s._cdata: s.nbytes() for s in (local(grad).untyped_storage() for grad in grads)}
        clip = norm.clip_factor(norm.grad_norm(grads), 1.0)
        optimizer.step(1e-3, clip=clip)
        parts = ledger.now()
    return Measured(
        parts["parameters"], parts["optimizer"], sum(gradient_bytes.values()), list(saved.values()), ledger.peak
    )


def _optimizer(rank: tracing.FakeRank, named: dict[str, nn.Parameter]) -> optim.AdamW:
    """The one of a run, with masters as ``models.init.materialise`` makes them: float32, or what is left of split ones.
    torch's fused kernel has no temporaries."""
    dtype = torch.int16 if rank.config.optim.master == "split" else torch.float32
    masters = {name: p.detach().to(dtype) for name, p in named.items() if p.dtype.itemsize < 4}
    spec = dataclasses.replace(rank.config.optim, implementation="fused")
    return optim.build(spec, named, masters=masters, device="cpu", remote_params=getattr(rank.model, "elsewhere", None))


def _hook(ledger: Ledger, model: nn.Module, blocks: Sequence[str]) -> dict[str, int]:
    """Label what a block's forward allocates; the most that is alive of it while it is not itself at work."""
    saved = dict.fromkeys(blocks, 0)

    def begin(name: str) -> Any:
        def hook(*_: Any) -> None:
            ledger.where = name

        return hook

    def end(last: str) -> Any:
        def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
            ledger.where = "after"
            for parameter in module.parameters():
                ledger.note(local(parameter.detach()), "transfers", again=True)  # whole, where FSDP keeps them so
            parts = ledger.now()
            for name in saved:
                saved[name] = max(saved[name], parts.get(name, 0))
            if out.requires_grad:
                out.register_hook(lambda grad: begin(f"{last} backward")())

        return hook

    for name, block in zip(blocks, _modules(model, blocks), strict=True):
        block.register_forward_pre_hook(begin(name), prepend=True)
        block.register_forward_hook(end(name))
    return saved


def _modules(model: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    modules = dict(model.named_modules())
    return [modules[name] for name in blocks]
