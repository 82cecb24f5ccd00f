"""The folder ``checkpoints/``: names, age, commit by rename, retention, the leftovers of a crash, and manifests.

    step-00000100          a checkpoint; it gets this name only after all of it is on the disk
    .tmp-<step>-<save id>  being written
    .old-step-00000100     about to be replaced by another checkpoint of the same step
    .trash-step-00000100   about to be deleted

The age of a checkpoint is its manifest's ``sequence``, not its step. A run that fell back behind a damaged checkpoint,
or was resumed from an older one, writes smaller steps later; by step, its next start would read what was abandoned, and
retention would delete what is new.

``manifest.json`` makes a folder of tensor files one checkpoint, and shows damage to it. It has the size and SHA-256 of
every other file, and a SHA-256 of its own content: a flipped digit in the sample position would be as wrong as one in
a weight.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from titanyaml.errors import CheckpointError
from titanyaml.rundir import fsync

STEP = re.compile(r"step-\d{8,}")  # eight digits: sorted by name is sorted by step
MANIFEST = "manifest.json"
FORMAT = 1  # to be raised when an older version could misread a checkpoint


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_name(step: int, save_id: str) -> str:
    return f".tmp-{step}-{save_id}"


def newest_first(root: Path) -> list[Path]:
    """All checkpoints, newest first; those with an unreadable manifest, whose age is unknown, before all others."""
    # first, so that a damaged newest checkpoint is reported instead of silently passed over
    sequences = {path: _sequence(path) for path in _steps(root)}
    ages = {path: math.inf if sequence is None else sequence for path, sequence in sequences.items()}
    return sorted(ages, key=lambda path: (ages[path], path.name), reverse=True)


def next_sequence(root: Path) -> int:
    sequences = [_sequence(path) for path in _steps(root)]
    return 1 + max((sequence for sequence in sequences if sequence is not None), default=0)


def commit(temporary: Path, final: Path) -> None:
    """Give a finished folder its name. At every instant the old checkpoint of this step is there, or the new one."""
    root = final.parent
    aside = root / f".old-{final.name}"
    # the files are synced already, their names are not: without this a power cut after the rename could leave a
    # checkpoint's name on a folder without its files
    fsync(temporary)
    if final.exists():
        os.rename(final, aside)  # a folder with content cannot be replaced by one rename
    os.rename(temporary, final)
    fsync(root)  # the new name, before the old content goes
    if aside.exists():
        shutil.rmtree(aside)


def recover(root: Path) -> list[str]:
    """Finish or undo what a killed process left unfinished; names of the folders concerned."""
    if not root.is_dir():
        return []
    leftovers = []
    for path in sorted(root.iterdir()):
        name = path.name
        if name.startswith(".old-") and not (root / name.removeprefix(".old-")).exists():
            os.rename(path, root / name.removeprefix(".old-"))  # killed between the two renames of a commit
        elif name.startswith((".tmp-", ".trash-", ".old-")):
            shutil.rmtree(path)
        else:
            continue
        leftovers.append(name)
    return leftovers


def retain(root: Path, *, keep: int, bad: set[Path]) -> list[Path]:
    """Delete all but the ``keep`` newest checkpoints that are not ``bad`` (known to be damaged); the deleted ones."""
    ordered = newest_first(root)
    good = [path for path in ordered if path not in bad and _sequence(path) is not None]
    if not good:
        return []  # what is left may still be of use to a person
    doomed = [path for path in ordered if path not in good[:keep]]
    for path in doomed:
        trash = root / f".trash-{path.name}"
        os.rename(path, trash)  # a half deleted checkpoint must not look like one
        shutil.rmtree(trash)
    return doomed


def _steps(root: Path) -> list[Path]:
    return [p for p in root.iterdir() if STEP.fullmatch(p.name)] if root.is_dir() else []


def _sequence(path: Path) -> int | None:
    """None where the manifest cannot be read."""
    try:
        return int(read_manifest(path)["sequence"])
    except CheckpointError:
        return None


def describe_file(path: Path) -> dict[str, Any]:
    """``{"bytes", "sha256"}`` of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**content, "sha256": _own_digest(content)}, indent=1) + "\n", encoding="utf-8")
    fsync(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``, itself verified. CheckpointError: it is missing, damaged, or of another format."""
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        digest = content.pop("sha256")
        intact = digest == _own_digest(content)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        # a cut file may still be valid JSON of another type
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if not intact:
        raise CheckpointError(f"{folder / MANIFEST} was changed after it was written")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {content['format']}, this version reads {FORMAT}")
    return content


def damage(folder: Path, files: dict[str, dict[str, Any]], *, names: Iterable[str]) -> list[str]:
    """Problems of the named files of a manifest's ``files``; each file is read whole."""
    # threads are enough: hashlib releases the GIL
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda name: _file_damage(folder / name, files[name]), names)
        return [problem for problem in problems if problem]


def _file_damage(path: Path, expected: dict[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:  # first, since it costs nothing
            return f"{path.name} has {size} bytes instead of {expected['bytes']}"
        if describe_file(path)["sha256"] != expected["sha256"]:
            return f"{path.name} was changed after it was written"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ""


def _own_digest(content: dict[str, Any]) -> str:
    # of a canonical form, not of the file's text: line ends and indentation do not matter
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
