"""Cache folders that are expensive to make: built by one process, seen by others only when complete."""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from titanyaml.errors import DataError
from titanyaml.rundir import fsync

log = logging.getLogger("titanyaml.cache")


def build_once(path: Path, build: Callable[[Path], None], *, what: str) -> Path:
    """``path`` if it exists; else the folder that ``build`` fills, which appears at ``path`` by one rename.

    Any number of processes may call this at once: one builds, the others wait for it and use its result. ``build`` gets
    an empty folder beside ``path``; ``what`` is its name in log lines and errors.
    """
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock"), what):
            if path.is_dir():  # built by the process that held the lock
                return path
            # we hold the lock, so whoever was writing these is dead
            for leftover in path.parent.glob(f".{path.name}.tmp-*"):
                shutil.rmtree(leftover)
            temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
            temporary.mkdir()
            try:
                build(temporary)
                # content before name: after a power cut, a folder at ``path`` must not have empty files
                for file in temporary.iterdir():
                    fsync(file)
                fsync(temporary)
                temporary.rename(path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            fsync(path.parent)
    except OSError as error:
        hint = "data.cache_dir=/a/writable/folder"
        raise DataError(f"cannot write {what} to {path}: {error}", key="data.cache_dir", hint=hint) from error
    return path


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Exclusive lock between processes, and between hosts that share the file system."""
    # flock, not a file whose existence is the lock: the kernel drops it when its owner dies
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that builds %s", what)
            start = time.monotonic()
            fcntl.flock(file, fcntl.LOCK_EX)
            log.info("waited %.1f s for %s", time.monotonic() - start, what)
        yield  # closing the file unlocks it; the empty file stays, removing it would race with a waiter
