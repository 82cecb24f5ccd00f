"""The mesh's keys. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import MAX_RANKS, key
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS


@dataclass
class Parallel:
    """Degrees of the device mesh. One of them may be -1: derived from the number of ranks."""

    dp_replicate: int = key(1, "copies of the sharded model (HSDP, DDP)", low=-1, high=MAX_RANKS, resume="equal_batch")
    dp_shard: int = key(
        1,
        "ranks over which FSDP shards parameters, gradients and optimizer",
        low=-1,
        high=MAX_RANKS,
        resume="equal_batch",
    )
    cp: int = key(1, "ranks over which a sequence is split", low=-1, high=MAX_RANKS, resume="equal_batch")
    tp: int = key(1, "ranks over which matrices are split", low=-1, high=MAX_RANKS, resume="equal_batch")
    pp: int = key(1, "pipeline stages' ranks", low=-1, high=MAX_RANKS, resume="equal_batch")
    ep: int = key(
        1, "ranks over which experts are split; reuses dp_shard*cp*tp", low=-1, high=MAX_RANKS, resume="equal_batch"
    )
    fsdp_reshard_after_forward: str = key(
        "auto",
        "free gathered weights after a block's forward; auto: all but the last block",
        choices=["auto", "always", "never"],
        resume="free",
    )
    fsdp_prefetch: int | None = key(
        None, "blocks whose weights are gathered ahead; null: FSDP's own order, one as soon as it can", low=1
    )
    fsdp_cpu_offload: bool = key(False, "keep weights, gradients and optimizer state in host memory; needs a GPU")
    fsdp_reuse_memory: bool = key(
        False,
        "put reduced gradients where the backward pass has freed activations, in place of memory of their own; "
        "needs a GPU and one backward pass a step",
        resume="free",
    )
    cp_method: str = key(
        "allgather",
        "how queries meet the keys of other ranks: gather all, pass them around (ring), or trade sequence for heads",
        choices=["allgather", "ring", "ulysses"],
    )
    tp_sequence_parallel: bool = key(
        True, "tp ranks hold a slice of the sequence between the split matrices; false: the whole of it"
    )
    pp_schedule: str = key(
        "1F1B", "order of forwards and backwards on the pipeline's ranks", choices=list(SCHEDULE_KINDS)
    )
    pp_schedule_csv: str | None = key(
        None, "file with a schedule of your own in place of pp_schedule: a row a rank, cells such as 0F0, 1B3, 1I3, 1W3"
    )
    pp_stages_per_rank: int | None = key(
        None, "stages on a rank; null: 2 for schedules with several, else 1; a file brings its own", low=1
    )
    pp_stages: list[str] = key(
        [], "layers of each stage, or the first layer of each (layers.0, ...); empty: stages of balanced cost"
    )
    pp_first_stage_less_layers: int | None = key(
        None, "layers by which the first stage falls short of an even share; null: by cost", low=0
    )
    pp_last_stage_less_layers: int | None = key(
        None, "layers by which the last stage falls short of an even share; null: by cost", low=0
    )
