"""Tensors to files and back, by PyTorch's distributed checkpoint (DCP): each rank its own shards, read on any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanyaml.checkpoint import manifest
from titanyaml.checkpoint.peers import Peers
from titanyaml.rundir import fsync

# names are flat already, and must stay as they are
PLANNING = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


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
    files: dict[str, dict[str, Any]] = {}
    for share in peers.run_on_all("syncing", lambda: _seal(folder, peers.rank)):
        files |= share
    return files


def _seal(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Sync and checksum the files that this rank wrote."""
    sealed = {}
    for path in sorted(folder.iterdir()):
        # DCP's names are __<rank>_<number>.distcp; .metadata is rank 0's
        owner = path.name.split("_")[2] if path.name.startswith("__") else "0"
        if owner == str(rank):
            fsync(path)
            sealed[path.name] = manifest.describe(path)
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
