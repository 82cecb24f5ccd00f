"""Loss curves of float8 recipes, kernels and optimizers, compared with bfloat16 and PyTorch's own kernels.

    python benchmarks/curves.py --text corpus.jsonl --seeds 0,1,2 --jobs 4 --out benchmarks/results/curves_h200

The model has 100 million parameters. For one seed, a curve differs from the reference by its row's options alone. The
tolerances were stated (docs/performance.md) before the first run. Reads ``<out>.json``, runs the rows and seeds that it
lacks, and writes it and ``<out>.md``. The exit code is 1 if a row failed or left its tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare

from titanyaml import machine
from titanyaml.runner.bench_report import table

# Means over 50 steps, and over the seeds, are compared: single steps and single runs scatter more than rows differ.
WINDOW = 50
JUDGED_FROM = 101  # first step of the first mean that is compared; before it the loss falls too steeply
MODEL = [
    "model=llama3_debug",
    "model.dim=768",
    "model.num_layers=12",
    "model.num_heads=12",
    "model.num_kv_heads=4",
    "model.ffn_dim=2560",
    "model.vocab_size=8192",
    "model.max_seq_len=1024",
    "tokenizer=sentencepiece",
    "tokenizer.vocab_size=8192",
    "data=files",
    "train.seq_len=1024",
    "train.local_batch=8",
]
LOOP = [
    "optim.lr=6e-4",
    "validation.interval=0",
    "validation.batches=24",
    "checkpoint=none",
    "tracker=none",
    "parallel=single",
    "train.log_every=1",
]


@dataclass(frozen=True)
class Row:
    """Options beside the common ones, and relative tolerances of the curve and of the validation loss."""

    options: list[str]
    curve: float
    validation: float


def _bf16(*options: str) -> Row:
    return Row(list(options), curve=0.005, validation=0.003)


def _rounded(*options: str) -> Row:
    return Row(list(options), curve=0.01, validation=0.005)


_OWN = ["quant.product=own", "quant.fast_accum=true"]
ROWS = {
    "bf16": _bf16("kernels=torch"),
    "kernels": _bf16("kernels=fused"),
    "split-master": _bf16("kernels=fused", "optim.master=split"),
    "tensorwise": _rounded("kernels=fused", "quant=float8_tensorwise"),
    "tensorwise-own": _rounded(
        "kernels=fused",
        "quant=float8_tensorwise",
        "quant.product=own",
        "quant.fast_accum=false",
        "quant.grad_dtype=e4m3",
    ),
    "tensorwise-own-fast": _rounded("kernels=fused", "quant=float8_tensorwise", *_OWN, "quant.grad_dtype=e4m3"),
    "tensorwise-own-fast-e5m2": _rounded("kernels=fused", "quant=float8_tensorwise", *_OWN, "quant.grad_dtype=e5m2"),
    "rowwise": _rounded("kernels=fused", "quant=float8_rowwise"),
    "rowwise-own": _rounded("kernels=fused", "quant=float8_rowwise", "quant.product=own", "quant.fast_accum=false"),
    "rowwise-own-fast": _rounded("kernels=fused", "quant=float8_rowwise", *_OWN),
    "rowwise-own-fast-e5m2": _rounded("kernels=fused", "quant=float8_rowwise", *_OWN, "quant.grad_dtype=e5m2"),
    "rowwise-gw-hp": _rounded("kernels=fused", "quant=float8_rowwise_with_gw_hp"),
    "rowwise-gw-hp-own-fast": _rounded("kernels=fused", "quant=float8_rowwise_with_gw_hp", *_OWN),
    "adamw-bf16": _rounded("kernels=fused", "optim=adamw_bf16"),
    "adamw-8bit": _rounded("kernels=fused", "optim=adamw_8bit"),
}
REFERENCE = "bf16"


def main(arguments: list[str] | None = None) -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="text, .jsonl or .parquet file that is trained on")
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=list(ROWS),
        help=f"names, joined by commas: {', '.join(ROWS)} (default: all)",
    )
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[0],
        help="seeds of weights and sample order, joined by commas (default: 0)",
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time on each device")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no run after so many seconds")
    parser.add_argument("--out", type=Path, required=True, help="path of the results without a suffix")
    parser.add_argument("--add", nargs="*", default=[], metavar="KEY=VALUE", help="overrides on every row")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    path = Path(f"{options.out}.json")
    results = json.loads(path.read_text())["rows"] if path.exists() else {}
    names = [REFERENCE, *(name for name in options.rows if name != REFERENCE)]
    missing = [
        (name, seed)
        for seed in options.seeds
        for name in names
        if "means" not in results.get(name, {}).get("seeds", {}).get(str(seed), {})
    ]
    _run_all(missing, results, options)
    return int(not judge(results, options))


def _run_all(missing: list[tuple[str, int]], results: dict[str, Any], options: argparse.Namespace) -> None:
    """Run rows and seeds, ``options.jobs`` at a time on each GPU, and write the results after each run."""
    free_devices: queue.Queue[int] = queue.Queue()
    devices = range(max(len(machine.gpus()), 1))
    for _ in range(options.jobs):
        for device in devices:
            free_devices.put(device)
    end = time.monotonic() + options.budget_s

    def run_on_free_device(name: str, seed: int) -> dict[str, Any] | None:
        device = free_devices.get()
        try:
            return run(name, seed, device, options) if time.monotonic() < end else None
        finally:
            free_devices.put(device)

    if not missing:
        return
    # One step alone first: it builds the vocabulary and the tokenised text, which runs in parallel would each build.
    preparation = _run(["train.steps=1", "compile=none", *options.add], {}, options, steps=1)
    if "error" in preparation:
        sys.exit(preparation["error"])
    with ThreadPoolExecutor(options.jobs * len(devices)) as pool:
        jobs = {pool.submit(run_on_free_device, name, seed): (name, seed) for name, seed in missing}
        for job in as_completed(jobs):
            name, seed = jobs[job]
            if (result := job.result()) is None:
                print(f"{name}, seed {seed}: left out, no time left", file=sys.stderr)
                continue
            results.setdefault(name, {"options": ROWS[name].options, "seeds": {}})["seeds"][str(seed)] = result
            judge(results, options)


def run(name: str, seed: int, device: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one row; return the mean loss of every ``WINDOW`` steps and the final validation loss (nats a token)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = visible.split(",")[device] if visible else str(device)
    variables = {"CUDA_VISIBLE_DEVICES": chosen} if machine.gpus() else {}
    steps = [f"train.steps={options.steps}", f"schedule.warmup_steps={options.steps // 10}"]
    overrides = [*steps, f"run.seed={seed}", *ROWS[name].options, *options.add]
    return _run(overrides, variables, options, steps=options.steps)


def _run(overrides: list[str], variables: dict[str, str], options: argparse.Namespace, *, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "titanyaml", *MODEL, *LOOP, f"data.paths=[{options.text}]"]
        command += [*overrides, f"run.dir={folder}/run"]
        process = compare.run(command, cwd=Path.cwd(), extra=variables)
        path = Path(folder, "run", "metrics.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    losses = [record["loss"] for record in records if "loss" in record]
    if process.returncode or len(losses) < steps:
        return compare.failure(command, process)
    [validation] = [record["validation_loss"] for record in records if "validation_loss" in record][-1:]
    return {"means": means(losses), "validation": validation}


def means(losses: list[float]) -> list[float]:
    """Mean of every ``WINDOW`` steps; an incomplete last window is dropped."""
    starts = range(0, len(losses) - WINDOW + 1, WINDOW)
    return [round(statistics.fmean(losses[start : start + WINDOW]), 8) for start in starts]


def judge(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> bool:
    """Write the curves and their distances from the reference; return whether all are within tolerance.

    Means over the seeds that both rows have are compared; the scatter of a single seed's distance is shown beside.
    """
    reference = results.get(REFERENCE, {"seeds": {}})["seeds"]
    lines, all_inside = [], True
    for name, result in results.items():
        row = ROWS[name]
        failed = [seed for seed, outcome in result["seeds"].items() if "error" in outcome]
        all_inside &= not failed
        shared = sorted(
            seed
            for seed in result["seeds"]
            if {"means"} <= result["seeds"][seed].keys() & reference.get(seed, {}).keys()
        )
        if not shared:
            lines.append([name, "failed" if failed else "-", *["-"] * 6])
            continue
        runs, reference_runs = ([side[seed] for seed in shared] for side in (result["seeds"], reference))
        curves = list(zip(_mean_curve(runs), _mean_curve(reference_runs), strict=True))
        validations = [a["validation"] / b["validation"] - 1 for a, b in zip(runs, reference_runs, strict=True)]
        distances = [abs(a / b - 1) for a, b in curves]
        result |= {
            "compared": len(shared),
            "curve_distance": max(distances, default=math.nan),
            "validation_distance": statistics.fmean(validations),
            "validation_scatter": statistics.stdev(validations) if len(shared) > 1 else None,
        }
        inside = result["curve_distance"] <= row.curve and abs(result["validation_distance"]) <= row.validation
        all_inside &= inside
        lines.append(
            [
                name,
                str(len(shared)),
                f"{curves[-1][0]:.4f}" if curves else "-",
                f"{result['curve_distance']:.2%} of {row.curve:.1%}"
                + (f" ({JUDGED_FROM + WINDOW * distances.index(max(distances))})" if distances else ""),
                f"{statistics.fmean(run['validation'] for run in runs):.4f}",
                f"{result['validation_distance']:+.2%} of {row.validation:.1%}",
                f"{result['validation_scatter']:.2%}" if len(shared) > 1 else "-",
                "yes" if inside and not failed else "NO",
            ]
        )
    content = {"environment": machine.describe(), "model": MODEL, "loop": LOOP, "steps": options.steps, "rows": results}
    Path(f"{options.out}.json").write_text(json.dumps(content) + "\n")
    head = [
        "row",
        "seeds",
        f"loss, last {WINDOW} steps",
        "furthest mean (its first step)",
        "validation",
        "validation, distance",
        "of one seed, deviation",
        "inside",
    ]
    Path(f"{options.out}.md").write_text(table(head, lines) + "\n")
    return all_inside


def _mean_curve(runs: list[dict[str, Any]]) -> list[float]:
    """Mean over the seeds of each window from ``JUDGED_FROM`` on."""
    compared = [run["means"][(JUDGED_FROM - 1) // WINDOW :] for run in runs]
    return [statistics.fmean(window) for window in zip(*compared, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
