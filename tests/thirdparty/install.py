"""Install the example package the way its users would, into a folder that a test puts on the path."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "pkg"


def install(folder: Path) -> Path:
    """pip-install a copy of ``pkg`` (building in place would litter the checkout); returns the folder for PYTHONPATH.

    No network: no dependencies, and the build uses the setuptools of this environment.
    """
    source, target = folder / "source", folder / "site"
    shutil.copytree(SOURCE, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
        "--target",
        str(target),
        str(source),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target
