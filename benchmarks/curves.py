"""Loss curves of what changes the arithmetic: recipes, kernels, optimizers, beside bfloat16 with PyTorch's own kernels.

    python benchmarks/curves.py --text corpus.jsonl --seeds 0,1,2 --jobs 4 --out benchmarks/results/curves_h200

One model of 100 million parameters; with one seed a curve differs from the reference by its row's options alone. Judged
are means over 50 steps and over the seeds, since single steps, and single runs, scatter more than any two rows differ.
The tolerances were stated (docs/performance.md) before the first run. Reads ``<out>.json``, adds what is missing there,
and writes it and ``<out>.md``; exit code 1 where a row failed or left its tolerance.
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

#: Steps of one mean, and the first step of the first mean that is judged: before it the loss falls too steeply.
WINDOW, JUDGED_FROM = 50, 101
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
    """Options beside the common ones, and how far the curve and the validation loss may lie from the reference's."""

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
        type=lambda text: [int(one) for one in text.split(",")],
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
    wanted = [
        (name, seed)
        for seed in options.seeds
        for name in names
        if "means" not in results.get(name, {}).get("seeds", {}).get(str(seed), {})
    ]
    _run_all(wanted, results, options)
    return int(not judge(results, options))


def _run_all(wanted: list[tuple[str, int]], results: dict[str, Any], options: argparse.Namespace) -> None:
    """Every wanted row and seed, ``options.jobs`` at a time on each GPU; written after each."""
    places: queue.Queue[int] = queue.Queue()
    devices = range(max(len(machine.gpus()), 1))
    for _ in range(options.jobs):
        for device in devices:
            places.put(device)
    end = time.monotonic() + options.budget_s

    def one(name: str, seed: int) -> dict[str, Any] | None:
        device = places.get()
        try:
            return run(name, seed, device, options) if time.monotonic() < end else None
        finally:
            places.put(device)

    if wanted and "error" in (made := _run(["train.steps=1", "compile=none", *options.add], {}, options, steps=1)):
        sys.exit(made["error"])  # it has made the vocabulary and the tokenised text, which all read
    with ThreadPoolExecutor(options.jobs * len(devices)) as pool:
        jobs = {pool.submit(one, name, seed): (name, seed) for name, seed in wanted}
        for job in as_completed(jobs):
            name, seed = jobs[job]
            if (result := job.result()) is None:
                print(f"{name}, seed {seed}: left out, no time left", file=sys.stderr)
                continue
            results.setdefault(name, {"options": ROWS[name].options, "seeds": {}})["seeds"][str(seed)] = result
            judge(results, options)


def run(name: str, seed: int, device: int, options: argparse.Namespace) -> dict[str, Any]:
    """Mean loss of every ``WINDOW`` steps, and the validation loss at the end (nats a token)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    place = {"CUDA_VISIBLE_DEVICES": visible.split(",")[device] if visible else str(device)} if machine.gpus() else {}
    return _run(
        [
            f"train.steps={options.steps}",
            f"schedule.warmup_steps={options.steps // 10}",
            f"run.seed={seed}",
            *ROWS[name].options,
            *options.add,
        ],
        place,
        options,
        steps=options.steps,
    )


def _run(overrides: list[str], place: dict[str, str], options: argparse.Namespace, *, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "titanyaml",
            *MODEL,
            *LOOP,
            f"data.paths=[{options.text}]",
            *overrides,
            f"run.dir={folder}/run",
        ]
        done = compare.run(command, cwd=Path.cwd(), extra=place)
        path = Path(folder, "run", "metrics.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    losses = [record["loss"] for record in records if "loss" in record]
    if done.returncode or len(losses) < steps:
        return compare.failed(command, done)
    [validation] = [record["validation_loss"] for record in records if "validation_loss" in record][-1:]
    return {"means": means(losses), "validation": validation}


def means(losses: list[float]) -> list[float]:
    """Mean of every ``WINDOW`` steps; an incomplete last window is dropped."""
    starts = range(0, len(losses) - WINDOW + 1, WINDOW)
    return [round(statistics.fmean(losses[start : start + WINDOW]), 8) for start in starts]


def judge(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> bool:
    """Distances from the reference, written with the curves; whether all lie in their tolerance.

    Compared are the means over those seeds that both have; beside them stands the scatter of one seed's distance.
    """
    reference = results.get(REFERENCE, {"seeds": {}})["seeds"]
    lines, good = [], True
    for name, result in results.items():
        row = ROWS[name]
        failed = [seed for seed, one in result["seeds"].items() if "error" in one]
        good &= not failed
        shared = sorted(
            seed
            for seed in result["seeds"]
            if {"means"} <= result["seeds"][seed].keys() & reference.get(seed, {}).keys()
        )
        if not shared:
            lines.append([name, "failed" if failed else "-", *["-"] * 6])
            continue
        ours, theirs = ([side[seed] for seed in shared] for side in (result["seeds"], reference))
        curves = list(zip(_mean_curve(ours), _mean_curve(theirs), strict=True))
        validations = [a["validation"] / b["validation"] - 1 for a, b in zip(ours, theirs, strict=True)]
        far = [abs(a / b - 1) for a, b in curves]
        result |= {
            "compared": len(shared),
            "curve_distance": max(far, default=math.nan),
            "validation_distance": statistics.fmean(validations),
            "validation_scatter": statistics.stdev(validations) if len(shared) > 1 else None,
        }
        inside = result["curve_distance"] <= row.curve and abs(result["validation_distance"]) <= row.validation
        good &= inside
        lines.append(
            [
                name,
                str(len(shared)),
                f"{curves[-1][0]:.4f}" if curves else "-",
                f"{result['curve_distance']:.2%} of {row.curve:.1%}"
                + (f" ({JUDGED_FROM + WINDOW * far.index(max(far))})" if far else ""),
                f"{statistics.fmean(one['validation'] for one in ours):.4f}",
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
    return good


def _mean_curve(runs: list[dict[str, Any]]) -> list[float]:
    """Mean over the seeds of each judged window; the windows before ``JUDGED_FROM`` are not compared."""
    judged = [run["means"][(JUDGED_FROM - 1) // WINDOW :] for run in runs]
    return [statistics.fmean(window) for window in zip(*judged, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
