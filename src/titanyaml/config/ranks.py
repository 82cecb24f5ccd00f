"""How many ranks a configuration gets, as far as it can be known before they are started."""

from __future__ import annotations

import math
import os
from typing import Any

from titanyaml import machine
from titanyaml.config.degrees import MESH_AXES


def fixed_product(parallel: Any) -> tuple[int, str]:
    """(product of the degrees that are given, axis that is derived or "")."""
    derived = [axis for axis in MESH_AXES if getattr(parallel, axis) == -1]
    sizes = [getattr(parallel, axis) for axis in MESH_AXES]
    return math.prod(size for size in sizes if size != -1), (derived or [""])[0]


def world_size(c: Any) -> int | None:
    """Ranks that will run; None where only the program that starts them knows.

    ``launch.nproc``, else the mesh's product, else the GPUs of this machine, else 1; under torchrun its WORLD_SIZE.
    """
    if c.launch.kind == "external":
        text = os.environ.get("WORLD_SIZE", "")
        return int(text) if text.isdigit() else None
    fixed, derived = fixed_product(c.parallel)
    if c.launch.nproc is not None:
        return c.launch.nproc
    return (len(machine.gpus()) or 1) if derived else fixed


def degree(c: Any, axis: str) -> int | None:
    """The degree of ``axis``, derived where it is -1; None where it cannot be, of which another rule speaks."""
    given = getattr(c.parallel, axis)
    if given != -1:
        return given
    if axis == "ep":
        reused = [degree(c, one) for one in ("dp_shard", "cp", "tp")]
        return None if None in reused else math.prod(reused)
    fixed, _ = fixed_product(c.parallel)
    ranks = world_size(c)
    return None if ranks is None or fixed < 1 or ranks % fixed else ranks // fixed


#: Nodes of pipeline.plugins that ship with the package; each does one thing that no other of them does.
SHIPPED = ("pp", "quant", "tp", "ep", "cp", "async_tp", "ac", "compile", "fsdp")


def does(c: Any, node: str) -> bool:
    """Whether ``node`` is on, or a plugin that did not ship, which may do the same in its place."""
    return node in _on(c) or not is_as_shipped(c)


def is_as_shipped(c: Any) -> bool:
    """Whether no plugin of others is on, of which nothing can be known here."""
    return set(_on(c)) <= set(SHIPPED)


def _on(c: Any) -> list[str]:
    nodes = c.pipeline.plugins
    return [name for name in nodes if getattr(getattr(nodes, name), "_target_", None)]
