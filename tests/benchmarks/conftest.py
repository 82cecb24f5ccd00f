from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """``script("hosts")``: a file of benchmarks/, fresh, as its own command imports it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]

    def imported(name: str):
        return importlib.import_module(name)

    yield imported
    for name in names:
        sys.modules.pop(name, None)
