"""Save, find and load checkpoints of one run.

The order of a save is what keeps a crash harmless: files into a temporary folder, to the disk with their checksums,
the manifest, the rename, and only then the retention. There is a complete checkpoint at every instant after the first.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import titanyaml
from titanyaml.checkpoint import folder, manifest, storage
from titanyaml.checkpoint import state as states
from titanyaml.checkpoint.finder import Finder
from titanyaml.checkpoint.peers import Peers
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError, NonFiniteError
from titanyaml.rundir import RunDir, utc_now

log = logging.getLogger("titanyaml")

GIB = 2**30
OVERHEAD = 64 * 1024**2  # indices, headers, manifest (bytes)


class Checkpointer:
    """The checkpoints of ``run``. Methods are collective: every rank calls them, in the same order.

    Making one removes what a killed save left in the run's folder.

    Args:
        run: the run's folder; its generation is checked before anything is written or deleted.
        keep: newest checkpoints kept.
        config_hash: stands in every manifest.
        env: this rank.
        timeout_s: how long ranks wait for the slowest one in a phase of saving or loading (seconds).

    Raises:
        LaunchError: the run belongs to another process by now.
    """

    def __init__(self, run: RunDir, *, keep: int, config_hash: str, env: Env, timeout_s: float = 1800.0) -> None:
        self.run, self.keep, self.config_hash = run, keep, config_hash
        self.root = run.path / "checkpoints"
        self.peers = Peers(env, timeout_s=timeout_s)
        self._is_main = env.is_main
        self._at: int | None = None  # the step that is on disk as this process has it in memory
        self.finder = Finder(self.peers, warn=self._warn)
        self.peers.on_main("cleaning up", self._recover)

    def has(self, step: int) -> bool:
        """Whether the state of ``step`` was saved or loaded by this object, so that saving it again is idle."""
        return self._at == step

    # --- saving ---

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Commit ``state`` as the checkpoint of ``step``; the one of the same step, if any, is replaced.

        Args:
            state: nested dicts of tensors, DTensors included.
            meta: JSON values, returned by ``load``.

        Raises:
            CheckpointError: it cannot be written; checkpoints that were there are untouched.
            NonFiniteError: the state holds NaN or infinity.
            LaunchError: the run belongs to another process by now.
        """
        started = time.perf_counter()
        flat = states.flatten(state)
        self._refuse_non_finite(step, flat)
        sizes = self.peers.gather_to_main(states.num_bytes(flat))
        temporary = None
        try:
            temporary = self.peers.on_main("preparing", lambda: self._prepare(step, sizes))
            files = storage.write(temporary, flat, peers=self.peers)
            final = self.peers.on_main("committing", lambda: self._commit(step, temporary, files, meta))
        except BaseException as error:
            if self._is_main and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise self._not_saved(step, error) from error
            raise
        self._at = step
        self.finder.trust(final, self.peers.on_main("reading the manifest", lambda: manifest.read(final)))
        if self._is_main:
            self._retain()
            self._report_saved(step, final, files, time.perf_counter() - started)
        return final

    def _refuse_non_finite(self, step: int, flat: Mapping[str, torch.Tensor]) -> None:
        names = sorted(set().union(*self.peers.together("checking", lambda: states.non_finite(flat))))
        if names:
            raise NonFiniteError(
                f"step {step} was not saved: NaN or infinity in {len(names)} tensors, first {names[0]}; "
                "earlier checkpoints are untouched"
            )

    def _prepare(self, step: int, sizes: list[dict[str, int]]) -> Path:
        """The empty folder to write into, on rank 0, if there is room."""
        self.run.check_generation()
        self.root.mkdir(parents=True, exist_ok=True)
        logical: dict[str, int] = {}
        for share in sizes:
            logical |= share
        needed, free = sum(logical.values()) + OVERHEAD, shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(f"{needed / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free in {self.root}")
        temporary = self.root / folder.temporary_name(step, uuid.uuid4().hex)
        temporary.mkdir()
        return temporary

    def _commit(self, step: int, temporary: Path, files: dict[str, Any], meta: Mapping[str, Any]) -> Path:
        """Manifest and rename, on rank 0."""
        absent = files.keys() - {path.name for path in temporary.iterdir()}
        if absent:
            raise CheckpointError(f"other hosts' files are not in {temporary}: hosts must share the run folder")
        own = {
            "format": manifest.FORMAT,
            "step": step,
            "save_id": temporary.name.rpartition("-")[2],
            "sequence": folder.next_sequence(self.root),
            "config_hash": self.config_hash,
            "time": utc_now(),
            "versions": {"torch": torch.__version__, "titanyaml": titanyaml.__version__},
        }
        clash = [name for name in meta.keys() & {*own, "files"} if own.get(name) != meta[name]]
        assert not clash, f"meta overrides {clash}"
        manifest.write(temporary, {**meta, **own, "files": files})
        final = self.root / folder.step_name(step)
        self.run.check_generation()  # last of all: an orphan of a dead launcher must not commit into a later run
        folder.commit(temporary, final)
        return final

    def _not_saved(self, step: int, error: CheckpointError) -> CheckpointError:
        kept = [path.name for path in folder.newest_first(self.root)]
        before = f"; {kept[0]} is untouched" if kept else ""
        return CheckpointError(
            f"step {step} was not saved: {error.message}{before}",
            key="run.dir",
            hint="free space or raise the quota there, keep fewer (checkpoint.keep), or move run.dir",
        )

    def _retain(self) -> None:
        try:
            deleted = folder.retain(self.root, keep=self.keep, bad=self.finder.damaged)
        except OSError as error:  # too many checkpoints are no reason to stop training
            self._warn("checkpoint_retention", f"an old checkpoint could not be deleted: {error}")
            return
        for path in deleted:
            self.finder.forget(path)

    def _report_saved(self, step: int, path: Path, files: dict[str, Any], seconds: float) -> None:
        size = sum(entry["bytes"] for entry in files.values())
        message = f"saved step {step}: {size / GIB:.3f} GiB in {seconds:.2f} s"
        self.run.event("checkpoint", message, step=step, path=str(path), bytes=size, seconds=round(seconds, 3))
        log.info("checkpoint: %s", message)

    # --- finding ---

    def latest(self) -> Path | None:
        """The newest checkpoint of this run whose every byte is as written; None: there has been none.

        A damaged one is reported (event ``checkpoint_damaged``) and the next older one is tried.

        Raises:
            CheckpointError: there are checkpoints, and none is whole.
        """
        return self.finder.newest(self.root)

    def find(self, source: Path | str) -> Path:
        """The checkpoint at ``source``: itself a checkpoint's folder (taken or refused), or a run's (its newest).

        Raises:
            CheckpointError: there is none, or none is whole.
        """
        return self.finder.find(Path(source).absolute())

    # --- loading ---

    def load(self, path: Path | str, state: Mapping[str, Any], *, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Fill ``state`` in place, bit-exact, on whatever mesh it lives.

        Args:
            path: as for ``find``.
            state: nested dicts of tensors; must have exactly the checkpoint's names, shapes and dtypes.
            only: top-level names that are wanted (``("model",)``); the rest of the checkpoint is left unread.

        Returns:
            The ``meta`` given to ``save``, and ``step``, ``config_hash``, ``save_id``, ``time``, ``versions``.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit.
        """
        started = time.perf_counter()
        path = self.find(path)
        flat = states.flatten(state)
        source = storage.reader(path)
        self._require_fit(path, source, flat, only)
        storage.read(source, flat, peers=self.peers)
        content = self.finder.verified[path]
        if path.parent == self.root and only is None:
            self._at = content["step"]
        if self._is_main:
            seconds = time.perf_counter() - started
            message = f"loaded {path}: {len(flat)} tensors of step {content['step']} in {seconds:.2f} s"
            self.run.event("checkpoint_loaded", message, step=content["step"], seconds=round(seconds, 3))
            log.info("checkpoint: %s", message)
        return {name: value for name, value in content.items() if name not in ("files", "format", "sequence")}

    def _require_fit(
        self, path: Path, source: Any, flat: Mapping[str, torch.Tensor], only: Sequence[str] | None
    ) -> None:
        here = states.wanted(flat)
        file = self.peers.on_main("reading the index", lambda: states.stored(source.read_metadata(), only=only))
        # under pipeline parallelism each rank asks for its own part: unknown is what nobody asks for
        unread = set.intersection(*self.peers.gather(file.keys() - here.keys()))
        found = self.peers.gather(states.differences(file, here, unread=unread))
        problems = list(dict.fromkeys(problem for share in found for problem in share))
        if problems:
            raise CheckpointError(
                f"{path} does not fit the model: " + "; ".join(problems),
                hint="the model configuration with which it was written (config.yaml of its run)",
            )

    # --- both ---

    def _recover(self) -> None:
        """Finish or remove what a killed process left, on rank 0."""
        self.run.check_generation()
        found = folder.recover(self.root)
        if found:
            self._warn("checkpoint_leftovers", f"cleaned up after an interrupted save: {', '.join(found)}")

    def _warn(self, kind: str, message: str) -> None:
        log.warning("checkpoint: %s", message)
        self.run.event(kind, message)
