"""``runner=plan`` as typed, on a machine without torch."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def typed(tmp_path: Path):
    """Run the command in a folder of its own; importing torch fails."""
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "torch.py").write_text("raise ImportError('there is no torch here')\n")

    def run(*overrides: str) -> subprocess.CompletedProcess:
        path = os.pathsep.join([str(tmp_path / "absent"), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-m", "titanyaml", *overrides],
            cwd=tmp_path,
            text=True,
            timeout=100,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    return run


def test_plan_without_torch(typed, tmp_path: Path) -> None:
    process = typed(
        "runner=plan",
        "model=llama3_70b",
        "parallel=fsdp32_tp8",
        "ac=full",
        "hardware=h100_500w",
        "train.local_batch=16",
        "compile.async_tp=true",
        "runner.token_budget=1e12",
        "hardware.price_per_hour=2",
        "run.dir=here",
    )
    assert process.returncode == 0, process.stderr
    assert "memory of the fullest rank" in process.stdout
    plan = json.loads((tmp_path / "here" / "plan.json").read_text())
    assert {
        "fits",
        "tps",
        "step_s",
        "mfu",
        "memory_gib",
        "time_s",
        "comm",
        "world_size",
        "warnings",
        "cost",
        "tokens_per_day",
        "gpu_hours",
    } <= set(plan)
    assert plan["fits"] is True and plan["world_size"] == 256
    assert plan["tps"] == pytest.approx(652, rel=0.10), "published with async TP, H100 500 W"
    assert sum(plan["time_s"].values()) == pytest.approx(plan["step_s"])
    assert sum(plan["memory_gib"]["parts"].values()) == pytest.approx(plan["memory_gib"]["total"])
    assert {"axis", "op", "count", "bytes", "exposed_s"} <= set(plan["comm"][0])
    assert plan["cost"] == pytest.approx(2 * plan["gpu_hours"])
    assert "# Plan: llama3_70b, fsdp32_tp8, h100_500w" in (tmp_path / "here" / "plan.md").read_text()
    assert json.loads((tmp_path / "here" / "timeline.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "here" / "status.json").read_text())["metric"] == plan["tps"]


def test_plan_that_does_not_fit_is_a_result(typed, tmp_path: Path) -> None:
    process = typed(
        "runner=plan", "model=llama3_8b", "parallel=fsdp8", "hardware=h100_sxm", "train.local_batch=8", "run.dir=here"
    )
    assert process.returncode == 0, process.stderr
    plan = json.loads((tmp_path / "here" / "plan.json").read_text())
    assert plan["fits"] is False and len(plan["changes"]) == 3
    assert "does not fit" in plan["warnings"][0] and "the largest part is activations" in plan["warnings"][0]
    assert all(change["typed"] in plan["warnings"][0] for change in plan["changes"])


def test_sweep_ranks_meshes(typed, tmp_path: Path) -> None:
    process = typed(
        "-m",
        "runner=plan",
        "model=llama3_8b",
        "parallel=fsdp8,single",
        "hardware=h100_sxm",
        "train.local_batch=1",
        "ac=full",
        "hydra.sweep.dir=swept",
    )
    assert process.returncode == 0, process.stderr
    with (tmp_path / "swept" / "sweep.csv").open() as file:
        rows = {"fsdp8" if "parallel=fsdp8" in row["overrides"] else "single": row for row in csv.DictReader(file)}
    fsdp, single = rows["fsdp8"], rows["single"]
    assert float(fsdp["tps"]) == float(fsdp["metric"]) > 5000
    assert (single["state"], float(single["metric"])) == ("done", 0.0), "what does not fit is a result"


def test_search_chooses_the_jobs_of_a_sweep(typed, tmp_path: Path) -> None:
    process = typed(
        "-m",
        "hydra/sweeper=titan_search",
        "runner=plan",
        "model=llama3_8b",
        "hardware=h100_sxm",
        "launch.nproc=16",
        "train.global_batch=32",
        "parallel.tp=1,2",
        "parallel.cp=1",
        "ac=full",
        "quant=none,float8_rowwise",
        "parallel.pp=1",
        "optim=adamw,adamw_bf16",
        "hydra.sweeper.jobs=2",
        "hydra.sweep.dir=found",
    )
    assert process.returncode == 0, process.stderr
    search = json.loads((tmp_path / "found" / "search.json").read_text())
    assert search["tried"] >= search["legal"] >= search["fitted"] > 30
    best = search["best"]
    assert len(best) == 10 and best == sorted(best, key=lambda candidate: -candidate["tps"])
    assert all("ac=full" in candidate["change"] and candidate["why"] for candidate in best), "what was typed is kept"
    assert {"optim=adamw", "optim=adamw_bf16"} == {
        text for candidate in best for text in candidate["base"] if "optim" in text
    }
    assert search["command"] in process.stdout and "torchrun --nnodes=2 --nproc-per-node=8" in search["command"]
    assert "runner" not in search["command"] and "launch.nproc" not in search["command"]
    with (tmp_path / "found" / "sweep.csv").open() as file:
        speeds = sorted((float(row["tps"]) for row in csv.DictReader(file)), reverse=True)
    assert speeds == pytest.approx([candidate["tps"] for candidate in best[:2]])


def test_command_of_the_first_choice_gives_the_same_plan(typed, tmp_path: Path) -> None:
    process = typed(
        "-m",
        "hydra/sweeper=titan_search",
        "runner=plan",
        "model=llama3_8b",
        "hardware=h100_sxm",
        "launch.nproc=8",
        "train.global_batch=32",
        "parallel.tp=1",
        "parallel.cp=1",
        "parallel.pp=1",
        "quant.product=torchao,own",
        "train.local_batch=2,4",
        "hydra.sweep.dir=found",
    )
    assert process.returncode == 0, process.stderr
    search = json.loads((tmp_path / "found" / "search.json").read_text())
    command = search["command"].split("-m titanyaml ")[1].split()
    assert "quant.product=own" in command and any("ac.keep_products=" in text for text in command)
    replay = typed("runner=plan", "run.dir=again", *command)
    assert replay.returncode == 0, replay.stderr
    plan, first = json.loads((tmp_path / "again" / "plan.json").read_text()), search["best"][0]
    assert plan["fits"] and plan["tps"] == pytest.approx(first["tps"], rel=1e-9)
    assert plan["memory_gib"]["total"] == pytest.approx(first["memory_gib"], rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hardware=h200", "parallel=auto"], "a search must know on how many devices"),
        (["hardware=h200", "launch.nproc=8", "train.seq_len=100000000"], "train.seq_len"),
        (
            ["hardware=h200", "launch.nproc=8", "quant=none,float8_rowwize", "ac=fulll,none", "hydra.sweep.dir=swept"],
            "try: quant=float8_rowwise",
        ),
        (["hardware=h200", "launch.nproc=8", "parallel=fsdp8", "ac=full", "ac.every=4"], "try: leave that key out"),
        (["hardware=h200", "launch.nproc=8", "hydra.sweeper.jobs=-1"], "hydra.sweeper.jobs: is -1"),
        (["hardware=h200", "launch.nproc=8", "parallel=fsdp8,fsdp4_tp4"], "is 8, but parallel=fsdp4_tp4 has 16 ranks"),
    ],
)
def test_impossible_search_is_refused(typed, overrides: list[str], words: str) -> None:
    process = typed("-m", "hydra/sweeper=titan_search", "runner=plan", "model=llama3_8b", *overrides)
    assert process.returncode == 2
    assert words in process.stderr and "Traceback" not in process.stderr


def test_search_without_multirun_is_refused(typed) -> None:
    process = typed("hydra/sweeper=titan_search", "runner=plan", "hardware=h200", "launch.nproc=8")
    assert process.returncode == 2
    assert "try: -m hydra/sweeper=titan_search" in process.stderr


def test_unknown_device_is_refused(typed) -> None:
    process = typed("runner=plan")
    assert process.returncode == 2
    assert "hardware.gemm_bf16_tflops" in process.stderr
