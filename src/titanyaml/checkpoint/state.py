"""The state of a run as a flat table of tensors, and its comparison with the content of a checkpoint.

Names are paths, joined by "/": ``{"model": {"norm.weight": t}}`` is stored as ``model/norm.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

SHOWN = 8  # names listed in an error; further ones are counted

#: (shape, dtype) of each tensor by name.
TensorSpecs = dict[str, tuple[tuple[int, ...], str]]


def flatten(state: Mapping[str, Any], *, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts, by path. They share memory with the state, so loading into them fills it."""
    flat: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix=f"{prefix}{name}/")
        elif isinstance(value, Tensor):
            flat[prefix + name] = value.detach()  # a parameter that requires gradients cannot be filled in place
        else:
            raise TypeError(f"{prefix}{name} is a {type(value).__name__}: a state holds tensors and dicts of them")
    return flat


def num_bytes(flat: Mapping[str, Tensor]) -> dict[str, int]:
    """Size of each logical tensor, whatever share of it this rank holds (bytes)."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in flat.items()}


@torch.no_grad()
def non_finite(flat: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors whose local part holds NaN or infinity."""
    names, flags = [], []
    for name, tensor in flat.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and local.numel():
            names.append(name)
            # both extremes propagate NaN: one pass, where isfinite() would write a mask as large as the state
            flags.append(torch.stack(torch.aminmax(local)).isfinite().all())
    if not names:
        return []
    # one synchronisation with the device for all tensors
    finite = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]


def tensor_specs(flat: Mapping[str, Tensor]) -> TensorSpecs:
    """Shape and dtype of each tensor that is to be filled."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in flat.items()}


def stored_specs(metadata: Metadata, *, only: Iterable[str] | None) -> TensorSpecs:
    """Shape and dtype of each tensor in a checkpoint; only below these top-level names, where they are given."""
    tops = None if only is None else set(only)
    return {
        name: (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and (tops is None or name.split("/", 1)[0] in tops)
    }


def differences(stored: TensorSpecs, expected: TensorSpecs, *, unread: set[str]) -> list[str]:
    """Why a checkpoint does not fit, in words; empty when it does. unread: names in the file that no rank asks for."""
    missing = sorted(expected.keys() - stored.keys())
    changed = sorted(name for name in expected.keys() & stored.keys() if expected[name] != stored[name])
    problems = []
    if missing:
        problems.append(f"{len(missing)} of the model's tensors are not in it: {_shorten(missing)}")
    if unread:
        problems.append(f"{len(unread)} of its tensors are unknown to the model: {_shorten(sorted(unread))}")
    if changed:
        pairs = [f"{name} {_show(stored[name])} in the file, {_show(expected[name])} here" for name in changed]
        problems.append(f"{len(changed)} tensors differ in shape or dtype: {_shorten(pairs)}")
    return problems


def _show(spec: tuple[tuple[int, ...], str]) -> str:
    return f"{list(spec[0])} {spec[1].removeprefix('torch.')}"


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
