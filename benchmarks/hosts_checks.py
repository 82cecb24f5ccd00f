"""What must hold on a host's real network: losses of every mesh are one device's; a rank that is killed loses nothing.

The debug model, tokens of a fixed stream, equal seeds. Bounds are stated here, before anything is run:

- float64: every loss within 1e-9 of one device's, every gradient norm within 1e-8 of itself;
- bfloat16: every loss within 5e-3 (of 8.4; rounding moved it by up to 1.3e-4 when it was first measured), every norm
  within 2 %;
- after ``kill -9`` of a rank the job ends within 30 s and names the rank; the resumed run's losses are those of an
  undisturbed one within 1e-9 (float64).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compare

HERE = Path(__file__).resolve().parent
STEPS = 10
#: dtype to (absolute bound of a loss, relative bound of a gradient norm).
BOUNDS = {"float64": (1e-9, 1e-8), "bfloat16": (5e-3, 2e-2)}
KILL_DEADLINE_S, KILL_STEPS, KILL_AFTER = 30.0, 80, 25
#: Runs at a time: they are small, and most of each is starting up.
TOGETHER = max(3, (os.cpu_count() or 1) // 5)

_COMMON = [
    "runner=train",
    "model=llama3_debug",
    "model.num_kv_heads=4",
    "tokenizer=bytes",
    "data=synthetic",
    "train.global_batch=8",
    "tracker=none",
    "validation=none",
    "launch.step_timeout_s=60",
    "checkpoint=none",
]


def meshes(ranks: int) -> dict[str, list[str]]:
    """Overrides of each mesh that fits on so many ranks."""
    overrides = {
        "fsdp2": [],
        "ddp2": [],
        "tp2": [],
        "fsdp2-reshard": ["parallel.fsdp_reshard_after_forward=always"],
        "tp2-whole": ["parallel.tp_sequence_parallel=false"],
    }
    overrides |= {f"cp2-{method}": [f"parallel.cp_method={method}"] for method in ("allgather", "ring", "ulysses")}
    overrides |= {f"pp2-{schedule}": [f"parallel.pp_schedule={schedule}"] for schedule in ("1F1B", "Interleaved1F1B")}
    overrides["pp2-ZBVZeroBubble"] = ["parallel.pp_schedule=ZBVZeroBubble", "compile=none"]
    if ranks >= 4:
        overrides |= {name: [] for name in ("fsdp4", "tp4", "hsdp2x2", "fsdp2_tp2", "fsdp2_cp2", "cp2_tp2", "cp4")}
        overrides["fsdp2_pp2"] = ["parallel.pp_schedule=1F1B"]
    if ranks >= 8:
        overrides |= {name: [] for name in ("fsdp8", "fsdp2_cp2_tp2", "fsdp4_tp2")}
    return {
        name: [f"parallel={name.partition('-')[0]}", "train.local_batch=1", *more] for name, more in overrides.items()
    }


def parity(
    ranks: int, folder: Path, *, dtype: str, limit_s: float, only: list[str] | None = None, more: list[str] = ()
) -> dict[str, Any]:
    """Ten steps on one device and on each mesh, compared. ``ok`` is false where one failed or is off.

    Args:
        only: names of meshes; None: all. more: overrides of every run.
    """
    eager = ["compile=none"] if dtype == "float64" else []
    options = [
        *_COMMON,
        f"train.steps={STEPS}",
        f"train.compute_dtype={dtype}",
        f"train.reduce_dtype={'float64' if dtype == 'float64' else 'float32'}",
        *eager,
    ]
    if dtype == "float64":
        options.append("train.param_dtype=float64")
    cases = {"single": ["parallel=single", "train.local_batch=4"]} | {
        name: mesh for name, mesh in meshes(ranks).items() if only is None or name in only
    }
    with ThreadPoolExecutor(TOGETHER) as pool:
        jobs = {
            name: pool.submit(_train, [*options, *mesh, *more], folder / f"{dtype}-{name}", limit_s)
            for name, mesh in cases.items()
        }
        runs = {name: job.result() for name, job in jobs.items()}
    loss_bound, norm_bound = BOUNDS[dtype]
    alone, rows = runs.pop("single"), {}
    for name, run in runs.items():
        rows[name] = (
            run
            if "error" in run or "error" in alone
            else {
                "loss": _worst(run["loss"], alone["loss"], lambda a, b: abs(a - b)),
                "norm": _worst(run["norm"], alone["norm"], lambda a, b: abs(a / b - 1)),
            }
        )
        rows[name]["ok"] = rows[name].get("loss", 1.0) <= loss_bound and rows[name].get("norm", 1.0) <= norm_bound
    return {
        "dtype": dtype,
        "loss_bound": loss_bound,
        "norm_bound": norm_bound,
        "single": alone,
        "meshes": rows,
        "ok": all(row["ok"] for row in rows.values()) and "error" not in alone,
    }


def _worst(values: list[float], expected: list[float], distance: Callable[[float, float], float]) -> float:
    """The largest distance; infinite where a value is missing or none."""
    if not expected or len(values) != len(expected):
        return math.inf
    distances = [distance(a, b) for a, b in zip(values, expected, strict=True)]
    return math.inf if any(map(math.isnan, distances)) else max(distances)


def _train(options: list[str], folder: Path, limit_s: float) -> dict[str, Any]:
    command = _command(options, folder)
    process = compare.run(command, cwd=HERE.parent, extra={}, limit_s=limit_s)
    if process.returncode:
        return compare.failure(command, process)
    return _metrics(folder)


def _command(options: list[str], folder: Path) -> list[str]:
    return [sys.executable, "-m", "titanyaml", *options, f"run.dir={folder}"]


def _metrics(folder: Path) -> dict[str, list[float]]:
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    records = [record for record in records if "loss" in record]
    return {"loss": [r["loss"] for r in records], "norm": [r["grad_norm"] for r in records]}


def kill(folder: Path, *, limit_s: float, more: list[str] = ()) -> dict[str, Any]:
    """``kill -9`` of rank 1 of two in the midst of a training with checkpoints, and the same command again.

    Args:
        more: overrides of both runs.
    """
    options = [
        *_COMMON[:-1],
        "checkpoint.interval=10",
        "parallel=fsdp2",
        "train.local_batch=1",
        "train.log_every=1",
        f"train.steps={KILL_STEPS}",
        "train.compute_dtype=float64",
        "train.param_dtype=float64",
        "train.reduce_dtype=float64",
        "compile=none",
        *more,
    ]
    straight = _train(options, folder / "straight", limit_s)
    killed, command = folder / "killed", _command(options, folder / "killed")
    log = folder / "killed.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=HERE.parent, stdout=output, stderr=output)
    report: dict[str, Any] = {"deadline_s": KILL_DEADLINE_S}
    try:
        report["reached"] = _wait(lambda: len(_metrics(killed)["loss"]) >= KILL_AFTER, process, limit_s)
        os.kill(_rank(process.pid, 1), signal.SIGKILL)
        since = time.monotonic()
        process.wait(timeout=KILL_DEADLINE_S)
    except (subprocess.TimeoutExpired, ProcessLookupError) as error:
        process.kill()
        return report | {"ok": False, "error": repr(error)}
    report |= {
        "ended_after_s": time.monotonic() - since,
        "exit_code": process.returncode,
        "steps_before": len(_metrics(killed)["loss"]),
        "told": [line for line in log.read_text().splitlines() if "rank 1" in line][:3],
    }
    resumed = _train(options, killed, limit_s)
    if "error" in straight or "error" in resumed:
        return report | {"ok": False, "straight": straight, "resumed": resumed}
    worst = _worst(resumed["loss"], straight["loss"], lambda a, b: abs(a - b))
    report |= {"bit_equal": straight == resumed, "loss": worst}
    resumes = len(straight["loss"]) == KILL_STEPS and worst <= BOUNDS["float64"][0]
    ended = report["exit_code"] != 0 and bool(report["told"])
    return report | {"ok": resumes and ended and report["reached"] and report["steps_before"] < KILL_STEPS}


def _wait(condition: Callable[[], bool], process: subprocess.Popen, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def _rank(parent: int, rank: int) -> int:
    """Process id of a rank: the child of the launcher whose environment says so."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            child = int(status.read_text().rpartition(")")[2].split()[1]) == parent
            if child and f"RANK={rank}".encode() in (status.parent / "environ").read_bytes().split(b"\0"):
                return int(status.parent.name)
        except OSError:  # it ended meanwhile
            continue
    raise ProcessLookupError(f"rank {rank} is not there")
