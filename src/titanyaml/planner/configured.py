"""From a configuration to what a plan depends on. No torch: a laptop without any of a run's libraries can plan it."""

from __future__ import annotations

from typing import Any

from titanyaml.config import degrees, ranks, schema
from titanyaml.config.schema import Config
from titanyaml.errors import ConfigError
from titanyaml.planner import profile
from titanyaml.planner.inputs import TITANYAML, Job, Mesh, Shape

#: Bytes of an optimizer's moments for a parameter.
MOMENTS = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.1}
_WIDTH = {"auto": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def shape(model: schema.Model) -> Shape:
    """The decoder's sizes.

    Raises:
        ConfigError: a mixture of experts.
    """
    mixture = getattr(model, "moe", None)
    if mixture is not None and mixture.num_experts:
        raise ConfigError("runner=plan does not know mixtures of experts", key="model.moe",
                          hint="a dense model, or runner=bench")
    head_dim = model.head_dim or model.dim // model.num_heads
    return Shape(
        model.name, model.vocab_size, model.dim, model.num_layers, model.num_heads, model.num_kv_heads, head_dim,
        model.ffn_dim, tied=model.tie_embeddings, head_norms=model.qk_norm,
    )


def job(config: Config, *, hardware: schema.Hardware | None = None, cluster: schema.Cluster | None = None) -> Job:
    """The work of one step of ``config`` on its device and network, or on those given.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    sizes = degrees.resolve_degrees(config.parallel, world_size=ranks.world_size(config))
    mesh = Mesh(**{axis: sizes[axis] for axis in degrees.MESH_AXES})
    train, parallel = config.train, config.parallel
    batch = degrees.global_batch(train, data_degree=mesh.data_degree)
    recipe, gathers = _quant(config)
    pipeline = _pipeline(parallel, mesh, train.local_batch)
    device = profile.device(hardware or config.hardware)
    chunk = config.loss.chunk_tokens or 1024
    return Job(
        shape(config.model), mesh, device, profile.network(cluster or config.cluster, world_size=mesh.world_size),
        TITANYAML, seq_len=train.seq_len, local_batch=train.local_batch,
        accumulation=batch // (train.local_batch * mesh.data_degree), **pipeline,
        ac=config.ac.mode, ac_every=config.ac.every, ac_budget=config.ac.budget,
        quant=recipe, float8_gather=gathers, compiled=config.compile.mode != "none",
        async_tp=tuple(config.compile.async_tp_ops) if config.compile.async_tp else (),
        chunk_tokens=chunk, sequence_parallel=parallel.tp_sequence_parallel, cp_method=parallel.cp_method,
        reshard=parallel.fsdp_reshard_after_forward, moment_bytes=MOMENTS[config.optim.name],
        compute_bytes=_WIDTH[train.compute_dtype],
    )


def _quant(config: Config) -> tuple[str, bool]:
    """(recipe, whether FSDP gathers float8)."""
    quant = getattr(config, "quant", None)
    return ("none", False) if quant is None else (quant.recipe, quant.fsdp_float8_all_gather)


def _pipeline(parallel: Any, mesh: Mesh, local_batch: int) -> dict[str, Any]:
    """Schedule, stages and microbatches: one sequence a microbatch."""
    if mesh.pp == 1:
        return {}
    schedule = getattr(parallel, "pp_schedule", "1F1B")
    several = 1 if schedule in ("GPipe", "1F1B") else 2
    return {"schedule": schedule, "microbatches": local_batch,
            "stages_per_rank": getattr(parallel, "pp_stages_per_rank", None) or several}
