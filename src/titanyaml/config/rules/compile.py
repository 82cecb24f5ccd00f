"""Rules of compilation: what is to be compiled is not done by a kernel of ours, and CUDA graphs can be replayed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.view import Rule, into
from titanyaml.config.world import count_ranks, only_shipped_plugins
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)

#: What torch.compile of torch 2.11 to 2.13 knows by itself; and what it has to look for errors with.
BACKENDS = ("inductor", "cudagraphs", "openxla", "tvm")
DEBUGGING = (
    "aot_eager",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_eager_decomp_partition_with_mode",
    "aot_eager_default_partitioner",
    "aot_ts",
    "eager",
    "eager_debug",
    "eager_noexcept",
    "invoke_subgraph",
    "openxla_eval",
    "pre_dispatch_eager",
    "ts",
)

_LOSS, _OPTIMIZER, _GRAPHS = "compile.loss=false", "compile.optimizer=false", "compile.cuda_graphs=false"


def _triton_runs(c: Any) -> bool:
    """As ``kernels.choice`` decides; a plan is of a GPU."""
    on_gpu = c.kernels.name == "fused" or (c.kernels.name == "auto" and (c.runner.name == "plan" or machine.gpus()))
    return bool(on_gpu) and c.train.compute_dtype != "float64"


@rule("compile.loss", "kernels.name", "runner.name", "train.compute_dtype")
def compiled_loss_is_torchs(c: Any) -> Problem | None:
    if not c.compile.loss or not _triton_runs(c):
        return None
    return Problem(
        "compile.loss",
        f"is true, but kernels.name={c.kernels.name} computes the loss by a Triton kernel "
        "here, of which nothing is left to compile",
        allowed="false; true with kernels=torch",
        hint=f"kernels=torch or {_LOSS}",
    )


@rule("compile.optimizer", "kernels.name", "runner.name", "train.compute_dtype", "optim", "parallel.fsdp_cpu_offload")
def compiled_optimizer_is_torchs(c: Any) -> Problem | None:
    if not c.compile.optimizer:
        return None
    if c.optim.name != "adamw":
        return Problem(
            "compile.optimizer",
            f"is true, but optim.name={c.optim.name} is compiled on a GPU as it is",
            allowed="false; true with optim=adamw",
            hint=f"optim=adamw kernels=torch or {_OPTIMIZER}",
        )
    if c.optim.implementation != "auto":
        return Problem(
            "optim.implementation",
            f"is {c.optim.implementation}, which is torch's own kernel, but compile.optimizer is true",
            allowed="auto",
            hint=f"optim.implementation=auto kernels=torch or {_OPTIMIZER}",
        )
    if _triton_runs(c) and not c.parallel.fsdp_cpu_offload:
        return Problem(
            "compile.optimizer",
            f"is true, but kernels.name={c.kernels.name} updates by a Triton kernel "
            "here, of which nothing is left to compile",
            allowed="false; true with kernels=torch",
            hint=f"kernels=torch or {_OPTIMIZER}",
        )
    return None


@rule("compile.cuda_graphs", "compile.mode", "compile.backend", "parallel", "launch", "runner.name")
def cuda_graphs_can_be_replayed(c: Any) -> Problem | None:
    """One problem with all that is in the way, and what removes all of it, where something can."""
    if not c.compile.cuda_graphs:
        return None
    obstacles = [one for one in (_of_device(c), _of_ranks(c), _of_mode(c), _of_backend(c)) if one]
    if not obstacles:
        return None
    reasons, changes = zip(*obstacles, strict=True)
    hint = f"{' '.join(changes)} or {_GRAPHS}" if all(changes) else _GRAPHS
    return Problem(
        "compile.cuda_graphs",
        f"is true, but {'; and '.join(reasons)}",
        allowed="false; true with compiled blocks (Inductor) in a training on one GPU",
        hint=hint,
    )


def _of_device(c: Any) -> tuple[str, str] | None:
    """(what is in the way, what to type against it or "")."""
    if c.runner.name in ("eval", "sample"):
        return f"runner={c.runner.name} runs too few equal steps to replay any", ""
    if c.runner.name in ("check", "plan") or machine.gpus():
        return None
    return "there is no GPU here", ""


def _of_ranks(c: Any) -> tuple[str, str] | None:
    """FSDP gathers weights to other addresses in each step; transfers of tp, cp, ep and pp go around the blocks."""
    ranks = count_ranks(c)
    if ranks in (1, None):
        return None
    fix = "" if c.launch.kind == "external" else "parallel=single launch.nproc=null"
    return f"a graph reads and writes fixed addresses, and what {ranks} ranks gather and exchange has none", fix


def _of_mode(c: Any) -> tuple[str, str] | None:
    if c.compile.mode in ("auto", "block"):
        return None
    return f"compile.mode is {c.compile.mode}: it is blocks that are replayed", "compile.mode=block"


def _of_backend(c: Any) -> tuple[str, str] | None:
    if c.compile.backend == "inductor":
        return None
    return f"compile.backend={c.compile.backend} does not know it", "compile.backend=inductor"


@rule("compile.backend", "compile.mode", "pipeline.plugins")
def backend_is_known(c: Any) -> Problem | None:
    """A package that is installed may register one; so may a plugin of others: then the node asks torch."""
    name = c.compile.backend
    if c.compile.mode == "none" or name in (*BACKENDS, *DEBUGGING) or not only_shipped_plugins(c):
        return None  # the entry points are looked up only where they count
    usual = [*BACKENDS, *(point.name for point in entry_points(group="torch_dynamo_backends"))]
    return unknown_backend(name, usual, debugging=DEBUGGING)


def unknown_backend(name: str, usual: Sequence[str], *, debugging: Sequence[str]) -> Problem | None:
    """What is wrong with a backend that is neither one to run with nor one to look for errors with."""
    if name in (*usual, *debugging):
        return None
    [near] = difflib.get_close_matches(name, [*usual, *debugging], n=1, cutoff=0)
    return Problem(
        "compile.backend",
        f"is {name}, which torch.compile does not know",
        allowed=", ".join(usual),
        hint=f"compile.backend={near}" + " or compile.backend=inductor" * (near != "inductor"),
    )
