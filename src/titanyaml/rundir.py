"""The run directory: one owner at a time, and records that are never half written.

``lease.json`` names the owner: host, process id, the process's start time and a generation. The start time tells a
living owner from another process that was given the same number. A dead owner on this host is replaced at once. On
another host it cannot be looked at, so the owner refreshes the lease's modification time, and is replaced when that has
stood still for ``STALE_S``. Each claim raises the generation. Ranks of an older generation that are still alive notice
by ``check_generation`` before they write a checkpoint.
"""

import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from titanyaml.errors import EXIT_FAILED, LaunchError

HEARTBEAT_S = 15.0
STALE_S = 120.0  # several heartbeats: a busy shared file system may delay one


def fsync(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` such that a reader sees the old content or the new, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder: a rename is atomic within one file system only
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's file is for its owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def process_start(pid: int) -> str | None:
    """When the living process ``pid`` started, in the kernel's clock ticks; None if there is no such process.

    A zombie counts as dead: it can write nothing any more. Without /proc the answer is "?" for any living process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() or not _exists(pid) else "?"
    fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # of another user
    return True


def utc_now() -> str:
    """The time of a record: UTC, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class InUse(LaunchError):
    """A living process owns the run directory."""


class RunDir:
    """One run's folder.

    path: created by ``claim`` or by the first record. generation: the claim that this process works under (a rank gets
    it from its launcher); 0: none.
    """

    def __init__(self, path: Path | str, *, generation: int = 0) -> None:
        self.path = Path(path).absolute()
        self.generation = generation
        self._heartbeat_stop: threading.Event | None = None  # not None while this process owns the folder

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r}, generation={self.generation})"

    # --- ownership ---

    def claim(self) -> int:
        """Become the owner, or raise InUse (exit 1); the generation of this claim, 1 for a new folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock():
            old = self._lease()
            self._refuse_living(old)
            self.generation = old.get("generation", 0) + 1
            self._write_lease(pid=os.getpid(), start_time=process_start(os.getpid()))
        self._heartbeat_stop = threading.Event()
        # a daemon: a process that forgets to release must still be able to end
        threading.Thread(target=self._refresh_lease, args=(self._heartbeat_stop,), name="lease", daemon=True).start()
        return self.generation

    def release(self) -> None:
        """Give the folder up; nothing happens if another process owns it by now."""
        if self._heartbeat_stop is None:
            return
        self._heartbeat_stop.set()
        self._heartbeat_stop = None
        with self._lock():
            if self._lease().get("generation") == self.generation:  # else it was taken over meanwhile
                self._write_lease(pid=None, start_time=None)

    def check_generation(self, generation: int | None = None) -> None:
        """Raise LaunchError (exit 1) if another process has taken the folder over."""
        own = self.generation if generation is None else generation
        current = self._lease().get("generation", 0)
        if current != own:
            raise LaunchError(
                f"{self.path} was taken over by another process (generation {current}, this is {own})",
                key="run.dir",
                exit_code=EXIT_FAILED,
            )

    def owner(self) -> dict[str, Any] | None:
        """The living owner's lease, or None."""
        lease = self._lease()
        return lease if self._alive(lease) else None

    def _lease(self) -> dict[str, Any]:
        return _read_json(self.path / "lease.json")

    def _write_lease(self, *, pid: int | None, start_time: str | None) -> None:
        lease = {"host": socket.gethostname(), "pid": pid, "start_time": start_time, "generation": self.generation}
        atomic_write(self.path / "lease.json", json.dumps(lease) + "\n")

    def _alive(self, lease: dict[str, Any]) -> bool:
        if lease.get("pid") is None:  # released, or never claimed
            return False
        if lease["host"] == socket.gethostname():
            return bool(process_start(lease["pid"]) == lease["start_time"])
        return self._lease_age_s() < STALE_S

    def _lease_age_s(self) -> float:
        """Seconds since the owner's last heartbeat, by the file system's clock (hosts' clocks may differ)."""
        probe = self.path / ".lock"
        os.utime(probe)  # now
        return probe.stat().st_mtime - (self.path / "lease.json").stat().st_mtime

    def _refuse_living(self, lease: dict[str, Any]) -> None:
        if not self._alive(lease):
            return
        raise InUse(
            f"{self.path} is in use by process {lease['pid']} on {lease['host']}",
            key="run.dir",
            hint="wait for it, stop it, or give this run another run.id",
            exit_code=EXIT_FAILED,
        )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other claimants out while the lease is read and written."""
        # a file of its own: lease.json is replaced, and a lock on the old file would keep nobody out
        with open(self.path / ".lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _refresh_lease(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT_S):
            # never refresh a lease that is somebody else's by now
            if self._lease().get("generation") != self.generation:
                return
            os.utime(self.path / "lease.json")  # only the time: a write could race with a claim

    # --- records ---

    def status(self) -> dict[str, Any]:
        """Content of ``status.json``; empty if there is none."""
        return _read_json(self.path / "status.json")

    def write_status(self, **fields: Any) -> None:
        """Merge ``fields`` into ``status.json``; a field given as None is removed."""
        merged = {**self.status(), **fields, "time": utc_now()}  # launcher and rank 0 each write their own fields
        present = {name: value for name, value in merged.items() if value is not None}
        atomic_write(self.path / "status.json", json.dumps(present, indent=2) + "\n")

    def event(self, kind: str, message: str, *, rank: int = 0, **fields: Any) -> None:
        """Append to ``events.jsonl``."""
        self._append("events.jsonl", {"time": utc_now(), "rank": rank, "kind": kind, "message": message, **fields})

    def metric(self, record: dict[str, Any]) -> None:
        """Append to ``metrics.jsonl``."""
        self._append("metrics.jsonl", record)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")  # one write, so that lines of several ranks do not mix

    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``; a line that a crash left unfinished is not one."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [record for line in lines if (record := _parse(line)) is not None]

    def truncate_metrics(self, after_step: int) -> int:
        """Drop the records of steps above ``after_step``, which a resumed run writes anew; how many they were."""
        records = self.metrics()
        remaining = [record for record in records if record["step"] <= after_step]
        path = self.path / "metrics.jsonl"
        if path.exists():
            atomic_write(path, "".join(json.dumps(record) + "\n" for record in remaining))
        return len(records) - len(remaining)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return cast(dict[str, Any], json.loads(line))
    except json.JSONDecodeError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # records are written whole: not a crash of ours
        raise _not_a_record(path, str(error)) from error
    if not isinstance(content, dict):
        raise _not_a_record(path, f"it holds a {type(content).__name__}")  # all records are objects
    return content


def _not_a_record(path: Path, why: str) -> LaunchError:
    return LaunchError(
        f"{path} is not as it was written: {why}",
        key="run.dir",
        hint=f"rm {path}, if nothing works in that folder; checkpoints stay as they are",
    )
