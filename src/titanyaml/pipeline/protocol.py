"""The plugin protocol. A plugin knows neither the training loop nor any other plugin."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from titanyaml.errors import Problem
from titanyaml.kernels.kernel_choice import KernelChoice

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from titanyaml.distributed.mesh import ParallelDims
    from titanyaml.models.protocol import ModelFacts

#: Plugins run in the order of their stages, unless after/before say otherwise. A stage here is a place in that order,
#: not a stage of pipeline parallelism. pp comes first: what follows sees the blocks of one rank. ac comes before
#: compile, so that recomputation is inside the compiled block. FSDP comes late: it shards what tp and ep have left.
STAGES = ("pp", "quant", "tp", "ep", "cp", "async_tp", "model", "ac", "compile", "fsdp", "final")


def first_names(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def dtype_name(dtype: torch.dtype) -> str:
    """As configuration spells it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Change:
    """What a transform did.

    Args:
        summary: one past-tense sentence with numbers ("sharded 33 modules over dp_shard(2)").
        modules: qualified names of the modules it touched; ``["*"]`` for the whole model.
        skipped: module name to the reason why it was left alone.
    """

    summary: str
    modules: list[str]
    # an empty list of modules is an error, so that a plugin says what it left alone and why
    skipped: dict[str, str] = field(default_factory=dict)

    def left_alone(self) -> list[str]:
        """A line per reason in ``skipped``: the first few modules by name, and why."""
        by_reason: dict[str, list[str]] = {}
        for module, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(module)
        return [f"left alone: {first_names(modules)}: {reason}" for reason, modules in by_reason.items()]


@dataclass(frozen=True)
class Context:
    """Everything that a plugin may know, built once per run.

    Args:
        dims: degrees of the mesh. mesh: the DeviceMesh; None where one rank runs alone.
        expert_mesh: the same ranks by expert parallelism (``ParallelDims.build_experts``); None where ep is 1.
        device: where the model will live ("meta" for planning).
        param_dtype, compute_dtype, reduce_dtype: master parameters; forward and backward; gradient reduction.
        seq_len: tokens. local_batch: sequences per forward. accumulation: forwards per optimizer step.
        kernels: whether our own kernels run, or plain PyTorch. active: names of the nodes that are on.
    """

    dims: ParallelDims
    mesh: DeviceMesh | None
    device: torch.device
    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    facts: ModelFacts
    seq_len: int
    local_batch: int
    accumulation: int
    kernels: KernelChoice = KernelChoice(False, "plain PyTorch")
    active: tuple[str, ...] = ()
    expert_mesh: DeviceMesh | None = None
    # what a plugin logs appears under the pipeline's name, whoever wrote it
    log: logging.Logger = logging.getLogger("titanyaml.pipeline")


@runtime_checkable
class Transform(Protocol):
    """The protocol. ``requires``, ``conflicts``, ``after``, ``before`` name nodes and default to ``()``.

    Optional methods, looked up by name:

    - ``reason_off(ctx) -> str``: non-empty where the configuration or the device leaves nothing to do; the node is
      then dropped and the reason shown.
    - ``verify(model, ctx) -> Change | None``: called once after the first step, for what only a step can show; None:
      nothing to report.
    - ``after_step(model)``: called after every update of the weights.
    """

    stage: str
    requires: Sequence[str]
    conflicts: Sequence[str]
    after: Sequence[str]
    before: Sequence[str]

    def check(self, ctx: Context) -> list[Problem]:
        """Problems that the configuration alone shows; nothing is changed."""

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        """Transform the model (on meta) and report it."""
