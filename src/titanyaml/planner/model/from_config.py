"""From a configuration to a job. No torch: a laptop without any of a run's libraries can plan it."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanyaml.config import degrees, schema, world
from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.optimizer_state import MASTER_BYTES, moment_bytes
from titanyaml.config.schema import Config
from titanyaml.pipeline_schedule import actions, stages
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, stage_owners
from titanyaml.pipeline_schedule.simulate import simulate
from titanyaml.planner.model import devices
from titanyaml.planner.model.inputs import FUSED, TITANYAML, Job, Mesh, Software

_COMPUTE_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def job(config: Config, *, hardware: schema.Hardware | None = None, cluster: schema.Cluster | None = None) -> Job:
    """The work of one step of ``config`` on its device and network, or on those given.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    train, parallel, quant = config.train, config.parallel, config.quant
    sizes = degrees.resolve_degrees(parallel, world_size=world.count_ranks(config))
    mesh, shape = Mesh(**sizes), DecoderShape.of(config.model)
    forwards = degrees.global_batch(config, sizes) // (train.local_batch * mesh.data_degree)
    batches: dict[str, Any]
    if mesh.pp == 1:
        batches = {"local_batch": train.local_batch, "accumulation": forwards}
    else:  # a pipeline's microbatches are its accumulation
        batches = {"local_batch": train.local_batch * forwards, "microbatches": forwards}
        batches |= _pipeline(config, shape, pp=mesh.pp, microbatches=forwards)
    # emulated float8 GEMMs run in high precision
    recipe = "none" if quant.emulate else quant.recipe
    own_float8 = recipe != "none" and quant.product == "own"
    software = _software(config, own_float8=own_float8)
    return Job(
        shape,
        mesh,
        devices.device(hardware or config.hardware),
        devices.network(cluster or config.cluster, world_size=mesh.world_size),
        software,
        seq_len=train.seq_len,
        **batches,
        ac=config.ac.mode,
        ac_every=config.ac.every,
        ac_budget=config.ac.budget,
        ac_keep=config.ac.keep_products,
        quant=recipe,
        float8_gather=quant.fsdp_float8_all_gather and not quant.emulate,
        own_float8=own_float8,
        keeps_float8_weights=own_float8 and not quant.force_recompute_weight,
        compiled=config.compile.mode != "none",
        async_tp=_async_tp(config, float8=recipe != "none"),
        # as runner/setup.py chooses
        chunk_tokens=config.loss.chunk_tokens or (4096 if software.loss == "fused" else 1024),
        sequence_parallel=parallel.tp_sequence_parallel,
        cp_method=parallel.cp_method,
        reshard=parallel.fsdp_reshard_after_forward,
        reuses_memory=parallel.fsdp_reuse_memory,
        moment_bytes=moment_bytes(config.optim.name, param_bytes=8 if train.param_dtype == "float64" else 4),
        master_bytes=MASTER_BYTES[config.optim.master],
        compute_bytes=_COMPUTE_BYTES[train.compute_dtype],
    )


def _software(config: Config, *, own_float8: bool) -> Software:
    """This project's habits, with the kernels that runner/setup.py chooses on a GPU with triton."""
    plain = config.kernels.name == "torch" or config.train.compute_dtype == "float64"
    software = TITANYAML if plain else FUSED
    if own_float8 and config.quant.recipe == "float8_tensorwise":
        software = replace(software, gathers_float8=True)
    return software


def _async_tp(config: Config, *, float8: bool) -> tuple[str, ...]:
    """Collectives that async TP overlaps. A run with ``auto`` measures which; here all that can be fused count."""
    ops = tuple(config.compile.async_tp_ops) if config.compile.async_tp else ()
    if ops != ("auto",):
        return ops
    # a float8 layer casts between the gather and its GEMM
    return ("reduce_scatter",) if float8 else ("all_gather", "reduce_scatter")


def _pipeline(config: Config, shape: DecoderShape, *, pp: int, microbatches: int) -> dict[str, Any]:
    """A job's pipeline, split as ``pipeline_parallel.partition`` splits it. A schedule from a file is simulated."""
    parallel = config.parallel
    bubble: float | None = None
    max_in_flight: tuple[int, ...] = ()
    if parallel.pp_schedule_csv is not None:
        grid = actions.read(Path(parallel.pp_schedule_csv).expanduser())
        orders, owners = actions.orders(grid), tuple(actions.stage_owners(grid))
        max_in_flight = tuple(map(actions.max_in_flight, orders))
        # the simulation counts one for a forward, two for a backward of a stage; a rank has several stages
        forward_backward = 3.0 * len(owners) / pp
        bubble = simulate(orders, stages=len(owners)).length / forward_backward - microbatches
    else:
        kind = SCHEDULE_KINDS[parallel.pp_schedule]
        num_stages = kind.stages_per_rank(parallel.pp_stages_per_rank) * pp
        owners = tuple(stage_owners(kind.placement, ranks=pp, stages=num_stages))
    return {
        "schedule": parallel.pp_schedule,
        "stages_per_rank": len(owners) // pp,
        "bubble": bubble,
        "max_in_flight": max_in_flight,
        "owners": owners,
        "stage_layers": _stage_layers(parallel, shape, len(owners), seq_len=config.train.seq_len),
    }


def _stage_layers(parallel: schema.Parallel, shape: DecoderShape, count: int, *, seq_len: int) -> tuple[int, ...]:
    names, layers = parallel.pp_stages, shape.num_layers
    first, last = parallel.pp_first_stage_less_layers, parallel.pp_last_stage_less_layers
    if names or first is not None or last is not None:
        return tuple(stages.split_as_configured(layers, count, names=names, first_less=first, last_less=last))
    return _layers_by_cost(shape, count, seq_len)


# Cached: a search asks thousands of times for the same few splits.
@functools.cache
def _layers_by_cost(shape: DecoderShape, count: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage, such that the slowest stage is as fast as possible."""
    counts = stages.split_decoder(
        shape.num_layers,
        count,
        block_params=(shape.num_params - shape.num_tables * shape.table_params) / shape.num_layers,
        attention_flops=12 * shape.query_dim * seq_len,
        table_params=shape.table_params,
    )
    return tuple(counts)
