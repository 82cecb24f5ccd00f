"""The example package, installed once for these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.thirdparty.install import install


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package."""
    return install(tmp_path_factory.mktemp("third_party"))


@pytest.fixture
def their_pkg(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package can be imported, and its entry point found, during the test."""
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] == "their_pkg"]:
        del sys.modules[name]
