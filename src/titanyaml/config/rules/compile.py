"""Rules of compilation: something is left to compile, the backend exists, and CUDA graphs can be replayed."""

import difflib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.config.world import count_ranks, has_gpu, only_shipped_plugins, resolve_degree, resolve_token_degree
from titanyaml.errors import Problem

rule = RuleTable()

#: Backends that torch.compile of torch 2.11 to 2.13 has by itself, and those that it has for debugging.
BACKENDS = ("inductor", "cudagraphs", "openxla", "tvm")
_EAGER = ("eager", "eager_debug", "eager_noexcept", "pre_dispatch_eager", "invoke_subgraph", "openxla_eval")
_AOT = ("", "_decomp_partition", "_decomp_partition_crossref", "_decomp_partition_with_mode", "_default_partitioner")
DEBUGGING = (*_EAGER, *(f"aot_eager{suffix}" for suffix in _AOT), "aot_ts", "ts")


def _runs_triton(c: Any) -> bool:
    """Whether our Triton kernels run, as ``kernels.kernel_choice`` decides."""
    on_gpu = c.kernels.name == "fused" or (c.kernels.name == "auto" and has_gpu(c))
    return on_gpu and c.train.compute_dtype != "float64"


@rule("compile.loss", "kernels.name", "runner.name", "train.compute_dtype")
def compiled_loss_needs_torch_kernels(c: Any) -> Problem | None:
    if not c.compile.loss or not _runs_triton(c):
        return None
    work = f"kernels.name={c.kernels.name} computes the loss by a Triton kernel here"
    message = f"is true, but {work}, of which nothing is left to compile"
    return problem("compile.loss", message, "false; true with kernels=torch", "kernels=torch", "compile.loss=false")


@rule("compile.optimizer", "kernels.name", "runner.name", "train.compute_dtype", "optim", "parallel.fsdp_cpu_offload")
def compiled_optimizer_needs_torch_adamw(c: Any) -> Problem | None:
    key, off = "compile.optimizer", "compile.optimizer=false"
    if not c.compile.optimizer:
        return None
    if c.optim.name != "adamw":
        message = f"is true, but optim.name={c.optim.name} is compiled on a GPU as it is"
        return problem(key, message, "false; true with optim=adamw", "optim=adamw kernels=torch", off)
    if c.optim.implementation != "auto":
        message = f"is {c.optim.implementation}, which is torch's own kernel, but compile.optimizer is true"
        return problem("optim.implementation", message, "auto", "optim.implementation=auto kernels=torch", off)
    if _runs_triton(c) and not c.parallel.fsdp_cpu_offload:  # an offloaded update runs on the host, without Triton
        work = f"kernels.name={c.kernels.name} updates by a Triton kernel here"
        message = f"is true, but {work}, of which nothing is left to compile"
        return problem(key, message, "false; true with kernels=torch", "kernels=torch", off)
    return None


@rule("compile.cuda_graphs", "compile.mode", "compile.backend", "parallel", "launch", "runner.name")
def cuda_graphs_are_replayable(c: Any) -> Problem | None:
    if not c.compile.cuda_graphs:
        return None
    runner, mode, backend, ranks = c.runner.name, c.compile.mode, c.compile.backend, count_ranks(c)
    obstacles = {}  # reason: the override that removes it, or ""
    if runner in ("eval", "sample"):
        obstacles[f"runner={runner} runs too few equal steps to replay any"] = ""
    elif runner not in ("check", "plan") and not machine.gpus():
        obstacles["there is no GPU here"] = ""
    if ranks not in (1, None):
        # FSDP gathers weights to other addresses in each step; transfers of tp, cp, ep and pp go around the blocks
        exchange = f"what {ranks} ranks gather and exchange has none"
        alone = "" if c.launch.kind == "external" else "parallel=single launch.nproc=null"
        obstacles[f"a graph reads and writes fixed addresses, and {exchange}"] = alone
    if mode not in ("auto", "block"):
        obstacles[f"compile.mode is {mode}: it is blocks that are replayed"] = "compile.mode=block"
    if backend != "inductor":
        obstacles[f"compile.backend={backend} does not know it"] = "compile.backend=inductor"
    if not obstacles:
        return None
    # one problem with all obstacles: a fix helps only if it removes all of them
    fix = " ".join(obstacles.values()) if all(obstacles.values()) else ""
    allowed = "false; true with compiled blocks (Inductor) in a training on one GPU"
    message = f"is true, but {'; and '.join(obstacles)}"
    return problem("compile.cuda_graphs", message, allowed, fix, "compile.cuda_graphs=false")


def check_sharded_model(mode: str, token_degree: int) -> Problem | None:
    """One graph of the whole model has no place for FSDP's gathers."""
    if mode != "model" or token_degree == 1:
        return None
    gathers = f"FSDP gathers weights over {token_degree} data ranks in the middle of it (dp_replicate*dp_shard*cp)"
    allowed = "block, none; model on one such rank"
    return problem("compile.mode", f"is model, but {gathers}", allowed, "compile.mode=block", "compile.mode=none")


@rule("parallel", "launch", "compile.mode")
def model_graph_needs_one_data_rank(c: Any) -> Problem | None:
    return check_sharded_model(c.compile.mode, resolve_token_degree(c) or 1) if c.compile.mode == "model" else None


def check_cut_model(mode: str, pp: int) -> Problem | None:
    """One graph of the whole model needs the whole model on a rank."""
    if mode != "model" or pp == 1:
        return None
    message = "is model, but the model is cut into stages"
    return problem("compile.mode", message, "block, none", "compile.mode=none")


@rule("parallel", "launch", "compile.mode")
def model_graph_needs_one_stage(c: Any) -> Problem | None:
    return check_cut_model(c.compile.mode, resolve_degree(c, "pp") or 1) if c.compile.mode == "model" else None


@rule("compile.backend", "compile.mode", "pipeline.plugins")
def compile_backend_exists(c: Any) -> Problem | None:
    name = c.compile.backend
    # a plugin that does not ship may register a backend: then the node asks torch
    if c.compile.mode == "none" or name in (*BACKENDS, *DEBUGGING) or not only_shipped_plugins(c):
        return None
    # installed packages may register one too; entry points are slow to read
    installed = [point.name for point in entry_points(group="torch_dynamo_backends")]
    return check_backend(name, [*BACKENDS, *installed], debugging=DEBUGGING)


def check_backend(name: str, usual: Sequence[str], *, debugging: Sequence[str]) -> Problem | None:
    """The backend exists, be it for running or for debugging; only those for running are offered."""
    if name in (*usual, *debugging):
        return None
    [similar] = difflib.get_close_matches(name, [*usual, *debugging], n=1, cutoff=0)
    fixes = dict.fromkeys([f"compile.backend={similar}", "compile.backend=inductor"])  # without repeats
    return problem("compile.backend", f"is {name}, which torch.compile does not know", ", ".join(usual), *fixes)
