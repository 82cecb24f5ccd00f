"""Folders that are built once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from titanyaml.errors import DataError
from titanyaml.tokenizer.cache import build_once


def write(folder: Path) -> None:
    (folder / "file").write_text("whole")


def test_the_second_call_builds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "thing"
    assert build_once(path, write, what="a thing") == path

    def never(folder: Path) -> None:
        raise AssertionError("built again")

    build_once(path, never, what="a thing")
    assert (path / "file").read_text() == "whole"


def test_one_of_many_builds_and_the_others_wait(tmp_path: Path) -> None:
    builds, contents, started = [], [], threading.Barrier(6)

    def slow(folder: Path) -> None:
        builds.append(folder)
        threading.Event().wait(0.2)
        write(folder)

    def call() -> None:
        started.wait()
        contents.append((build_once(tmp_path / "thing", slow, what="a thing") / "file").read_text())

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and contents == ["whole"] * 6


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "thing", fails, what="a thing")
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
    build_once(tmp_path / "thing", write, what="a thing")


def test_a_killed_builder_leaves_no_partial_folder(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from titanyaml.tokenizer.cache import build_once\n"
        "def build(folder):\n"
        "    (folder / 'file').write_text('ha')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(pathlib.Path(sys.argv[1]), build, what='a thing')\n"
    )
    path = tmp_path / "thing"
    result = subprocess.run([sys.executable, "-c", code, str(path)])
    assert result.returncode == -signal.SIGKILL
    assert not path.exists()
    assert list(tmp_path.glob(".thing.tmp-*"))
    build_once(path, write, what="a thing")
    assert (path / "file").read_text() == "whole"
    assert not list(tmp_path.glob(".thing.tmp-*"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write a thing") as caught:
        build_once(tmp_path / "file" / "thing", write, what="a thing")
    assert caught.value.key == "data.cache_dir"
    assert os.listdir(tmp_path) == ["file"]
