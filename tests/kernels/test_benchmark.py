"""The script that measures the kernels on a GPU runs, and finds nothing wrong, at sizes for a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


def test_the_benchmark_runs(device, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("kernel_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "kernel_benchmark", module)  # dataclasses look there
    spec.loader.exec_module(module)
    bench = module.Bench(device, tokens=16, dim=32, ffn=48, vocab=200, repeats=1)
    monkeypatch.setattr(bench, "ms", lambda function: (function(), 1.0)[1])
    report = module.run(bench, list(module.PARTS))
    assert report["wrong"] == [] and set(report["results"]) == set(module.PARTS)
    assert torch.tensor(report["results"]["cross_entropy"]["loss_distance"]).isfinite()
