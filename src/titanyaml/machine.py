"""What this machine is and runs, found out without importing torch."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "titanyaml",
    "torch",
    "torchao",
    "triton",
    "hydra-core",
    "omegaconf",
    "numpy",
    "datasets",
    "sentencepiece",
    "tokenizers",
    "safetensors",
    "aim",
)
_VARIABLES = (
    "CUDA_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "SLURM_",
    "TITANYAML_",
    "HF_",
    "PYTHONHASHSEED",
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "JWT")


def gpus() -> list[str]:
    """The GPUs that a process started here would see, by name or number; empty on a CPU machine."""
    present = _nvidia_smi() or _proc_nvidia()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or name == "-1" or (name.isdigit() and int(name) >= len(present)):
            break  # CUDA itself ignores everything from the first bad entry on
        chosen.append(present[int(name)] if name.isdigit() else name)
    return chosen


def _proc_nvidia() -> list[str]:
    folder = Path("/proc/driver/nvidia/gpus")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _nvidia_smi() -> list[str]:
    # asked first: inside a container /proc may list GPUs of the host that the container does not have
    program = shutil.which("nvidia-smi")
    return [] if program is None else list(_listed_by(program))


@functools.cache
def _listed_by(program: str) -> tuple[str, ...]:
    """The GPUs that ``nvidia-smi -L`` lists. Asked once: rules ask fifteen times, and where no daemon keeps the driver
    awake each call takes seconds."""
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    return tuple(line.partition(": ")[2].partition(" (UUID")[0] for line in lines if line.startswith("GPU "))


def process_age_s() -> float:
    """Seconds since this process began; where the system does not tell, the processor time that it has used."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22: since boot
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.process_time()
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """What the CPU calls itself, else its architecture."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.is_file() else ""
    named = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return named[0] if named else platform.machine()


def describe() -> dict[str, Any]:
    """Versions, git state of the working directory, devices and the variables that change what a run does."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "processor": processor(),
        "cores": cores(),
        "gpus": gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": _git(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
    }


def _matters(name: str) -> bool:
    return name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    commit = _git_says("rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "dirty": bool(_git_says("status", "--porcelain", "--untracked-files=no"))}


def _git_says(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
