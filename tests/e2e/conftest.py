"""A small corpus, the command line, and one uninterrupted run that others are compared with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.helpers import TRAINING, Cli


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty texts of 120 made-up words: 29 thousand bytes."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(60)]
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(words, k=120)))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenised corpora, shared by all runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(tmp_path: Path, corpus: Path, cache: Path) -> Cli:
    """The command line in a folder of the test's own."""
    return Cli(tmp_path, corpus, cache)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Path:
    """The folder of a run of ``TRAINING`` that nothing disturbed."""
    cli = Cli(tmp_path_factory.mktemp("straight"), corpus, cache)
    done = cli(*TRAINING, "run.id=straight")
    assert done.returncode == 0, done.stderr
    return cli.run("straight")
