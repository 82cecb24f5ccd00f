"""Bytes of optimizer state per parameter, for the memory rule and the planner. No torch."""

#: Bytes of what turns a bf16 weight into a float32 master (``optim.master``): all of it, or its lower half.
MASTER_BYTES = {"float32": 4, "split": 2}
#: Bytes of both moments where they are narrower than the parameter. 8-bit: two codes, and factors of blocks of up to
#: 128 elements.
_NARROW_MOMENTS = {"adamw_bf16": 4.0, "adamw_8bit": 2.1}


def moment_bytes(optimizer: str, *, param_bytes: int) -> float:
    """Bytes of AdamW's two moments of a parameter; ``optimizer`` is ``optim.name``."""
    return _NARROW_MOMENTS.get(optimizer, 2.0 * param_bytes)
