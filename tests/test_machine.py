"""Devices counted without torch; what is written about the machine holds no secret."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanyaml import machine


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi lists two devices."""
    program = tmp_path / "nvidia-smi"
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-a)\\nGPU 1: NVIDIA H200 (UUID: GPU-b)\\n"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nprintf '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("-1", 0), ("0,7,1", 1), ("GPU-b", 1)]
)
def test_gpus_are_those_that_cuda_would_show(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(machine.gpus()) == count


def test_the_driver_is_asked_once(two_gpus: None, tmp_path: Path) -> None:
    assert machine.gpus() == machine.gpus() == ["NVIDIA H200", "NVIDIA H200"]
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_a_machine_without_gpus_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_proc_nvidia", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.gpus() == []


def test_the_description_has_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    description = machine.describe()
    assert description["packages"]["hydra-core"].startswith("1.3")
    assert description["variables"]["NCCL_DEBUG"] == "WARN" and "HF_TOKEN" not in description["variables"]


def test_git_state_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert machine.describe()["git"] is None
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "-q", "."], check=True)
    (tmp_path / "x").write_text("1")
    subprocess.run(["git", "add", "x"], check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "x"], check=True)
    assert machine.describe()["git"]["dirty"] is False
    (tmp_path / "x").write_text("2")
    git = machine.describe()["git"]
    assert git["dirty"] is True and len(git["commit"]) == 40


def test_the_age_of_a_process() -> None:
    code = "import time; from titanyaml import machine; time.sleep(0.5); print(machine.process_age_s())"
    begun = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age <= time.monotonic() - begun + 0.05
