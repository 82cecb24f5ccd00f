"""The mesh's keys. Part of ``config/schema.py``, which is where others import them from."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import MAX_RANKS, key


@dataclass
class Parallel:
    """Degrees of the device mesh. One of them may be -1: derived from the number of ranks."""

    dp_replicate: int = key(1, "copies of the sharded model (HSDP, DDP)", low=-1, high=MAX_RANKS)
    dp_shard: int = key(1, "ranks over which FSDP shards parameters, gradients and optimizer", low=-1, high=MAX_RANKS)
    cp: int = key(1, "ranks over which a sequence is split", low=-1, high=MAX_RANKS)
    tp: int = key(1, "ranks over which matrices are split", low=-1, high=MAX_RANKS)
    pp: int = key(1, "pipeline stages' ranks", low=-1, high=MAX_RANKS)
    ep: int = key(1, "ranks over which experts are split; reuses dp_shard*cp*tp", low=-1, high=MAX_RANKS)
    fsdp_reshard_after_forward: str = key(
        "auto",
        "free gathered weights after a block's forward; auto: all but the last block",
        choices=["auto", "always", "never"],
    )
    fsdp_prefetch: int | None = key(
        None, "blocks whose weights are gathered ahead; null: FSDP's own order, one as soon as it can", low=1
    )
    fsdp_cpu_offload: bool = key(False, "keep weights, gradients and optimizer state in host memory; needs a GPU")
    cp_method: str = key(
        "allgather",
        "how queries meet the keys of other ranks: gather all, pass them around (ring), or trade sequence for heads",
        choices=["allgather", "ring", "ulysses"],
    )
    tp_sequence_parallel: bool = key(
        True, "tp ranks hold a slice of the sequence between the split matrices; false: the whole of it"
    )
