"""The mesh's keys. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanyaml.config.keys import MAX_RANKS, key
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS

_RESHARD = ["auto", "always", "never"]
_CP_METHOD = (
    "how queries meet keys of other ranks: gather all, pass them around (ring), trade sequence for heads (ulysses)"
)


def _degree(doc: str) -> Any:
    # a resumed run may have another mesh as long as a step sees equally many sequences
    return key(1, doc, low=-1, high=MAX_RANKS, resume="equal_batch")


@dataclass
class Parallel:
    """Degrees of the device mesh. One of them may be -1: derived from the number of ranks."""

    dp_replicate: int = _degree("copies of the sharded model (HSDP, DDP)")
    dp_shard: int = _degree("ranks over which FSDP shards parameters, gradients and optimizer")
    cp: int = _degree("ranks over which a sequence is split")
    tp: int = _degree("ranks over which matrices are split")
    pp: int = _degree("pipeline stages' ranks")
    ep: int = _degree("ranks over which experts are split; reuses dp_shard*cp*tp")
    # the backward pass begins with the last block, so that freeing its weights would gather them at once again
    fsdp_reshard_after_forward: str = key(
        "auto", "free gathered weights after a block's forward; auto: all but the last", choices=_RESHARD, resume="free"
    )
    fsdp_prefetch: int | None = key(
        None, "blocks whose weights are gathered ahead; null: FSDP's own order, one as soon as it can", low=1
    )
    fsdp_cpu_offload: bool = key(False, "keep weights, gradients and optimizer state in host memory; needs a GPU")
    fsdp_reuse_memory: bool = key(
        False,
        "put reduced gradients where the backward pass has freed activations; needs a GPU and one such pass a step",
        resume="free",
    )
    cp_method: str = key("allgather", _CP_METHOD, choices=["allgather", "ring", "ulysses"])
    # true: less memory for activations, and the same bytes sent
    tp_sequence_parallel: bool = key(
        True, "tp ranks hold a slice of the sequence between the split matrices; false: the whole of it"
    )
    pp_schedule: str = key("1F1B", "order of forwards and backwards on the pipeline", choices=list(SCHEDULE_KINDS))
    pp_schedule_csv: str | None = key(
        None, "file with a schedule of your own in place of pp_schedule: a row a rank, cells such as 0F0, 1B3, 1I3, 1W3"
    )
    # null, not 1: the fewest stages differ by schedule
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
