"""The folder ``checkpoints/``: names, the order of age, the commit by rename, retention, and what a crash leaves.

    step-00000100          a checkpoint; it got this name only after all of it was on the disk
    .tmp-<step>-<save id>  being written
    .old-step-00000100     about to be replaced by another checkpoint of the same step
    .trash-step-00000100   about to be deleted

Age is told by the manifest's ``sequence``, not by the step: a run that fell back behind a damaged checkpoint, or was
resumed from an older one, writes smaller steps later, and these are its newest.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path

from titanyaml.checkpoint import manifest
from titanyaml.errors import CheckpointError
from titanyaml.rundir import fsync

STEP = re.compile(r"step-\d{8,}")


def step_name(step: int) -> str:
    """The folder name of a checkpoint."""
    return f"step-{step:08d}"


def temporary_name(step: int, save_id: str) -> str:
    """The folder name while it is written."""
    return f".tmp-{step}-{save_id}"


def newest_first(root: Path) -> list[Path]:
    """All checkpoints, newest first; one whose manifest cannot be read tells no age, and comes first."""
    ages = [((_sequence(path), path.name), path) for path in _steps(root)]
    return [path for _, path in sorted(ages, reverse=True)]


def next_sequence(root: Path) -> int:
    """The age of the next checkpoint."""
    known = [_sequence(path) for path in _steps(root)]
    return 1 + max((age for age in known if age != math.inf), default=0)


def commit(temporary: Path, final: Path) -> None:
    """Give a finished folder its name. At every instant the old checkpoint of this step is there, or the new one."""
    root = final.parent
    aside = root / f".old-{final.name}"
    fsync(temporary)
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    fsync(root)
    if aside.exists():
        shutil.rmtree(aside)


def recover(root: Path) -> list[str]:
    """Finish or undo what a killed process left half done; what was found, by name."""
    if not root.is_dir():
        return []
    found = []
    for path in sorted(root.iterdir()):
        name = path.name
        if name.startswith(".old-") and not (root / name.removeprefix(".old-")).exists():
            os.rename(path, root / name.removeprefix(".old-"))
        elif name.startswith((".tmp-", ".trash-", ".old-")):
            shutil.rmtree(path)
        else:
            continue
        found.append(name)
    return found


def retain(root: Path, *, keep: int, bad: set[Path]) -> list[Path]:
    """Delete all but the ``keep`` newest checkpoints that are whole as far as known; what was deleted.

    Args:
        bad: checkpoints found damaged; they count for nothing and go.
    """
    ordered = newest_first(root)
    good = [path for path in ordered if path not in bad and _sequence(path) != math.inf]
    if not good:
        return []
    doomed = [path for path in ordered if path not in good[:keep]]
    for path in doomed:
        trash = root / f".trash-{path.name}"
        os.rename(path, trash)  # a half deleted checkpoint must not look like one
        shutil.rmtree(trash)
    return doomed


def _steps(root: Path) -> list[Path]:
    return [p for p in root.iterdir() if STEP.fullmatch(p.name)] if root.is_dir() else []


def _sequence(path: Path) -> float:
    try:
        return manifest.read(path)["sequence"]
    except CheckpointError:
        return math.inf
