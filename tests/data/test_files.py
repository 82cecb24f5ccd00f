"""Finding, reading and hashing files."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from titanyaml.data import files
from titanyaml.data.files import content_hashes
from titanyaml.errors import DataError


def texts(path: Path, field: str = "text") -> list[str]:
    return [document.text for document in files.read(path, text_field=field)]


def test_find_takes_files_folders_and_globs_in_order_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("z.log", "d/b.txt", "d/deep/a.jsonl", "d/picture.png", "d/Makefile"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    with caplog.at_level(logging.INFO, "titanyaml"):
        paths = files.find(["*.log", "d", "d/b.txt"])
    assert [path.as_posix() for path in paths] == ["z.log", "d/b.txt", "d/deep/a.jsonl"]
    assert "2 other files are not read (1 .png, 1 no suffix)" in caplog.text
    assert [path.as_posix() for path in files.find(["d/**/*.jsonl"])] == ["d/deep/a.jsonl"]
    for wrong in ("missing.txt", "*.missing", "missing/"):
        with pytest.raises(DataError, match="matches no file"):
            files.find(["z.log", wrong])
    with pytest.raises(DataError, match="no files are given"):
        files.find([])


def test_text_keeps_its_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("a\r\nb\n\0\u00e9".encode())
    assert texts(tmp_path / "a.txt") == ["a\r\nb\n\0\u00e9"]
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match="b.txt: not UTF-8 text: .*position 3"):
        texts(tmp_path / "b.txt")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    content = b'{"text": "one\\r\\n"}\n\n{"text": "\\u00e9", "other": 1}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    documents = list(files.read(tmp_path / name, text_field="text"))
    assert documents == [(f"{tmp_path / name}:1", "one\r\n"), (f"{tmp_path / name}:3", "\u00e9")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a.jsonl:2: not JSON"),
        (b'{"body": "a", "id": 1}', r"a.jsonl:2: no field 'text'; there is: 'body', 'id'"),
        (b'"text"', r"a.jsonl:2: no field 'text'; there is: a str, no record"),
        (b'{"text": null}', r"a.jsonl:2: field 'text' is NoneType, not text"),
        (b'{"text": "\\ud800"}', r"a.jsonl:2: a lone surrogate is not text"),
        (b'{"text": "\xff"}', r"a.jsonl:2: not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.jsonl")


def test_a_truncated_gzip_file_is_an_error(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line)[:-10])
    with pytest.raises(DataError, match="cannot read"):
        texts(tmp_path / "a.jsonl.gz")


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    written = [f"row {number}" for number in range(1000)]
    parquet.write_table(pyarrow.table({"body": written, "id": list(range(1000))}), path, row_group_size=300)
    assert texts(path, "body") == written
    with pytest.raises(DataError, match="no field 'text'; there is: 'body', 'id'"):
        texts(path)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(DataError, match="a.parquet row 1: field 'text' is NoneType"):
        texts(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        texts(path)


def test_the_standard_library_is_found_without_packages_and_in_one_order() -> None:
    paths = files.stdlib_files()
    assert len(paths) > 500
    assert paths == files.stdlib_files() != sorted(paths)
    assert not [path for path in paths if "site-packages" in path.parts]
    names = [document.name for document in files.read_stdlib(paths[:20])]
    assert names == [str(path) for path in paths[:20]]


def test_sources_are_decoded_as_they_declare_and_broken_ones_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\r\n# \xe9\n")
    (tmp_path / "broken.py").write_bytes(b"# \xff\n")
    with caplog.at_level(logging.INFO, "titanyaml"):
        documents = list(files.read_stdlib([tmp_path / "latin.py", tmp_path / "broken.py"]))
    assert [document.text for document in documents] == ["# coding: latin-1\r\n# \u00e9\n"]
    assert "skipped 1 files that do not decode: broken.py" in caplog.text


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


def test_a_missing_file_has_no_hash(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        content_hashes([tmp_path / "missing"], cache_dir=tmp_path)
