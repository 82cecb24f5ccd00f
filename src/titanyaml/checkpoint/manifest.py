"""``manifest.json``: what makes a folder of tensor files one checkpoint, and how damage to it is found.

The file names every other file with its size and SHA-256, and carries a SHA-256 of its own content: a flipped digit
in the sample position would be as wrong as one in a weight.
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
FORMAT = 1


def describe(path: Path) -> dict[str, Any]:
    """``{"bytes", "sha256"}`` of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest of ``folder``, to the disk."""
    path = folder / NAME
    path.write_text(json.dumps({**content, "sha256": _own_digest(content)}, indent=1) + "\n", encoding="utf-8")
    fsync(path)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``, itself verified.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        digest = content.pop("sha256")
        intact = digest == _own_digest(content)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {NAME}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {type(error).__name__}: {error}") from error
    if not intact:
        raise CheckpointError(f"{folder / NAME} was changed after it was written")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {content['format']}, this version reads {FORMAT}")
    return content


def damage(folder: Path, files: dict[str, dict[str, Any]], *, names: Iterable[str]) -> list[str]:
    """What is wrong with the named files of a manifest's ``files``; each file is read whole."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _file_damage(folder / name, files[name]), names)
        return [problem for problem in found if problem]


def _file_damage(path: Path, expected: dict[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path.name} has {size} bytes instead of {expected['bytes']}"
        if describe(path)["sha256"] != expected["sha256"]:
            return f"{path.name} was changed after it was written"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return ""


def _own_digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
