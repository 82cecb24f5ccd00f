"""Loss curves of what changes the arithmetic: recipes, kernels, optimizers, beside bfloat16 with PyTorch's own kernels.

    python benchmarks/curves.py --text corpus.jsonl --jobs 4 --out benchmarks/results/curves_h200

One model of 100 million parameters, one order of samples, one seed; a curve differs from the reference by its row's
options alone. Judged are means over 50 steps, since single steps scatter more than any two rows differ. The tolerances
were stated (docs/performance.md) before the first run. Writes ``<out>.json`` and ``<out>.md``; exit code 1 where a row
failed or left its tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare

from titanyaml import machine
from titanyaml.runner.bench_report import table

#: Steps of one mean, and the first step of the first mean that is judged: before it the loss falls too steeply.
WINDOW, JUDGED_FROM = 50, 101
MODEL = [
    "model=llama3_debug", "model.dim=768", "model.num_layers=12", "model.num_heads=12", "model.num_kv_heads=4",
    "model.ffn_dim=2560", "model.vocab_size=8192", "model.max_seq_len=1024", "tokenizer=sentencepiece",
    "tokenizer.vocab_size=8192", "data=files", "train.seq_len=1024", "train.local_batch=8",
]
LOOP = ["optim.lr=6e-4", "validation.interval=0", "validation.batches=24",
        "checkpoint=none", "tracker=none", "parallel=single", "train.log_every=1"]


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
    "tensorwise-own": _rounded("kernels=fused", "quant=float8_tensorwise", *_OWN[:1], "quant.grad_dtype=e4m3"),
    "tensorwise-own-fast": _rounded("kernels=fused", "quant=float8_tensorwise", *_OWN, "quant.grad_dtype=e4m3"),
    "tensorwise-own-fast-e5m2": _rounded("kernels=fused", "quant=float8_tensorwise", *_OWN, "quant.grad_dtype=e5m2"),
    "rowwise": _rounded("kernels=fused", "quant=float8_rowwise"),
    "rowwise-own": _rounded("kernels=fused", "quant=float8_rowwise", "quant.product=own"),
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
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS),
                        help=f"names, joined by commas: {', '.join(ROWS)} (default: all)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="rows that run at one time on the device")
    parser.add_argument("--out", type=Path, required=True, help="path of the results without a suffix")
    parser.add_argument("--add", nargs="*", default=[], metavar="KEY=VALUE", help="overrides on every row")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    names = [REFERENCE, *(name for name in options.rows if name != REFERENCE)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        # the first alone: it makes the vocabulary and the tokenised text, which all read
        results[REFERENCE] = run(REFERENCE, options)
        for name, result in zip(names[1:], pool.map(lambda name: run(name, options), names[1:]), strict=True):
            results[name] = result
            judge(results, options)
    return int(not judge(results, options))


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of every step, and the validation loss at the end (nats a token)."""
    row = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "titanyaml", *MODEL, *LOOP, f"data.paths=[{options.text}]",
                   f"train.steps={options.steps}", f"schedule.warmup_steps={options.steps // 10}",
                   *row.options, *options.add, f"run.dir={folder}/run"]
        done = compare.run(command, cwd=Path.cwd(), extra={})
        path = Path(folder, "run", "metrics.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    losses = [record["loss"] for record in records if "loss" in record]
    if done.returncode or len(losses) < options.steps:
        return {"options": row.options, **compare.failed(command, done)}
    [validation] = [record["validation_loss"] for record in records if "validation_loss" in record][-1:]
    return {"options": row.options, "losses": losses, "validation": validation}


def means(losses: list[float]) -> list[float]:
    """Of every ``WINDOW`` steps from ``JUDGED_FROM`` on; an incomplete last one is dropped."""
    starts = range(JUDGED_FROM - 1, len(losses) - WINDOW + 1, WINDOW)
    return [statistics.fmean(losses[start : start + WINDOW]) for start in starts]


def judge(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> bool:
    """Distances from the reference, written with the curves after every row; whether all lie in their tolerance."""
    reference = results[REFERENCE]
    lines, good = [], "error" not in reference
    for name, result in results.items():
        if "error" in result or "error" in reference:
            lines.append([name, "failed", "-", "-", "-", "-"])
            good = False
            continue
        pairs = list(zip(means(result["losses"]), means(reference["losses"]), strict=True))
        result["curve_distance"] = max((abs(a / b - 1) for a, b in pairs), default=math.nan)
        result["validation_distance"] = result["validation"] / reference["validation"] - 1
        row = ROWS[name]
        inside = result["curve_distance"] <= row.curve and abs(result["validation_distance"]) <= row.validation
        good &= inside
        last = f"{pairs[-1][0]:.4f}" if pairs else "-"
        lines.append([name, last, f"{result['curve_distance']:.2%} of {row.curve:.1%}", f"{result['validation']:.4f}",
                      f"{result['validation_distance']:+.2%} of {row.validation:.1%}",
                      "yes" if inside else "NO"])
    content = {"environment": machine.describe(), "model": MODEL, "loop": LOOP, "steps": options.steps, "rows": results}
    Path(f"{options.out}.json").write_text(json.dumps(content) + "\n")
    head = ["row", f"loss, last {WINDOW} steps", "furthest mean", "validation", "validation, distance", "inside"]
    Path(f"{options.out}.md").write_text(table(head, lines) + "\n")
    return good


if __name__ == "__main__":
    sys.exit(main())
