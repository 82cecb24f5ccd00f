"""A benchmark on two ranks, and a profiled run: the files they leave."""

from __future__ import annotations

import json
import re

import yaml

from tests.e2e.helpers import SIZES, records, status

KEYS = {
    "tps",
    "tps_spread",
    "mfu",
    "fraction_of_floor",
    "mem_reserved_gib",
    "mem_active_gib",
    "kernels",
    "ceilings",
    "environment",
}


def test_bench_and_profile(cli):
    bench, profiled = cli.bare.together(
        [
            [
                "runner=bench",
                *SIZES,
                "parallel=fsdp2",
                "runner.skipped_steps=1",
                "runner.measured_steps=3",
                "run.id=b",
                "runner.entity=me",
                "runner.notes='on a busy machine'",
                "data.prefetch=0",
                "hardware.calibrate=true",
            ],
            [
                "data=synthetic",
                *SIZES,
                "checkpoint=none",
                "validation=none",
                "train.steps=4",
                "run.id=p",
                "profile=trace",
                "profile.wait=1",
                "profile.warmup=1",
                "profile.active=2",
            ],
        ]
    )
    assert bench.returncode == 0, bench.stderr
    assert profiled.returncode == 0, profiled.stderr
    assert [path.name for path in (cli.run("p") / "profile").iterdir()] == ["trace-step-00000004-rank-0.json.gz"]

    run = cli.run("b")
    result = json.loads((run / "bench.json").read_text())
    assert result.keys() >= KEYS
    assert f"; steps 1 to {records(run)[-1]['step']}" in bench.stdout + bench.stderr
    assert result["kernels"]["ms"]["optimizer"] > 0 and result["floor_note"] == ""
    assert (result["mfu"], result["mem_active_gib"]) == (None, None), "no peak is known of a CPU"
    assert 0 < result["fraction_of_floor"] < 1
    step_seconds = [record["step_s"] for record in records(run)]
    assert (
        len(step_seconds) == 7
        and result["steps_s"] == step_seconds[1:4]
        and result["step_s"] == sorted(step_seconds[1:4])[1]
    )
    assert result["tps"] == result["tokens_per_step"] / result["step_s"] / 2 == 4 * 64 * 2 / result["step_s"] / 2
    ms = result["kernels"]["ms"]
    assert {"gemm", "attention", "casts", "elementwise", "optimizer", "communication", "idle"} <= set(ms)
    assert ms["communication"] > 0 and ms["gemm"] > 0
    assert status(run)["metric"] == result["tps"] and status(run)["config_hash"] == result["config_hash"]

    rates, links = (
        yaml.safe_load((run / group / "cpu_calibrated.yaml").read_text()) for group in ("hardware", "cluster")
    )
    assert rates["defaults"][0] == {"override /cluster@_global_.cluster": "cpu_calibrated"}
    assert min(rates["gemm_bf16_tflops"], rates["memory_tb_s"], rates["flash_backward_tflops"]) > 0
    assert links["gpus_per_host"] == 2 and links["nvlink_gb_s"] > 0 and "rdma_gb_s" not in links

    [report] = run.glob("*.md")
    month = result["date"][:4] + result["date"][5:7]
    assert report.name == f"llama3_debug_cpu_{month}_me.md"
    text = report.read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:4] == ["Who", "Model", "Hardware and interconnect", "Result"]
    assert {"Versions and dates", "Notes", "Configuration"} <= set(headings)
    assert "2 x " in text and "dp_shard 2" in text and "on a busy machine" in text
    written = yaml.safe_load(re.search(r"```yaml\n(.*)```", text, re.DOTALL)[1])
    assert written["model"]["dim"] == 32 and written["parallel"]["dp_shard"] == 2 and written["run"]["id"] == "b"
