"""The state of a run as a flat table of tensors, and its comparison with what a checkpoint holds.

Names are paths, joined by "/": ``{"model": {"norm.weight": t}}`` is stored as ``model/norm.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

SHOWN = 8  # names listed in an error; the rest is counted

Facts = dict[str, tuple[tuple[int, ...], str]]


def flatten(state: Mapping[str, Any], *, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts, by path. They stay the same objects, so loading into them fills the state."""
    flat: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix=f"{prefix}{name}/")
        elif isinstance(value, Tensor):
            flat[prefix + name] = value.detach()
        else:
            raise TypeError(f"{prefix}{name} is a {type(value).__name__}: a state holds tensors and dicts of them")
    return flat


def num_bytes(flat: Mapping[str, Tensor]) -> dict[str, int]:
    """Size of each logical tensor, whatever share of it is here (bytes)."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in flat.items()}


@torch.no_grad()
def non_finite(flat: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors whose local part holds NaN or infinity. One pass, one synchronisation with the device."""
    names, extremes = [], []
    for name, tensor in flat.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and local.numel():
            names.append(name)
            extremes.append(torch.stack(torch.aminmax(local)).isfinite().all())  # both extremes propagate NaN
    if not names:
        return []
    finite = torch.stack([flag.to(extremes[0].device) for flag in extremes]).tolist()
    return [name for name, good in zip(names, finite, strict=True) if not good]


def wanted(flat: Mapping[str, Tensor]) -> Facts:
    """Shape and dtype of each tensor that is to be filled."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in flat.items()}


def stored(metadata: Metadata, *, only: Iterable[str] | None) -> Facts:
    """Shape and dtype of each tensor in a checkpoint.

    Args:
        only: top-level names that are read; None: all.
    """
    tops = None if only is None else set(only)
    return {
        name: (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and (tops is None or name.split("/", 1)[0] in tops)
    }


def differences(file: Facts, here: Facts, *, unread: set[str]) -> list[str]:
    """Why a checkpoint does not fit, in words; empty when it does.

    Args:
        unread: names in the file that no rank asks for.
    """
    missing = sorted(here.keys() - file.keys())
    other = sorted(name for name in here.keys() & file.keys() if here[name] != file[name])
    found = []
    if missing:
        found.append(f"{len(missing)} of the model's tensors are not in it: {_shorten(missing)}")
    if unread:
        found.append(f"{len(unread)} of its tensors are unknown to the model: {_shorten(sorted(unread))}")
    if other:
        shown = [f"{name} {_show(file[name])} in the file, {_show(here[name])} here" for name in other]
        found.append(f"{len(other)} tensors differ in shape or dtype: {_shorten(shown)}")
    return found


def _show(fact: tuple[tuple[int, ...], str]) -> str:
    return f"{list(fact[0])} {fact[1].removeprefix('torch.')}"


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
