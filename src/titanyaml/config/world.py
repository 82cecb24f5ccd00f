"""The ranks of a configuration, their degrees and their plugins, as far as they are known before ranks start.

``c`` is a ``schema.Config`` or a ``rules.view.View`` of its values.
"""

import math
import os
from typing import Any

from titanyaml import machine
from titanyaml.config.degrees import MESH_AXES

#: Nodes of pipeline.plugins that ship with the package.
SHIPPED = ("pp", "quant", "tp", "ep", "cp", "async_tp", "ac", "compile", "fsdp")


def fixed_product(parallel: Any) -> tuple[int, str]:
    """(product of the degrees that are not -1, the axis whose degree is -1 or "")."""
    degrees = {axis: getattr(parallel, axis) for axis in MESH_AXES}
    derived = next((axis for axis, degree in degrees.items() if degree == -1), "")
    return math.prod(degree for degree in degrees.values() if degree != -1), derived


def count_ranks(c: Any) -> int | None:
    """Number of ranks: ``launch.nproc``, else the mesh's product, else the GPUs of this machine, else 1.

    Under torchrun it is WORLD_SIZE; None where that is not set, e.g. for a check outside of torchrun.
    """
    if c.launch.kind == "external":
        text = os.environ.get("WORLD_SIZE", "")  # torchrun sets it for each rank
        return int(text) if text.isdigit() else None
    fixed, derived = fixed_product(c.parallel)
    if c.launch.nproc is not None:  # typed, so that a mesh of another size is an error of mesh_fits_ranks
        return int(c.launch.nproc)
    return (len(machine.gpus()) or 1) if derived else fixed


def resolve_degree(c: Any, axis: str) -> int | None:
    """The degree of ``axis``, derived where it is -1; None where it cannot be derived (other rules report that)."""
    configured: int = getattr(c.parallel, axis)
    if configured != -1:
        return configured
    if axis == "ep":  # no axis of its own: all that it may reuse
        return resolve_product(c, "dp_shard", "cp", "tp")
    fixed, _ = fixed_product(c.parallel)
    ranks = count_ranks(c)
    return None if ranks is None or fixed < 1 or ranks % fixed else ranks // fixed


def resolve_product(c: Any, *axes: str) -> int | None:
    """The product of the axes' degrees; None where one of them cannot be derived."""
    degrees = [resolve_degree(c, axis) for axis in axes]
    return None if None in degrees else math.prod(degree for degree in degrees if degree is not None)


def resolve_token_degree(c: Any) -> int | None:
    """Ranks that hold different tokens, over which FSDP works; None where it is unknown or a degree is 0."""
    return resolve_product(c, "dp_replicate", "dp_shard", "cp") or None


def has_gpu(c: Any) -> bool:
    """Whether the device is a GPU. A plan is always of one, whatever this machine has."""
    return c.runner.name == "plan" or bool(machine.gpus())


def has_plugin_for(c: Any, node: str) -> bool:
    """Whether ``node`` is on, or a plugin that does not ship is on: it may do the same in the node's place."""
    return node in _active_nodes(c) or not only_shipped_plugins(c)


def only_shipped_plugins(c: Any) -> bool:
    """Whether all plugins that are on ship with the package. The rules cannot know what any other plugin does."""
    return set(_active_nodes(c)) <= set(SHIPPED)


def is_node_on(c: Any, node: str) -> bool:
    """Whether a node of this name is on."""
    return node in _active_nodes(c)


def _active_nodes(c: Any) -> list[str]:
    nodes = c.pipeline.plugins
    return [name for name in nodes if getattr(getattr(nodes, name), "_target_", None)]
