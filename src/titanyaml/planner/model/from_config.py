"""From a configuration to what a plan depends on. No torch: a laptop without any of a run's libraries can plan it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanyaml.config import degrees, schema, world
from titanyaml.config.decoder_shape import DecoderShape, MixtureShape
from titanyaml.config.schema import Config
from titanyaml.pipeline_schedule import actions, stages
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS, stage_owners
from titanyaml.pipeline_schedule.simulate import simulate
from titanyaml.planner.model import devices
from titanyaml.planner.model.inputs import FUSED, TITANYAML, Job, Mesh

#: Bytes of an optimizer's moments for a parameter.
MOMENTS = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.1}
#: Bytes that make a stored bf16 parameter a float32 one.
MASTERS = {"float32": 4, "split": 2}
_WIDTH = {"auto": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def shape(model: schema.Model) -> DecoderShape:
    """The decoder's sizes."""
    head_dim, moe = model.head_dim or model.dim // model.num_heads, model.moe
    mixture = (
        MixtureShape(
            moe.num_experts,
            moe.top_k,
            moe.ffn_dim or model.ffn_dim,
            moe.shared_ffn_dim,
            moe.first_dense,
            moe.every,
            balanced_by_loss=moe.balance_loss > 0,
        )
        if moe.num_experts
        else None
    )
    return DecoderShape(
        model.name,
        model.vocab_size,
        model.dim,
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        head_dim,
        model.ffn_dim,
        tied=model.tie_embeddings,
        head_norms=model.qk_norm,
        mixture=mixture,
        nope_every=model.nope_every,
        attention_chunk=model.attention_chunk,
    )


def job(config: Config, *, hardware: schema.Hardware | None = None, cluster: schema.Cluster | None = None) -> Job:
    """The work of one step of ``config`` on its device and network, or on those given.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    sizes = degrees.resolve_degrees(config.parallel, world_size=world.count_ranks(config))
    mesh = Mesh(**sizes)
    train, parallel = config.train, config.parallel
    forwards = degrees.global_batch(config, sizes) // (train.local_batch * mesh.data_degree)
    recipe, gathers = _quant(config)
    sizes_of = shape(config.model)
    batches = (
        {"local_batch": train.local_batch, "accumulation": forwards}
        if mesh.pp == 1
        else _pipeline(
            parallel, sizes_of, mesh, seq_len=train.seq_len, local_batch=train.local_batch, microbatches=forwards
        )
    )
    device = devices.device(hardware or config.hardware)
    # as runner/setup.py chooses kernels on a GPU with triton
    software = TITANYAML if config.kernels.name == "torch" or train.compute_dtype == "float64" else FUSED
    if recipe == "float8_tensorwise" and config.quant.product == "own":
        software = replace(software, gathers_float8=True)
    own = recipe != "none" and config.quant.product == "own"
    return Job(
        sizes_of,
        mesh,
        device,
        devices.network(cluster or config.cluster, world_size=mesh.world_size),
        software,
        seq_len=train.seq_len,
        **batches,
        ac=config.ac.mode,
        ac_every=config.ac.every,
        ac_budget=config.ac.budget,
        ac_keep=config.ac.keep_products,
        quant=recipe,
        float8_gather=gathers,
        own_float8=own,
        keeps_float8_weights=own and not config.quant.force_recompute_weight,
        compiled=config.compile.mode != "none",
        async_tp=_async_tp(config),
        chunk_tokens=config.loss.chunk_tokens or (4096 if software.loss == "fused" else 1024),
        sequence_parallel=parallel.tp_sequence_parallel,
        cp_method=parallel.cp_method,
        reshard=parallel.fsdp_reshard_after_forward,
        reuses=parallel.fsdp_reuse_memory,
        moment_bytes=MOMENTS[config.optim.name],
        master_bytes=MASTERS[config.optim.master],
        compute_bytes=_WIDTH[train.compute_dtype],
    )


def _async_tp(config: Config) -> tuple[str, ...]:
    """Kinds of transfers that are overlapped; what a measurement would leave is not known here."""
    kinds = tuple(config.compile.async_tp_ops) if config.compile.async_tp else ()
    both = ("all_gather", "reduce_scatter")
    # a float8 layer casts between the gather and its product
    return (both if _quant(config)[0] == "none" else both[1:]) if kinds == ("auto",) else kinds


def _quant(config: Config) -> tuple[str, bool]:
    """(recipe, whether FSDP gathers float8). Emulated products run in high precision."""
    quant = config.quant
    return ("none", False) if quant.emulate else (quant.recipe, quant.fsdp_float8_all_gather)


def _pipeline(
    parallel: schema.Parallel, of: DecoderShape, mesh: Mesh, *, seq_len: int, local_batch: int, microbatches: int
) -> dict[str, Any]:
    """What a job says of its pipeline: split as ``pipeline_parallel.partition`` splits it, a schedule from a file simulated."""
    bubble, held = None, ()
    if parallel.pp_schedule_csv is not None:
        grid = actions.read(Path(parallel.pp_schedule_csv).expanduser())
        placed = actions.stage_owners(grid)
        timeline = simulate(actions.orders(grid), stages=len(placed))
        held = tuple(map(actions.max_in_flight, actions.orders(grid)))
        unit = 3.0 * len(placed) / mesh.pp  # a forward and a backward of all stages of a rank
        bubble = timeline.length / unit - microbatches
    else:
        kind = SCHEDULE_KINDS[parallel.pp_schedule]
        placed = stage_owners(
            kind.placement, ranks=mesh.pp, stages=kind.stages_per_rank(parallel.pp_stages_per_rank) * mesh.pp
        )
    counts = _stages(parallel, of, len(placed), seq_len=seq_len)
    return {
        "local_batch": local_batch * microbatches,
        "microbatches": microbatches,
        "schedule": parallel.pp_schedule,
        "stages_per_rank": len(placed) // mesh.pp,
        "bubble": bubble,
        "held": held,
        "owners": tuple(placed),
        "stage_layers": tuple(counts),
    }


def _stages(parallel: schema.Parallel, of: DecoderShape, count: int, *, seq_len: int) -> list[int]:
    first, last = parallel.pp_first_stage_less_layers, parallel.pp_last_stage_less_layers
    if parallel.pp_stages or first is not None or last is not None:
        return stages.split_as_configured(
            of.num_layers, count, names=parallel.pp_stages, first_less=first, last_less=last
        )
    return list(_balanced(of, count, seq_len))


@functools.cache
def _balanced(of: DecoderShape, count: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each stage by cost. Cached: a search asks thousands of times for the same few splits."""
    table_params = of.vocab_size * of.dim
    block_params = (of.num_params - (1 if of.tied else 2) * table_params) / of.num_layers
    attention_flops = 12 * of.query_dim * seq_len
    return tuple(
        stages.split_decoder(
            of.num_layers, count, block_params=block_params, attention_flops=attention_flops, table_params=table_params
        )
    )
