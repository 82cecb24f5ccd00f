"""Fingerprints of files by their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from titanyaml.errors import DataError
from titanyaml.rundir import atomic_write

# smaller files are read and hashed at every start; the hash of a larger one is remembered
_REMEMBER_BYTES = 1 << 20


def content_hashes(files: Sequence[Path], *, cache_dir: Path) -> dict[str, str]:
    """``{name: "size sha256"}`` of each file; the name is its path below the folder that holds them all."""
    # names below the common folder: the same files elsewhere have the same fingerprint
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    memo_file = cache_dir / "file_hashes.json"
    memo = _load(memo_file)
    num_remembered = len(memo)
    hashes = {}
    for file in files:
        path = file.absolute()
        try:
            stat = path.stat()
            # mtime can be set back by a user after an edit, ctime cannot
            stamp = f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
            digest = memo.get(stamp)
            if digest is None:
                with path.open("rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error}", key="data.paths") from error
        if stat.st_size >= _REMEMBER_BYTES:
            memo[stamp] = digest
        hashes[path.relative_to(root).as_posix()] = f"{stat.st_size} {digest}"
    if len(memo) > num_remembered:
        _save(memo_file, memo)
    return hashes


def _load(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # a memo only: without it the files are read again


def _save(path: Path, memo: dict[str, str]) -> None:
    try:
        # by rename, since several starts may share the cache: a lost update costs time, a torn file would too
        atomic_write(path, json.dumps(memo))
    except OSError as error:
        hint = "data.cache_dir=/a/writable/folder"
        raise DataError(f"cannot write {path}: {error}", key="data.cache_dir", hint=hint) from error
