"""The command line on a model of 35 thousand parameters, and what its runs left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

REPOSITORY = Path(__file__).parents[2]
SIZES = (
    "model.vocab_size=258",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=64",
    "model.max_seq_len=64",
    "train.local_batch=4",
    "tokenizer=bytes",
    "tracker=none",
)
#: The learning rate of a step is the same whatever train.steps is, and differs between the first seven.
TRAINING = (
    *SIZES,
    "train.steps=20",
    "schedule=constant",
    "schedule.warmup_steps=7",
    "validation.interval=10",
    "validation.batches=2",
)
IDENTICAL = ("step", "loss", "grad_norm", "lr")


@dataclass(frozen=True)
class Cli:
    """``python -m titanyaml`` in ``folder``, on the texts of ``corpus`` unless ``data=`` is typed or it is None."""

    folder: Path
    corpus: Path | None
    cache: Path

    def command(self, *overrides: str) -> list[str]:
        """The whole command line."""
        text: tuple[str, ...] = ()
        if self.corpus is not None and not any(override.startswith("data=") for override in overrides):
            text = ("data=files", f"data.paths=[{self.corpus}]", "data.validation_fraction=0.1")
        return [sys.executable, "-m", "titanyaml", *text, *overrides]

    @property
    def bare(self) -> Cli:
        """The same without the corpus."""
        return dataclasses.replace(self, corpus=None)

    def environment(self, **extra: str) -> dict[str, str]:
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        ours = {"OMP_NUM_THREADS": "1", "TITANYAML_CACHE": str(self.cache), "CUDA_VISIBLE_DEVICES": ""}
        return inherited | ours | extra

    def __call__(self, *overrides: str, **extra: str) -> subprocess.CompletedProcess:
        """Run to the end; ``extra``: environment variables."""
        return subprocess.run(
            self.command(*overrides),
            cwd=self.folder,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=480,  # compiling with a cold cache on a busy machine takes minutes
        )

    def together(self, commands: Sequence[Sequence[str]], **extra: str) -> list[subprocess.CompletedProcess]:
        """Independent commands, two at a time: most of each is starting up."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda overrides: self(*overrides, **extra), commands))

    def start(self, *overrides: str) -> subprocess.Popen:
        """Leave it running; its output is added to output.txt."""
        with open(self.folder / "output.txt", "a") as output:
            return subprocess.Popen(
                self.command(*overrides), cwd=self.folder, env=self.environment(), stdout=output, stderr=output
            )

    def run(self, run_id: str, *, name: str = "llama3_debug") -> Path:
        """The folder of a run."""
        return self.folder / "outputs" / name / run_id


def children(pid: int) -> list[int]:
    """The living children of a process."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                pids.append(int(path.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return pids


def kill_all(process: subprocess.Popen) -> None:
    """kill -9 of the launcher and its ranks."""
    for pid in [*children(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def wait_for(condition: Callable[[], bool], *, process: subprocess.Popen, seconds: float = 120.0) -> bool:
    """Poll until ``condition`` holds (True) or ``process`` has ended (False)."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return True


def status(run: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((run / "status.json").read_text())


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(run: Path) -> list[tuple]:
    """What must be identical in metrics.jsonl, record by record."""
    return [tuple(record.get(name) for name in IDENTICAL) for record in records(run)]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in events.jsonl."""
    path = run / "events.jsonl"
    records_of_all_kinds = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in records_of_all_kinds if event["kind"] == kind]


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run by step."""
    return sorted((run / "checkpoints").glob("step-*"))


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights and moments."""
    reader = dcp.FileSystemReader(checkpoint)
    tensors_by_name = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors_by_name, storage_reader=reader, planner=planner, no_dist=True)
    return tensors_by_name


def bits(tensors_by_name: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """dtype, shape and bytes by name: equal only where every bit is."""
    return {name: (t.dtype, tuple(t.shape), t.contiguous().numpy().tobytes()) for name, t in tensors_by_name.items()}


def last_bits(run: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """``bits`` of the newest checkpoint."""
    return bits(tensors(checkpoints(run)[-1]))
