"""From a configuration to the objects that a runner works with.

``build_all`` is the order of a training run; evaluation and sampling call ``build_tokenizer``, ``build_data`` and
``build_model`` alone; a check stops after ``transform``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from titanyaml import data as text_data
from titanyaml import float8, optim
from titanyaml.checkpoint import Checkpointer
from titanyaml.config import degrees, dump
from titanyaml.config.schema import Config
from titanyaml.data import loader
from titanyaml.data.loader import Batches
from titanyaml.data.packing import TokenData
from titanyaml.distributed import comm, replica_checks
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import ConfigError, DataError
from titanyaml.hardware import synchronize
from titanyaml.kernels.kernel_choice import choose_kernels
from titanyaml.kernels.master_weights import full_precision, is_split, store_full_precision
from titanyaml.kernels.square_sum import square_sum
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder
from titanyaml.models.init import materialise
from titanyaml.models.moe import expert_biases
from titanyaml.optim import AdamW
from titanyaml.pipeline import resolve as pipeline
from titanyaml.pipeline.protocol import Change, Context
from titanyaml.rundir import RunDir
from titanyaml.runner.meter import Meter, StartupClock
from titanyaml.runner.profiler import Profiler
from titanyaml.runner.routing import Routing
from titanyaml.runner.train_step import TrainStep
from titanyaml.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("titanyaml")
T = TypeVar("T")


@dataclass(frozen=True)
class BuiltModel:
    """A model that the pipeline transformed, with memory and values on the device."""

    model: nn.Module
    masters: dict[str, Tensor]  # of parameters that are stored narrower, by name
    context: Context
    resolved: pipeline.ResolvedPipeline
    changes: list[tuple[str, Change]]  # what each plugin did

    @property
    def data_rank(self) -> int:
        return self.context.dims.data_rank(self.context.mesh)

    def weights(self) -> dict[str, Tensor]:
        """Full-precision parameters by name, and router biases: the weights of a checkpoint."""
        named = self.model.named_parameters()
        weights = {n: float8.unwrap(full_precision(p.detach(), self.masters.get(n))) for n, p in named}
        return weights | expert_biases(self.model)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Round ``weights`` into the model, after a checkpoint was read into what ``weights()`` gave."""
        for name, parameter in self.model.named_parameters():
            store_full_precision(weights[name], parameter, self.masters.get(name))


@dataclass(frozen=True)
class Parts:
    """A training run ready for its first step."""

    built: BuiltModel
    train_data: TokenData
    validation_data: TokenData | None  # None where ``validation.batches`` is 0
    optimizer: AdamW
    train_step: TrainStep
    checkpointer: Checkpointer
    last_step: int  # that is done: the checkpoint's, 0 in a new run
    batches: Batches
    meter: Meter
    profiler: Profiler


def build_all(config: Config, run: RunDir, env: Env, *, requested_config: Config, clock: StartupClock) -> Parts:
    """Build a training run, each part after those that it needs. ``config`` has a concrete ``ac.mode``."""
    set_determinism(config)
    tokenizer = build_tokenizer(config, env)
    train_data = build_data(config, env, tokenizer, split="train")
    has_validation = config.validation.batches > 0
    validation_data = build_data(config, env, tokenizer, split="validation") if has_validation else None
    clock.lap("data")
    built = build_model(config, env, lap=clock.lap)
    optimizer = build_optimizer(config, env, built)
    train_step = build_train_step(config, env, built, optimizer)
    # checkpoints carry the hash of what was typed: ac=auto may resolve otherwise on the devices of a resume
    checkpointer = build_checkpointer(requested_config, run, env)
    # before the batches: a checkpoint says where in the data they start
    last_step, data_state = restore(config, built.model, optimizer, checkpointer)
    if env.is_main:
        run.truncate_metrics(last_step)
    # after the checkpoint, so that what was loaded is compared too
    check_ranks(config, built.model, optimizer, env, data_rank=built.data_rank)
    dims = built.context.dims
    batches = Batches(
        train_data,
        seed=config.run.seed,
        global_batch=global_batch(config, dims),
        local_batch=config.train.local_batch,
        data_rank=built.data_rank,
        data_degree=dims.data_degree,
        prefetch=config.data.prefetch,
        shuffle=config.data.shuffle,
        state=data_state,
    )
    meter = Meter(config, built.context, env, global_batch=global_batch(config, dims))
    profiler = Profiler(config.profile, run, env)
    return Parts(
        built, train_data, validation_data, optimizer, train_step, checkpointer, last_step, batches, meter, profiler
    )


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """``train.compute_dtype``, where ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    name = config.train.compute_dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def storage_device(config: Config, env: Env) -> torch.device:
    """Where parameters, gradients and optimizer state are kept."""
    return torch.device("cpu") if config.parallel.fsdp_cpu_offload else env.device


def global_batch(config: Config, dims: ParallelDims) -> int:
    """Sequences per optimizer step over all ranks."""
    return degrees.global_batch(config, dataclasses.asdict(dims))


def accumulation(config: Config, dims: ParallelDims) -> int:
    """Forwards per optimizer step of one data rank."""
    sequences, local_batch = global_batch(config, dims), config.train.local_batch
    return loader.accumulation(global_batch=sequences, local_batch=local_batch, data_degree=dims.data_degree)


def transform(
    config: Config, env: Env, dims: ParallelDims, *, mesh: DeviceMesh | None
) -> tuple[nn.Module, Context, pipeline.ResolvedPipeline, list[tuple[str, Change]]]:
    """Build the model on meta and run the pipeline over it: the same for a run, a check and a trace."""
    untransformed = decoder.build(config.model)
    dtype, train = compute_dtype(config, env.device), config.train
    ctx = Context(
        dims=dims,
        mesh=mesh,
        device=env.device,
        param_dtype=getattr(torch, train.param_dtype),
        compute_dtype=dtype,
        reduce_dtype=getattr(torch, train.reduce_dtype),
        facts=untransformed.facts,
        seq_len=train.seq_len,
        local_batch=train.local_batch,
        accumulation=accumulation(config, dims),
        kernels=choose_kernels(config.kernels.name, device=env.device, dtype=dtype),
        log=log,
        expert_mesh=dims.build_experts(env.device.type) if mesh is not None else None,
    )
    # plugins shard and swap modules before a byte is allocated: no rank ever holds the whole model
    resolved = pipeline.resolve(config.pipeline.plugins, ctx)
    model, changes = pipeline.run(untransformed.to(ctx.param_dtype), resolved, ctx)
    return model, ctx, resolved, changes


def build_model(config: Config, env: Env, *, lap: Callable[[str], None] = lambda part: None) -> BuiltModel:
    """Build the model on meta, transform it, and give it memory and first values; ``lap`` as of ``StartupClock``."""
    dims = ParallelDims.resolve(config.parallel, env.world_size)
    mesh = dims.build(env.device.type) if env.world_size > 1 else None
    model, ctx, resolved, changes = transform(config, env, dims, mesh=mesh)
    lap("build")
    split, storage = config.optim.master == "split", storage_device(config, env)
    masters = materialise(
        model, device=env.device, seed=config.run.seed, param_dtype=ctx.param_dtype, storage=storage, split=split
    )
    if split and not any(map(is_split, masters.values())):
        raise ConfigError(
            "is split, but no parameter is stored in bfloat16: there is nothing to split",
            key="optim.master",
            hint="optim.master=float32",
        )
    synchronize(env.device)  # or the time of the kernels would be booked under the next part
    lap("materialise")
    return BuiltModel(model, masters, ctx, resolved, changes)


def rank0_first(env: Env, build: Callable[[], T]) -> T:
    """Build on rank 0, then on the others, so that a cache is written once and read by all others."""
    results: list[T] = []
    failure: Exception | None = None
    if env.is_main:
        try:
            results = [build()]
        except Exception as error:  # noqa: BLE001 - raised on every rank: none is left to wait
            failure = error
    failure = comm.broadcast_object(failure, env)
    if failure is not None:
        raise failure
    return results[0] if env.is_main else build()


def build_tokenizer(config: Config, env: Env) -> Tokenizer | None:
    """The tokenizer, trained on the corpus where it has no file; None for synthetic tokens, which have no text."""
    if config.data.kind == "synthetic":
        return None
    tokenizer = rank0_first(env, lambda: text_data.build_tokenizer(config.tokenizer, config.data))
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's embedding {config.model.vocab_size} rows",
            key="model.vocab_size",
            hint=f"model.vocab_size={tokenizer.vocab_size} or more, or a smaller tokenizer",
        )
    return tokenizer


def build_data(config: Config, env: Env, tokenizer: Tokenizer | None, *, split: str) -> TokenData:
    """The packed samples of ``split``: "train" or "validation"."""
    sizes = {"seq_len": config.train.seq_len, "vocab_size": config.model.vocab_size}
    build = partial(text_data.build, config.data, tokenizer=tokenizer, seed=config.run.seed, split=split, **sizes)
    return rank0_first(env, build)


def build_loss(config: Config, ctx: Context) -> CrossEntropy:
    fused = ctx.kernels.fused
    # A fused chunk holds 2 bytes a logit, a plain one about 10. Longer chunks make fewer passes over the head's float32
    # gradient, so the fused loss affords 4096 tokens in less memory than a plain chunk of 1024.
    return CrossEntropy(
        chunk_tokens=config.loss.chunk_tokens or (4096 if fused else 1024),
        fused=fused,
        compiled=config.compile.backend if config.compile.loss else "",
    )


def uses_fused_optimizer(config: Config, ctx: Context) -> bool:
    """Whether our kernels of update and gradient norm may run: they need the weights on the GPU."""
    return ctx.kernels.fused and not config.parallel.fsdp_cpu_offload


def build_optimizer(config: Config, env: Env, built: BuiltModel) -> AdamW:
    ctx = built.context
    return optim.build(
        config.optim,
        dict(built.model.named_parameters()),
        masters=built.masters,
        device=storage_device(config, env),
        remote_params=getattr(built.model, "elsewhere", None),
        fused=uses_fused_optimizer(config, ctx),
        # with one backward a gradient is no sum, and needs no float32 buffer
        one_backward=ctx.accumulation == 1 and ctx.dims.pp == 1,
        compiled=config.compile.backend if config.compile.optimizer else "",
    )


def build_train_step(config: Config, env: Env, built: BuiltModel, optimizer: AdamW) -> TrainStep:
    ctx, moe = built.context, config.model.moe
    return TrainStep(
        built.model,
        optimizer,
        loss_fn=build_loss(config, ctx),
        max_norm=config.train.max_norm,
        documents=config.model.document_mask,
        env=env,
        adds_loss=ctx.dims.adds_loss(ctx.mesh),
        routing=Routing(built.model, moe, ctx.facts, mesh=ctx.mesh, env=env) if moe.num_experts else None,
        square_sum=square_sum if uses_fused_optimizer(config, ctx) else None,
    )


def set_determinism(config: Config) -> None:
    """Seed torch; under ``run.deterministic`` allow only deterministic kernels."""
    torch.manual_seed(config.run.seed)
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # it picks kernels by timing, which differs from run to run


def build_checkpointer(config: Config, run: RunDir, env: Env) -> Checkpointer:
    keep, timeout_s = config.checkpoint.keep, config.launch.startup_timeout_s
    return Checkpointer(run, keep=keep, config_hash=dump.config_hash(config), env=env, timeout_s=timeout_s)


def checkpoint_state(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """The tensors of a checkpoint: full-precision weights, router biases and optimizer state."""
    # split masters are joined into copies: after reading into those, ``optimizer.load`` splits them again
    return {"model": optimizer.weights() | expert_biases(model), "optim": optimizer.state_tensors()}


def restore(
    config: Config, model: nn.Module, optimizer: AdamW, checkpointer: Checkpointer
) -> tuple[int, dict[str, Any] | None]:
    """Load the checkpoint that ``checkpoint.resume`` names; returns its step and ``Batches.state``, or 0 and None."""
    resume = config.checkpoint.resume
    if resume == "none":
        return 0, None
    path = checkpointer.latest() if resume == "auto" else checkpointer.find(Path(resume))
    if path is None:
        return 0, None
    state = checkpoint_state(model, optimizer)  # read into in place, shard by shard
    meta = checkpointer.load(path, state)
    optimizer.load(state["model"])
    return meta["step"], meta["data"]


def check_ranks(config: Config, model: nn.Module, optimizer: AdamW, env: Env, *, data_rank: int) -> None:
    """Refuse replicas of weights, buffers or optimizer state that differ, and data ranks that draw alike."""
    # both would train on in silence; one pass over the weights costs less than a step
    # a generator: the master of a split parameter is a copy, and one of them at a time is enough
    masters = ((name, optimizer.master(name)) for name in optimizer.names)
    states = optimizer.state_tensors().items()
    moments = ((f"{name}.{kind}", tensor) for name, state in states for kind, tensor in state.items())
    replica_checks.check_replicas_match(chain(masters, model.named_buffers(), moments), env)
    replica_checks.check_random_streams(config.run.seed, data_rank, env)
