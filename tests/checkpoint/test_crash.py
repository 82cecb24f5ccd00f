"""A process may die at any instant of a save; what it had committed before stays readable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*args: str) -> list[dict]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crash", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0 and "child failed" not in result.stderr, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_whole(life: dict) -> None:
    assert life["is_equal"] and life["position"] == 8 * life["step"], life
    assert not [name for name in life["after"] if name.startswith(".")], life


@pytest.mark.parametrize("num_lives", [14, pytest.param(44, marks=pytest.mark.long)])
def test_kill_at_random_instants(tmp_path: Path, num_lives: int) -> None:
    lives = run("random", str(tmp_path), str(num_lives))
    assert len(lives) == num_lives
    for life in lives:
        assert_whole(life)
        # nothing committed is lost; at most the save that was under way is there as well
        assert life["committed"] == 0 or life["committed"] <= life["step"] <= life["committed"] + 1, life
    assert lives[-1]["step"] >= num_lives and any(life["leftovers"] for life in lives), (
        "no kill hit a save: the test is too slow"
    )


def test_death_at_every_file_operation(tmp_path: Path) -> None:
    lives = run("points", str(tmp_path / "run"))
    assert len(lives) > 15
    for life in lives:
        assert_whole(life)
        assert life["step"] >= max(life["committed"], 2), life
    assert lives[-1]["step"] == 3 and lives[-1]["after"] == ["step-00000002", "step-00000003"]
    assert any(".old-step-00000003" in life["leftovers"] for life in lives)
