"""Rules of compilation: what is to be compiled is not done by a kernel of ours, and CUDA graphs can be replayed."""

from __future__ import annotations

from typing import Any

from titanyaml import machine
from titanyaml.config.ranks import degree, world_size
from titanyaml.config.view import Rule, into
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)

_LOSS, _OPTIMIZER, _GRAPHS = "compile.loss=false", "compile.optimizer=false", "compile.cuda_graphs=false"


def _triton_runs(c: Any) -> bool:
    """As ``kernels.choice`` decides; a plan is of a GPU."""
    on_gpu = c.kernels.name == "fused" or (c.kernels.name == "auto" and (c.runner.name == "plan" or machine.gpus()))
    return bool(on_gpu) and c.train.compute_dtype != "float64"


@rule("compile.loss", "kernels.name", "runner.name", "train.compute_dtype", "parallel", "launch")
def compiled_loss_is_torchs(c: Any) -> Problem | None:
    if not c.compile.loss or not _triton_runs(c) or degree(c, "tp") != 1:
        return None
    return Problem("compile.loss", f"is true, but kernels.name={c.kernels.name} computes the loss by a Triton kernel "
                   "here, of which nothing is left to compile", allowed="false; true with kernels=torch",
                   hint=f"kernels=torch or {_LOSS}")


@rule("compile.optimizer", "kernels.name", "runner.name", "train.compute_dtype", "optim", "parallel.fsdp_cpu_offload")
def compiled_optimizer_is_torchs(c: Any) -> Problem | None:
    if not c.compile.optimizer:
        return None
    if c.optim.name != "adamw":
        return Problem("compile.optimizer", f"is true, but optim.name={c.optim.name} is compiled on a GPU as it is",
                       allowed="false; true with optim=adamw", hint=f"optim=adamw kernels=torch or {_OPTIMIZER}")
    if c.optim.implementation != "auto":
        return Problem("optim.implementation", f"is {c.optim.implementation}, which is torch's own kernel, but "
                       "compile.optimizer is true", allowed="auto",
                       hint=f"optim.implementation=auto kernels=torch or {_OPTIMIZER}")
    if _triton_runs(c) and not c.parallel.fsdp_cpu_offload:
        return Problem("compile.optimizer", f"is true, but kernels.name={c.kernels.name} updates by a Triton kernel "
                       "here, of which nothing is left to compile", allowed="false; true with kernels=torch",
                       hint=f"kernels=torch or {_OPTIMIZER}")
    return None


@rule("compile.cuda_graphs", "parallel", "launch")
def cuda_graphs_have_one_rank(c: Any) -> Problem | None:
    """FSDP gathers weights to other addresses in each step; transfers of tp, cp, ep and pp go around the blocks."""
    ranks = world_size(c)
    if not c.compile.cuda_graphs or ranks in (1, None):
        return None
    hint = _GRAPHS if c.launch.kind == "external" else f"parallel=single launch.nproc=null or {_GRAPHS}"
    return Problem("compile.cuda_graphs", f"is true on {ranks} ranks; a CUDA graph reads and writes fixed addresses, "
                   "and what the ranks gather and exchange has none", allowed="false; true on one rank", hint=hint)


@rule("compile.cuda_graphs", "compile.mode", "runner.name")
def cuda_graphs_have_a_gpu(c: Any) -> Problem | None:
    if not c.compile.cuda_graphs or c.runner.name in ("check", "plan") or machine.gpus():
        return None
    return Problem("compile.cuda_graphs", "is true, but there is no GPU here", allowed="false", hint=_GRAPHS)


@rule("compile.cuda_graphs", "compile.backend")
def cuda_graphs_are_inductors(c: Any) -> Problem | None:
    if not c.compile.cuda_graphs or c.compile.backend == "inductor":
        return None
    return Problem("compile.backend", f"is {c.compile.backend}, which does not know compile.cuda_graphs",
                   allowed="inductor", hint=f"compile.backend=inductor or {_GRAPHS}")


@rule("compile.cuda_graphs", "runner.name")
def cuda_graphs_are_of_training(c: Any) -> Problem | None:
    if not c.compile.cuda_graphs or c.runner.name not in ("eval", "sample"):
        return None
    return Problem("compile.cuda_graphs", f"is true, but runner={c.runner.name} runs too few equal steps to replay any",
                   allowed="false", hint=_GRAPHS)
