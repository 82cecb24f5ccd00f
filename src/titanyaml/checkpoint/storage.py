"""Tensors to files and back, by PyTorch's distributed checkpoint: every rank its own shards, read on any mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.futures import Future

from titanyaml.checkpoint import manifest
from titanyaml.checkpoint.peers import Peers
from titanyaml.rundir import fsync

# names are flat already, and never rewritten
PLANNING = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class _Writer(dcp.FileSystemWriter):
    """Writes this rank's files, then waits for the others by name: otherwise nobody could tell which rank is slow."""

    def __init__(self, path: Path, peers: Peers) -> None:
        super().__init__(path, sync_files=False)  # synced when the checksum is taken
        self.peers = peers

    def write_data(self, plan: Any, planner: Any) -> Future:
        try:
            future = super().write_data(plan, planner)
            future.wait()
            return future
        finally:
            self.peers.arrive("writing")


def write(folder: Path, flat: Mapping[str, Tensor], *, peers: Peers) -> dict[str, dict[str, Any]]:
    """Write tensors into ``folder``, to the disk; ``{file name: {"bytes", "sha256"}}`` of all ranks' files.

    Raises:
        CheckpointError: writing failed on some rank.
    """

    def save() -> None:
        dcp.save(
            dict(flat),
            storage_writer=_Writer(folder, peers),
            planner=DefaultSavePlanner(**PLANNING),
            process_group=peers.group,
            no_dist=peers.group is None,
        )

    with _one_rank_is_legal():
        peers.together("writing", save)
    files: dict[str, dict[str, Any]] = {}
    for share in peers.together("syncing", lambda: _seal(folder, peers.rank)):
        files |= share
    return files


def _seal(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Sync and checksum the files that this rank wrote."""
    mine = {}
    for path in sorted(folder.iterdir()):
        owner = path.name.split("_")[2] if path.name.startswith("__") else "0"  # __<rank>_<number>.distcp
        if owner == str(rank):
            fsync(path)
            mine[path.name] = manifest.describe(path)
    return mine


def reader(folder: Path) -> dcp.FileSystemReader:
    """Access to a checkpoint's files."""
    return dcp.FileSystemReader(folder)


def read(source: dcp.FileSystemReader, flat: Mapping[str, Tensor], *, peers: Peers) -> None:
    """Fill the tensors in place, bit by bit as they were saved.

    Raises:
        CheckpointError: reading failed on some rank.
    """

    def load() -> None:
        dcp.load(
            dict(flat),
            storage_reader=source,
            planner=DefaultLoadPlanner(**PLANNING),
            process_group=peers.group,
            no_dist=peers.group is None,
        )

    with _one_rank_is_legal():
        peers.together("loading", load)


@contextmanager
def _one_rank_is_legal() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
