"""The state of a run: a flat table of tensors, their files, and a comparison with the content of a checkpoint.

Names are paths, joined by "/": ``{"model": {"norm.weight": t}}`` is stored as ``model/norm.weight``. Files are written
and read by PyTorch's distributed checkpoint (DCP): each rank its own shards, read on any mesh.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanyaml.checkpoint.folder import describe_file
from titanyaml.checkpoint.peers import Peers
from titanyaml.pipeline.protocol import first_names
from titanyaml.rundir import fsync

SHOWN = 8  # names listed in an error; further ones are counted
# names are flat already, and must stay as they are
PLANNING = {"flatten_state_dict": False, "flatten_sharded_tensors": False}

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
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in flat.items()}


def stored_specs(source: FileSystemReader, *, only: Collection[str] | None) -> TensorSpecs:
    """Shape and dtype of each tensor in a checkpoint; only below these top-level names, where they are given."""
    return {
        name: (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in source.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and (only is None or name.split("/", 1)[0] in only)
    }


def differences(stored: TensorSpecs, expected: TensorSpecs, *, unread: set[str]) -> list[str]:
    """Why a checkpoint does not fit, in words; empty when it does. unread: names in the file that no rank asks for."""
    missing = sorted(expected.keys() - stored.keys())
    changed = sorted(name for name in expected.keys() & stored.keys() if expected[name] != stored[name])
    pairs = [f"{name} {_show(stored[name])} in the file, {_show(expected[name])} here" for name in changed]
    names_of = {"of the model's tensors are not in it": missing}
    names_of |= {"of its tensors are unknown to the model": sorted(unread), "tensors differ in shape or dtype": pairs}
    return [f"{len(names)} {problem}: {first_names(names, SHOWN)}" for problem, names in names_of.items() if names]


def _show(spec: tuple[tuple[int, ...], str]) -> str:
    return f"{list(spec[0])} {spec[1].removeprefix('torch.')}"


class _Writer(FileSystemWriter):
    def __init__(self, path: Path, peers: Peers) -> None:
        super().__init__(path, sync_files=False)  # synced when the checksum is taken
        self.peers = peers

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # DCP's own reduction behind this call would time out without telling which rank is slow
        try:
            future = super().write_data(plan, planner)
            future.wait()
            return future
        finally:
            self.peers.wait_for_all("writing")


def write(folder: Path, flat: Mapping[str, Tensor], *, peers: Peers) -> dict[str, dict[str, Any]]:
    """Write tensors into ``folder``, to the disk; ``{file name: {"bytes", "sha256"}}`` of all ranks' files."""
    _run("writing", save, flat, peers, storage_writer=_Writer(folder, peers), planner=DefaultSavePlanner(**PLANNING))
    shares = peers.run_on_all("syncing", lambda: _seal(folder, peers.rank))
    return {name: entry for share in shares for name, entry in share.items()}


def _seal(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Sync and checksum the files that this rank wrote."""
    sealed = {}
    for path in sorted(folder.iterdir()):
        # DCP's names are __<rank>_<number>.distcp; .metadata is rank 0's
        owner = path.name.split("_")[2] if path.name.startswith("__") else "0"
        if owner == str(rank):
            fsync(path)
            sealed[path.name] = describe_file(path)
    return sealed


def read(source: FileSystemReader, flat: Mapping[str, Tensor], *, peers: Peers) -> None:
    """Fill the tensors in place with the exact bits that were saved."""
    _run("loading", load, flat, peers, storage_reader=source, planner=DefaultLoadPlanner(**PLANNING))


def _run(phase: str, call: Callable[..., Any], flat: Mapping[str, Tensor], peers: Peers, **options: Any) -> None:
    """Call DCP on every rank; an error of one is raised on all."""
    options |= {"process_group": peers.group, "no_dist": peers.group is None}
    with warnings.catch_warnings():
        # DCP warns where there is no process group; one rank alone is a legal run here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        peers.run_on_all(phase, lambda: call(dict(flat), **options))
