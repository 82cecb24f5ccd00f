"""Tensors to files and back, by PyTorch's distributed checkpoint (DCP): each rank its own shards, read on any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    """Writes this rank's files, then waits for the others."""

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
    """Write tensors into ``folder``, to the disk; ``{file name: {"bytes", "sha256"}}`` of all ranks' files.

    Raises:
        CheckpointError: writing failed on some rank.
    """
    writer, planner = _Writer(folder, peers), DefaultSavePlanner(**PLANNING)
    group: dict[str, Any] = {"process_group": peers.group, "no_dist": peers.group is None}
    with _no_warning_for_one_rank():
        peers.run_on_all("writing", lambda: save(dict(flat), storage_writer=writer, planner=planner, **group))
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


def reader(folder: Path) -> FileSystemReader:
    """Access to a checkpoint's files."""
    return FileSystemReader(folder)


def read(source: FileSystemReader, flat: Mapping[str, Tensor], *, peers: Peers) -> None:
    """Fill the tensors in place with the exact bits that were saved.

    Raises:
        CheckpointError: reading failed on some rank.
    """
    planner = DefaultLoadPlanner(**PLANNING)
    group: dict[str, Any] = {"process_group": peers.group, "no_dist": peers.group is None}
    with _no_warning_for_one_rank():
        peers.run_on_all("loading", lambda: load(dict(flat), storage_reader=source, planner=planner, **group))


@contextmanager
def _no_warning_for_one_rank() -> Iterator[None]:
    """DCP warns where there is no process group; one rank alone is a legal run here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
