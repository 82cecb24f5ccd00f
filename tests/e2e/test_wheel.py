"""What is installed from a wheel trains in any folder, without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.helpers import REPOSITORY, TRAINING, Cli, records, status

FOLDERS = ("src", "conf", "experiments")
FILES = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of this checkout was installed. Built from a copy: a build leaves litter."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, folder / "copy" / name, ignore=ignored)
    for name in FILES:
        shutil.copy(REPOSITORY / name, folder / "copy" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    own = ["--no-deps", "--no-index"]
    for command in (
        ["wheel", *own, "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "copy")],
        ["install", *own, "--target", str(folder / "site"), "--find-links", str(folder), "titanyaml"],
    ):
        result = subprocess.run([*pip, *command], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    return folder / "site"


def test_a_wheel_trains_without_the_checkout(cli: Cli, site: Path) -> None:
    alone = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", "import titanyaml, titanyaml.experiments as e; print(titanyaml.__file__, e.__file__)"],
        cwd=cli.folder,
        env=cli.environment(**alone),
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(Path(path).is_relative_to(site) for path in printed.stdout.split())
    train, options = cli.together(
        [(*TRAINING, "train.steps=2", "schedule.warmup_steps=0", "parallel=ddp2", "run.id=a"), ("--help",)], **alone
    )
    assert train.returncode == 0, train.stderr
    assert [record["step"] for record in records(cli.run("a"))] == [1, 2]
    assert status(cli.run("a"))["world_size"] == 2
    assert options.returncode == 0 and "llama3_8b" in options.stdout and "lr_sweep" in options.stdout
    copied = {
        path.relative_to(REPOSITORY / "conf")
        for path in (REPOSITORY / "conf").rglob("*.yaml")
        if "local" not in path.parts
    }
    assert copied <= {path.relative_to(site / "titanyaml" / "conf") for path in site.rglob("titanyaml/conf/**/*.yaml")}
    source = {path.relative_to(REPOSITORY / "src") for path in (REPOSITORY / "src" / "titanyaml").rglob("*.py")}
    assert source <= {path.relative_to(site) for path in site.rglob("*.py")}, "setup.cfg lacks a package"
    assert (site / "titanyaml" / "experiments" / "lr_sweep.yaml").is_file()
    assert (site / "titanyaml" / "py.typed").is_file()
    assert list(site.glob("titanyaml-*.dist-info/**/LICENSE"))
