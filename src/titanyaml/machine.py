"""Facts of this machine, without importing torch: cores, GPUs, versions, git state."""

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

_FRAMEWORK = ("titanyaml", "torch", "torchao", "triton", "hydra-core", "omegaconf", "numpy")
#: Packages whose version is recorded with every run.
_PACKAGES = (*_FRAMEWORK, "datasets", "sentencepiece", "tokenizers", "safetensors", "aim")
_LIBRARY_VARIABLES = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_", "OMP_", "MKL_")
#: Prefixes of environment variables that change what a run does. Names that may hold a secret are left out.
_VARIABLES = (*_LIBRARY_VARIABLES, "SLURM_", "TITANYAML_", "HF_", "PYTHONHASHSEED")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "JWT")


def gpus() -> list[str]:
    """The GPUs that a process started here would see, by name or number; empty on a CPU machine."""
    # nvidia-smi first: inside a container /proc may list GPUs of the host that the container does not have
    program = shutil.which("nvidia-smi")
    present = list(_list_gpus(program) if program else ()) or _proc_nvidia()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry == "-1" or (entry.isdigit() and int(entry) >= len(present)):
            break  # CUDA itself ignores everything from the first bad entry on
        names.append(present[int(entry)] if entry.isdigit() else entry)
    return names


def _proc_nvidia() -> list[str]:
    folder = Path("/proc/driver/nvidia/gpus")  # the driver's own list, where nvidia-smi is not installed
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


@functools.cache  # rules need it fifteen times, and without a daemon that keeps the driver awake a call takes seconds
def _list_gpus(program: str) -> tuple[str, ...]:
    """Names that ``nvidia-smi -L`` lists."""
    lines = _output_of(program, "-L", timeout_s=20).splitlines()
    return tuple(line.partition(": ")[2].partition(" (UUID")[0] for line in lines if line.startswith("GPU "))


def _output_of(*command: str, timeout_s: float) -> str:
    """What the program printed; empty if it failed or did not end in time."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def process_age_s() -> float:
    """Seconds since this process began; without /proc, the processor time that it has used."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22: since boot
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.process_time()
    return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


def cores() -> int:
    """CPU cores that this process may use."""
    # the affinity is what a container or a job scheduler grants; os.cpu_count() is the whole host
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Model name of the CPU, else its architecture."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.is_file() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


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
    return name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)  # HF_TOKEN is a secret


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit of the working directory, and whether tracked files differ from it; None outside a repository."""
    commit = _output_of("git", "rev-parse", "HEAD", timeout_s=10)
    if not commit:
        return None
    changed_files = _output_of("git", "status", "--porcelain", "--untracked-files=no", timeout_s=10)
    return {"commit": commit, "dirty": bool(changed_files)}
