"""From a resolved configuration to the objects that a runner works with, in the order in which they depend.

``build_tokenizer`` -> ``build_data`` -> ``build_model`` (meta -> pipeline -> materialise) -> the runner's own loop.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from titanyaml import data as text
from titanyaml import float8
from titanyaml.checkpoint import Checkpointer
from titanyaml.config import degrees, dump
from titanyaml.config.schema import Config
from titanyaml.data.loader import Batch, accumulation
from titanyaml.data.packing import TokenData
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import ConfigError, DataError
from titanyaml.hardware import synchronize
from titanyaml.kernels.kernel_choice import choose_kernels
from titanyaml.kernels.master_weights import full_precision, is_split, store_full_precision
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder
from titanyaml.models.init import materialise
from titanyaml.models.moe import expert_biases
from titanyaml.optim import Optimizer
from titanyaml.pipeline import resolve as pipeline
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.rundir import RunDir
from titanyaml.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("titanyaml")
T = TypeVar("T")


@dataclass(frozen=True)
class Built:
    """A model ready to run.

    Args:
        model: the transformed model, materialised on the device.
        masters: of parameters that are stored narrower, by name (``models.init.materialise``).
        context: what the plugins were told. resolved: the ordered plugins. changes: what each of them did.
    """

    model: nn.Module
    masters: dict[str, Tensor]
    context: Context
    resolved: pipeline.ResolvedPipeline
    changes: list[tuple[str, Change]]

    def weights(self) -> dict[str, Tensor]:
        """Every parameter under its name, in full precision, and the biases of routers: what a checkpoint holds."""
        named = self.model.named_parameters()
        weights = {n: float8.unwrap(full_precision(p.detach(), self.masters.get(n))) for n, p in named}
        return weights | expert_biases(self.model)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over what ``weights`` gave, after a checkpoint was read into it, and round it into the model."""
        for name, parameter in self.model.named_parameters():
            store_full_precision(weights[name], parameter, self.masters.get(name))


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """``train.compute_dtype``, where ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    name = config.train.compute_dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def master_format(config: Config) -> str:
    """What is optimized, in words."""
    return f"{config.train.param_dtype}{' split into bfloat16 and 16 bits' if config.optim.master == 'split' else ''}"


def storage(config: Config, env: Env) -> torch.device:
    """Where parameters, gradients and optimizer state live."""
    return torch.device("cpu") if config.parallel.fsdp_cpu_offload else env.device


def global_batch(config: Config, dims: ParallelDims) -> int:
    """Sequences per optimizer step over all ranks."""
    return degrees.global_batch(config, dataclasses.asdict(dims))


def transform(
    config: Config, env: Env, dims: ParallelDims, *, mesh: DeviceMesh | None
) -> tuple[nn.Module, Context, pipeline.ResolvedPipeline, list[tuple[str, Change]]]:
    """Build the model on meta and run the pipeline over it: the same for a run and for a check of it."""
    model = decoder.build(config.model)
    dtype = compute_dtype(config, env.device)
    ctx = Context(
        dims=dims,
        mesh=mesh,
        device=env.device,
        param_dtype=getattr(torch, config.train.param_dtype),
        compute_dtype=dtype,
        reduce_dtype=getattr(torch, config.train.reduce_dtype),
        facts=model.facts,
        seq_len=config.train.seq_len,
        local_batch=config.train.local_batch,
        accumulation=accumulation(
            global_batch=global_batch(config, dims), local_batch=config.train.local_batch, data_degree=dims.data_degree
        ),
        kernels=choose_kernels(config.kernels.name, device=env.device, dtype=dtype),
        log=log,
        expert_mesh=dims.build_experts(env.device.type) if mesh is not None else None,
    )
    resolved = pipeline.resolve(config.pipeline.plugins, ctx)
    model, changes = pipeline.run(model.to(ctx.param_dtype), resolved, ctx)
    return model, ctx, resolved, changes


def build_model(config: Config, env: Env, *, lap: Callable[[str], None] = lambda part: None) -> Built:
    """Model on meta, pipeline, materialised weights: the whole of what "planned is what is trained" means.

    Args:
        lap: told when "build" and when "materialise" is done (``startup.Startup.lap``).

    Raises:
        ConfigError: masters are to be split, and there are none.
    """
    dims = ParallelDims.resolve(config.parallel, env.world_size)
    mesh = dims.build(env.device.type) if env.world_size > 1 else None
    model, ctx, resolved, changes = transform(config, env, dims, mesh=mesh)
    lap("build")
    split = config.optim.master == "split"
    masters = materialise(
        model,
        device=env.device,
        seed=config.run.seed,
        param_dtype=ctx.param_dtype,
        storage=storage(config, env),
        split=split,
    )
    if split and not any(map(is_split, masters.values())):
        raise ConfigError(
            "is split, but no parameter is stored in bfloat16: there is nothing to split",
            key="optim.master",
            hint="optim.master=float32",
        )
    synchronize(env.device)
    lap("materialise")
    return Built(model, masters, ctx, resolved, changes)


def rank0_first(env: Env, build: Callable[[], T]) -> T:
    """Build on rank 0, then on the others: what it caches is written once and read by the rest.

    A failure of rank 0 is raised on every rank, with its own type.
    """
    failure, result = None, None
    if env.is_main:
        try:
            result = build()
        except Exception as error:  # noqa: BLE001 - told to every rank, then raised on each
            failure = error
    failure = comm.broadcast_object(failure, env)
    if failure is not None:
        raise failure
    return result if env.is_main else build()


def build_tokenizer(config: Config, env: Env) -> Tokenizer | None:
    """The tokenizer, trained on the corpus where it has no file; None for synthetic tokens, which have no text.

    Raises:
        DataError: a file is missing or bad, or the vocabulary is larger than the model's.
    """
    if config.data.kind == "synthetic":
        return None
    tokenizer = rank0_first(env, lambda: text.build_tokenizer(config.tokenizer, config.data))
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding {config.model.vocab_size} rows",
            key="model.vocab_size",
            hint=f"model.vocab_size={tokenizer.vocab_size} or more, or a smaller tokenizer",
        )
    return tokenizer


def build_data(config: Config, env: Env, tokenizer: Tokenizer | None, *, split: str) -> TokenData:
    """The packed samples of ``split``: "train" or "validation"."""
    return rank0_first(
        env,
        lambda: text.build(
            config.data,
            tokenizer=tokenizer,
            seq_len=config.train.seq_len,
            seed=config.run.seed,
            split=split,
            vocab_size=config.model.vocab_size,
        ),
    )


def loss_function(config: Config, ctx: Context) -> CrossEntropy:
    """The configured loss.

    A fused chunk of 4096 holds 2 bytes a logit, a plain one of 1024 about 10: less memory, and a quarter of the passes
    over the head's float32 gradient.
    """
    fused = ctx.kernels.fused
    return CrossEntropy(
        chunk_tokens=config.loss.chunk_tokens or (4096 if fused else 1024),
        fused=fused,
        compiled=config.compile.backend if config.compile.loss else "",
    )


def fused_optimizer(config: Config, ctx: Context) -> bool:
    """Whether the kernels of update and gradient norm may run: where the weights are."""
    return ctx.kernels.fused and not config.parallel.fsdp_cpu_offload


def kernels(config: Config, ctx: Context, optimizer: Optimizer) -> dict[str, str]:
    """What runs, for the log: operator to kernel, and ``why``."""
    choice, loss = ctx.kernels, loss_function(config, ctx)
    sharded = f", normalised over {ctx.dims.tp} tp ranks" if ctx.dims.tp > 1 else ""
    return {
        "why": choice.reason,
        "cross_entropy": f"{loss.describe()}, {loss.chunk_tokens} tokens a chunk{sharded}",
        config.optim.name: optimizer.runs(),
        "gradient norm": "fused" if fused_optimizer(config, ctx) else "torch",
    }


def to_device(batch: Batch, device: torch.device, *, documents: bool) -> dict[str, Tensor | None]:
    """A batch as the model's keyword arguments; document ids travel only where the model masks by them."""
    move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
    return {
        "tokens_BS": move(batch.tokens_BS),
        "labels_BS": move(batch.labels_BS),
        "documents_BS": move(batch.documents_BS) if documents else None,
    }


def set_determinism(config: Config) -> None:
    """Seed torch; under ``run.deterministic`` allow only deterministic kernels."""
    torch.manual_seed(config.run.seed)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def checkpointer(config: Config, run: RunDir, env: Env) -> Checkpointer:
    """Reads and writes the checkpoints of ``run``."""
    return Checkpointer(
        run,
        keep=config.checkpoint.keep,
        config_hash=dump.dataclass_hash(config),
        env=env,
        timeout_s=config.launch.startup_timeout_s,
    )


def resume_path(config: Config, checkpoints: Checkpointer) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` names, None for a start at step 0."""
    resume = config.checkpoint.resume
    if resume == "none":
        return None
    return checkpoints.latest() if resume == "auto" else checkpoints.find(Path(resume))
