"""``manifest.json``: it makes a folder of tensor files one checkpoint, and shows damage to it.

It has the size and SHA-256 of every other file, and a SHA-256 of its own content: a flipped digit in the sample
position would be as wrong as one in a weight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from titanyaml.errors import CheckpointError
from titanyaml.rundir import fsync

NAME = "manifest.json"
FORMAT = 1  # to be raised when an older version could misread a checkpoint


def describe(path: Path) -> dict[str, Any]:
    """``{"bytes", "sha256"}`` of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def write(folder: Path, content: dict[str, Any]) -> None:
    path = folder / NAME
    path.write_text(json.dumps({**content, "sha256": _own_digest(content)}, indent=1) + "\n", encoding="utf-8")
    fsync(path)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``, itself verified. CheckpointError: it is missing, damaged, or of another format."""
    try:
        content: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        digest = content.pop("sha256")
        intact = digest == _own_digest(content)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {NAME}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        # a cut file may still be valid JSON of another type
        raise CheckpointError(f"{folder / NAME} cannot be read: {type(error).__name__}: {error}") from error
    if not intact:
        raise CheckpointError(f"{folder / NAME} was changed after it was written")
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
        if describe(path)["sha256"] != expected["sha256"]:
            return f"{path.name} was changed after it was written"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ""


def _own_digest(content: dict[str, Any]) -> str:
    # of a canonical form, not of the file's text: line ends and indentation do not matter
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
