"""A mirror of the metrics in an Aim repository (``tracker.kind=aim``).

Aim runs in a thread behind a bounded queue. When it raises, hangs or is slow, training goes on, one warning is given,
and the number of records that Aim lacks is reported at the end. Steps that only the first attempt of a resumed run
reached stay in Aim, while ``metrics.jsonl`` drops them.
"""

import atexit
import dataclasses
import fcntl
import importlib.util
import logging
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from titanyaml.config.schema import Config
from titanyaml.errors import ConfigError
from titanyaml.rundir import RunDir, atomic_write

log = logging.getLogger("titanyaml")

HASH_FILE = "aim_run.txt"
SUBSETS = {"validation_loss": ("loss", "validation")}  # every other figure is of the training subset, under its name


class AimMirror:
    """Metrics by name and step in the context ``{"subset": "train" | "validation"}``, the configuration as parameters.

    Args:
        config: its groups become searchable: ``run.train.steps == 200``, ``run['run']['seed'] == 0`` (Aim has ``run``).
        capacity: records that may wait; further ones are dropped and counted. close_s: ``close`` waits so long (s).
    """

    def __init__(self, config: Config, run: RunDir, *, capacity: int = 10_000, close_s: float = 60.0) -> None:
        # looked for, not imported: the import takes seconds and belongs to the thread
        if "aim" not in sys.modules and importlib.util.find_spec("aim") is None:
            raise ConfigError("Aim is not installed", key="tracker.kind", hint="pip install aim, or tracker.kind=none")
        self.config, self.run, self.close_s = config, run, close_s
        self.num_logged = self.num_written = 0
        self._state = "running"
        self._warned = False
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)  # None: the end
        self._thread = threading.Thread(target=self._work, name="aim", daemon=True)  # may hang for ever
        self._thread.start()

    def log(self, record: dict[str, Any]) -> None:
        """Put a record into the queue; returns at once."""
        self.num_logged += 1
        try:
            self._queue.put_nowait(dict(record))
        except queue.Full:
            self._warn(f"is too slow: {self._queue.maxsize} records are waiting, further ones are dropped")

    def close(self, state: str) -> None:
        """Let Aim write the waiting records, but not for longer than ``close_s``."""
        self._state = state
        deadline = time.monotonic() + self.close_s
        try:
            self._queue.put(None, timeout=self.close_s)
            self._thread.join(max(deadline - time.monotonic(), 0))
        except queue.Full:
            pass  # the thread is alive, which is reported below
        if self._thread.is_alive():
            self._warn(f"did not finish within {self.close_s:g} s")
            # Aim's clean-up at exit would wait for the thread that hangs
            if (cleanup := sys.modules.get("aim.ext.cleanup")) is not None:
                atexit.unregister(cleanup.AutoClean.cleanup)
        if lost := self.num_logged - self.num_written:
            message = f"Aim lacks {lost} of {self.num_logged} records; metrics.jsonl has all of them"
            log.warning("tracker: %s", message)
            self.run.event("tracker_incomplete", message, lost=lost, logged=self.num_logged)

    # --- in the thread ---

    def _work(self) -> None:
        aim_run = None
        try:
            aim_run = self._open()
        except Exception as error:  # noqa: BLE001 - whatever Aim does, training goes on
            self._warn(f"could not be opened: {type(error).__name__}: {error}")
        while (record := self._queue.get()) is not None:
            try:
                if aim_run is not None:  # else the queue is only emptied, or ``close`` would wait for room in it
                    track(aim_run, record)
                    self.num_written += 1
            except Exception as error:  # noqa: BLE001
                self._warn(f"failed at step {record['step']}: {type(error).__name__}: {error}")
        try:
            if aim_run is not None:
                aim_run["state"] = self._state
                aim_run.close()
                _index(aim_run)
        except Exception as error:  # noqa: BLE001
            self._warn(f"could not be closed: {type(error).__name__}: {error}")

    def _open(self) -> Any:
        """This run's Aim run, a new one or the one of ``aim_run.txt``, with its parameters set."""
        # it warns of every lock that is taken over; the run folder's lease says that the owner of this one is dead
        logging.getLogger("aim.sdk.lock_manager").setLevel(logging.ERROR)
        repo, hash_file = self.config.tracker.repo, self.run.path / HASH_FILE
        old_hash = hash_file.read_text().strip() if hash_file.exists() else None
        options: dict[str, Any] = {"repo": repo, "experiment": self.config.run.name}
        # a resumed run continues its Aim run, where a step that is tracked again replaces the earlier value
        options |= {"force_resume": old_hash is not None}  # a killed run has left its lock behind
        # nothing that Aim gathers by itself: it would read the console and poll the GPU beside the training
        options |= {"log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None}
        make_run = importlib.import_module("aim").Run
        if "://" in repo:
            aim_run = make_run(old_hash, **options)
        else:
            Path(repo).mkdir(parents=True, exist_ok=True)
            with open(Path(repo) / ".aim.lock", "a") as lock:
                # two runs that create one repository at the same time break it
                fcntl.flock(lock, fcntl.LOCK_EX)
                aim_run = make_run(old_hash, **options)
        atomic_write(hash_file, aim_run.hash + "\n")
        aim_run.name = self.config.run.id
        for group, values in dataclasses.asdict(self.config).items():
            aim_run[group] = values
        return aim_run

    def _warn(self, failure: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("tracker: Aim %s (training goes on)", failure)
            self.run.event("tracker_failed", f"Aim {failure}")


def track(aim_run: Any, record: dict[str, Any]) -> None:
    for key, value in record.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        name, subset = SUBSETS.get(key, (key, "train"))
        aim_run.track(value, name=name, step=record["step"], context={"subset": subset})


def _index(aim_run: Any) -> None:
    """Make a closed run visible to queries at once; ``aim up`` does this too, but only while it runs."""
    if not aim_run.repo.is_remote_repo:
        from aim.sdk.index_manager import RepoIndexManager

        RepoIndexManager.get_index_manager(aim_run.repo).index(aim_run.hash)
