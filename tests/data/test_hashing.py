"""Fingerprints of files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from titanyaml.data.hashing import content_hashes
from titanyaml.errors import DataError


def test_hashes_follow_the_content_not_the_place_or_the_time(tmp_path: Path) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "x.txt").write_text("one")
    (tmp_path / "a" / "sub" / "y.txt").write_text("two")

    def hashes(folder: Path) -> dict[str, str]:
        return content_hashes([folder / "x.txt", folder / "sub" / "y.txt"], cache_dir=tmp_path / "cache")

    first = hashes(tmp_path / "a")
    assert list(first) == ["x.txt", "sub/y.txt"]
    os.utime(tmp_path / "a" / "x.txt", (1, 1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b") == first
    stat = (tmp_path / "a" / "x.txt").stat()
    (tmp_path / "a" / "x.txt").write_text("eno")
    os.utime(tmp_path / "a" / "x.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert hashes(tmp_path / "a")["x.txt"] != first["x.txt"]


def test_a_large_file_is_hashed_again_only_when_it_changed(tmp_path: Path) -> None:
    path, cache = tmp_path / "large.txt", tmp_path / "cache"
    path.write_bytes(b"a" * (1 << 21))
    first = content_hashes([path], cache_dir=cache)
    memo = (cache / "file_hashes.json").read_text()
    # a changed memo shows that it is what is read
    (cache / "file_hashes.json").write_text(memo.replace(first["large.txt"].split()[1], "remembered"))
    assert content_hashes([path], cache_dir=cache)["large.txt"].endswith(" remembered")
    stat = path.stat()
    path.write_bytes(b"b" * (1 << 21))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = content_hashes([path], cache_dir=cache)
    assert changed != first and not changed["large.txt"].endswith(" remembered")
    (cache / "file_hashes.json").write_text("{half")
    assert content_hashes([path], cache_dir=cache) == changed


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        content_hashes([tmp_path / "missing"], cache_dir=tmp_path)
