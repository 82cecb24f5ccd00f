"""Which checkpoint to read: the newest one that is whole, or the one that was named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanyaml.checkpoint import folder
from titanyaml.checkpoint.peers import Peers
from titanyaml.errors import CheckpointError


class CheckpointFinder:
    """Verifies checkpoints, each once. ``warn`` is called on rank 0 with an event kind and a message."""

    def __init__(self, peers: Peers, *, warn: Callable[[str, str], None]) -> None:
        self.peers, self._warn = peers, warn
        self.verified: dict[Path, dict[str, Any]] = {}  # manifests
        self.damaged: set[Path] = set()

    def newest(self, root: Path) -> Path | None:
        """The newest whole checkpoint in the folder ``root``; None: there is none at all.

        A damaged one is reported, and the next older one is tried. CheckpointError: there are some, and none is whole.
        """
        # there is no pointer file such as ``latest``: it would be a second truth, and stale after a crash
        # one rank lists: on a network file system two ranks may see different folders
        names = self.peers.run_on_main("listing", lambda: [path.name for path in folder.newest_first(root)])
        problems: list[str] = []
        for path in (root / name for name in names):
            if not (damage := self._damage(path)):
                return path
            problems.append(f"{path.name}: {damage[0]}")
            self.damaged.add(path)
            if self.peers.rank == 0:
                self._warn("checkpoint_damaged", f"{path} is damaged and passed over: " + "; ".join(damage))
        if not names:
            return None
        message = f"none of the {len(names)} checkpoints in {root} can be read: " + "; ".join(problems)
        hint = "restore one of them from a copy, or begin anew under another run.id"
        raise CheckpointError(message, key="checkpoint.resume", hint=hint)

    def find(self, source: Path) -> Path:
        """The checkpoint at ``source``: itself one, or the newest of a run's folder or of a folder of steps."""
        kind = self.peers.run_on_main("looking", lambda: _folder_kind(source))
        if kind == "step":
            if damage := self._damage(source):  # it was named, so another one would not do
                message = f"{source} is damaged: " + "; ".join(damage)
                raise CheckpointError(message, hint="an older step of the same run")
            return source
        newest = self.newest(source / "checkpoints" if kind == "run" else source)
        if newest is None:
            raise CheckpointError(f"no checkpoint in {source}", hint="the folder of a run, or of one step in it")
        return newest

    def trust(self, path: Path, content: dict[str, Any]) -> None:
        """Take ``path`` for whole: this process has just written it."""
        self.verified[path] = content
        self.damaged.discard(path)

    def forget(self, path: Path) -> None:
        self.verified.pop(path, None)
        self.damaged.discard(path)

    def _damage(self, path: Path) -> list[str]:
        if path in self.verified:
            return []
        content, problem = self.peers.run_on_main("reading the manifest", lambda: _try_manifest(path))
        if problem:
            return [problem]
        # every world_size-th file: any mesh may read, so files do not belong to ranks
        own_names = sorted(content["files"])[self.peers.rank :: self.peers.world_size]
        shares = self.peers.run_on_all("verifying", lambda: folder.damage(path, content["files"], names=own_names))
        damage = [problem for share in shares for problem in share]
        if not damage:
            self.verified[path] = content
        return damage


def _folder_kind(source: Path) -> str:
    """What a folder is: "step", "run", or "steps" (a folder of steps, or nothing of the kind)."""
    if folder.STEP.fullmatch(source.name) or (source / folder.MANIFEST).exists():
        return "step"
    return "run" if (source / "checkpoints").is_dir() else "steps"


def _try_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """(manifest, "") or ({}, problem): damage is an answer here, unlike the failure of a rank."""
    try:
        return folder.read_manifest(path), ""
    except CheckpointError as error:
        return {}, error.message
