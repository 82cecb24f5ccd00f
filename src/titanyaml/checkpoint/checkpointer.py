"""Save, find and load checkpoints of one run.

The order of a save keeps a crash harmless: files into a temporary folder, to the disk with their checksums, the
manifest, the rename, and only then retention. From the first save on there is a complete checkpoint at every instant.
"""

import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import titanyaml
from titanyaml.checkpoint import folder
from titanyaml.checkpoint import state as states
from titanyaml.checkpoint.finder import CheckpointFinder
from titanyaml.checkpoint.peers import Peers
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError, NonFiniteError
from titanyaml.rundir import RunDir, utc_now

log = logging.getLogger("titanyaml")

GIB = 2**30
OVERHEAD_BYTES = 64 * 1024**2  # indices, headers, manifest: an upper bound


class Checkpointer:
    """The checkpoints of ``run``. Methods are collective: every rank calls them, in the same order.

    The constructor removes what a killed save left. It, and ``save``, raise LaunchError if another process owns the
    run. keep: newest checkpoints kept. timeout_s: how long ranks wait for the slowest one in one phase (seconds).
    """

    def __init__(self, run: RunDir, *, keep: int, config_hash: str, env: Env, timeout_s: float = 1800.0) -> None:
        self.run, self.keep, self.config_hash = run, keep, config_hash
        self.root = run.path / "checkpoints"
        self.peers = Peers(env, timeout_s=timeout_s)
        self._is_main = env.is_main
        self._last_saved_step: int | None = None  # on disk with the content that this process has in memory
        self.finder = CheckpointFinder(self.peers, warn=self._warn)
        self.peers.run_on_main("cleaning up", self._recover)

    def is_saved(self, step: int) -> bool:
        """Whether this object saved or loaded the state of ``step``, so that saving it again changes nothing."""
        return self._last_saved_step == step

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Commit ``state`` as the checkpoint of ``step``; one of the same step is replaced.

        Args:
            state: nested dicts of tensors, DTensors included. meta: JSON values, returned by ``load``.

        Raises:
            CheckpointError: it cannot be written; existing checkpoints are untouched.
            NonFiniteError: the state holds NaN or infinity.
        """
        started = time.perf_counter()
        flat = states.flatten(state)
        self._refuse_non_finite(step, flat)
        # to rank 0 alone: the names of all tensors of all ranks are much to send to everybody
        sizes = self.peers.gather_to_main(states.num_bytes(flat))
        temporary: Path | None = None
        try:
            target = temporary = self.peers.run_on_main("preparing", lambda: self._prepare(step, sizes))
            files = states.write(target, flat, peers=self.peers)
            final = self.peers.run_on_main("committing", lambda: self._commit(step, target, files, meta))
        except BaseException as error:
            if self._is_main and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)  # it would take the space that the next save needs
            if isinstance(error, CheckpointError):
                raise self._not_saved(step, error) from error
            raise
        self._last_saved_step = step
        self.finder.trust(final, self.peers.run_on_main("reading the manifest", lambda: folder.read_manifest(final)))
        if self._is_main:
            self._retain()
            self._report_saved(step, final, files, time.perf_counter() - started)
        return final

    def _refuse_non_finite(self, step: int, flat: Mapping[str, torch.Tensor]) -> None:
        # before anything is written: retention would replace the last good checkpoint by a useless one
        names = sorted(set().union(*self.peers.run_on_all("checking", lambda: states.non_finite(flat))))
        if names:
            message = f"step {step} was not saved: NaN or infinity in {len(names)} tensors, first {names[0]}"
            raise NonFiniteError(f"{message}; earlier checkpoints are untouched")

    def _prepare(self, step: int, sizes: list[dict[str, int]]) -> Path:
        """The empty folder to write into, on rank 0, if there is room."""
        self.run.check_generation()
        self.root.mkdir(parents=True, exist_ok=True)
        logical = {name: size for share in sizes for name, size in share.items()}  # shards of a tensor count once
        required, free = sum(logical.values()) + OVERHEAD_BYTES, shutil.disk_usage(self.root).free
        if free < required:
            raise CheckpointError(f"{required / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free in {self.root}")
        temporary = self.root / folder.temporary_name(step, uuid.uuid4().hex)
        temporary.mkdir()
        return temporary

    def _commit(self, step: int, temporary: Path, files: dict[str, Any], meta: Mapping[str, Any]) -> Path:
        """Manifest and rename, on rank 0."""
        if files.keys() - {path.name for path in temporary.iterdir()}:
            raise CheckpointError(f"other hosts' files are not in {temporary}: hosts must share the run folder")
        own = {"format": folder.FORMAT, "step": step, "save_id": temporary.name.rpartition("-")[2]}
        own |= {"sequence": folder.next_sequence(self.root), "config_hash": self.config_hash, "time": utc_now()}
        own |= {"versions": {"torch": torch.__version__, "titanyaml": titanyaml.__version__}}
        clash = [name for name in meta.keys() & {*own, "files"} if own.get(name) != meta[name]]
        assert not clash, f"meta overrides {clash}"
        folder.write_manifest(temporary, {**meta, **own, "files": files})
        final = self.root / folder.step_name(step)
        self.run.check_generation()  # last of all: an orphan of a dead launcher must not commit into a later run
        folder.commit(temporary, final)
        return final

    def _not_saved(self, step: int, error: CheckpointError) -> CheckpointError:
        checkpoints = folder.newest_first(self.root)
        untouched = f"; {checkpoints[0].name} is untouched" if checkpoints else ""
        hint = "free space or raise the quota there, keep fewer (checkpoint.keep), or move run.dir"
        return CheckpointError(f"step {step} was not saved: {error.message}{untouched}", key="run.dir", hint=hint)

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

    def latest(self) -> Path | None:
        """The newest whole checkpoint of this run; None: there has been none. As ``CheckpointFinder.newest``."""
        return self.finder.newest(self.root)

    def find(self, source: Path | str) -> Path:
        """The checkpoint at ``source``, as ``CheckpointFinder.find``."""
        return self.finder.find(Path(source).absolute())

    def load(self, path: Path | str, state: Mapping[str, Any], *, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Fill ``state`` in place, bit-exact, on whatever mesh it lives.

        Args:
            path: as for ``find``. only: top-level names to read (``("model",)``); None: all.
            state: nested dicts of tensors; must have exactly the checkpoint's names, shapes and dtypes.

        Returns:
            The ``meta`` given to ``save``, and ``step``, ``config_hash``, ``save_id``, ``time``, ``versions``.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit.
        """
        started = time.perf_counter()
        path = self.find(path)
        flat = states.flatten(state)
        source = FileSystemReader(path)
        self._require_fit(path, source, flat, only)
        states.read(source, flat, peers=self.peers)
        content = self.finder.verified[path]
        if path.parent == self.root and only is None:  # weights alone, or another run's, are not this run's state
            self._last_saved_step = content["step"]
        if self._is_main:
            seconds = time.perf_counter() - started
            message = f"loaded {path}: {len(flat)} tensors of step {content['step']} in {seconds:.2f} s"
            self.run.event("checkpoint_loaded", message, step=content["step"], seconds=round(seconds, 3))
            log.info("checkpoint: %s", message)
        return {name: value for name, value in content.items() if name not in ("files", "format", "sequence")}

    def _require_fit(
        self, path: Path, source: FileSystemReader, flat: Mapping[str, torch.Tensor], only: Sequence[str] | None
    ) -> None:
        """Names, shapes and dtypes are those of the file: a silent partial load would look like a bad run."""
        # rank 0 reads and sends the specs alone: the index has an entry for every shard
        expected = states.tensor_specs(flat)
        stored = self.peers.run_on_main("reading the index", lambda: states.stored_specs(source, only=only))
        # under pipeline parallelism each rank asks for its own part: unread is what nobody asks for
        unread = set.intersection(*self.peers.gather(stored.keys() - expected.keys()))
        shares = self.peers.gather(states.differences(stored, expected, unread=unread))
        if problems := list(dict.fromkeys(problem for share in shares for problem in share)):
            hint = "the model configuration with which it was written (config.yaml of its run)"
            raise CheckpointError(f"{path} does not fit the model: " + "; ".join(problems), hint=hint)

    def _recover(self) -> None:
        self.run.check_generation()
        if leftovers := folder.recover(self.root):
            self._warn("checkpoint_leftovers", f"cleaned up after an interrupted save: {', '.join(leftovers)}")

    def _warn(self, kind: str, message: str) -> None:
        log.warning("checkpoint: %s", message)
        self.run.event(kind, message)
