"""The command line in a process of its own, in an empty folder, training with a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
STAND_IN = ("runner._target_=tests.launch.standins.train", "data=synthetic", "tracker=none")
#: Imported, not run with -m, so that the child can say what it has loaded.
SPY = "import sys; from titanyaml.cli import main\ntry: main()\nfinally: print('torch:', 'torch' in sys.modules)"


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: nothing of a torchrun around pytest."""
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return outer | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | extra


Cli = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """``cli("optim.lr=1", ...)`` runs ``python -m titanyaml`` to its end; ``stand_in``: trains with the stand-in."""

    def run(
        *arguments: str, stand_in: bool = False, spy: bool = False, cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess:
        start = ["-c", SPY] if spy else ["-m", "titanyaml"]
        return subprocess.run(
            [sys.executable, *start, *arguments, *(STAND_IN if stand_in else ())],
            cwd=cwd or tmp_path,
            env=environment(**extra),
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """The same, left running; its output goes to a file named output.txt."""
    running: list[subprocess.Popen] = []

    def begin(*arguments: str) -> subprocess.Popen:
        with open(tmp_path / "output.txt", "a") as output:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "titanyaml", *arguments, *STAND_IN],
                    cwd=tmp_path,
                    env=environment(),
                    stdout=output,
                    stderr=output,
                )
            )
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()
