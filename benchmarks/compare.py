"""Speed and memory of titanyaml and, with a checkout, of torchtitan: the same rows, one after the other on one GPU.

    python benchmarks/compare.py --torchtitan ../torchtitan --out benchmarks/results/h200
    python benchmarks/compare.py --rows debug --out /tmp/dry     # a dry run: any machine, seconds

Writes ``<out>.json`` and ``<out>.md``. A side that fails is recorded with the end of its output; the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanyaml import machine
from titanyaml.launch.local import free_port
from titanyaml.runner.bench_report import table

HERE = Path(__file__).resolve().parent
# Each side starts in a new process, which leaves the device idle for 20 s and more: both begin at about the same
# temperature, so that the order of the sides does not matter.
SKIPPED_STEPS, MEASURED_STEPS = 5, 12
#: A line of torchtitan's log.
STEP = re.compile(r"step:\s*(\d+)\s+loss:\s*([\d.]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")

_3B = ["model=llama3_3b", "model.tie_embeddings=false", "train.local_batch=4", "train.seq_len=4096"]
_3B_PEER = ["--model.flavor=3B", "--training.local_batch_size=4", "--training.seq_len=4096"]
_8B = ["model=llama3_8b", "train.local_batch=1", "train.seq_len=8192"]
_8B_PEER = ["--model.flavor=8B", "--training.local_batch_size=1", "--training.seq_len=8192"]
_NO_RECOMPUTE = ["--activation_checkpoint.mode=none"]
_SELECTIVE = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]


def _float8(recipe: str) -> list[str]:
    return [
        "--model.converters=quantize.linear.float8",
        f"--quantize.linear.float8.recipe_name={recipe}",
        "--quantize.linear.float8.filter_fqns=output",
    ]


@dataclass(frozen=True)
class Row:
    """The same work for both sides: our overrides, and torchtitan's options (None: it cannot do this work)."""

    ours: list[str]
    peer: list[str] | None


#: Our float8 casts and GEMMs.
_OWN_FLOAT8 = ["quant.product=own", "quant.fast_accum=true", "optim.master=split"]
# Float8 weights kept for the backward pass take a byte a parameter; split masters give two back.
_KEPT_WEIGHTS = [*_OWN_FLOAT8, "quant.force_recompute_weight=false"]
#: Each side recomputes the least that fits its memory.
ROWS = {
    "3b-bf16": Row([*_3B, "ac=none"], [*_3B_PEER, *_NO_RECOMPUTE]),
    "3b-bf16-69gib": Row(
        [*_3B, "ac=memory_budget", "ac.budget=0.8", "optim.master=split", "loss.chunk_tokens=1536"],
        [*_3B_PEER, *_SELECTIVE],
    ),
    "3b-float8-rowwise": Row(
        [*_3B, "ac=none", "quant=float8_rowwise", *_KEPT_WEIGHTS], [*_3B_PEER, *_NO_RECOMPUTE, *_float8("rowwise")]
    ),
    "3b-float8-tensorwise": Row(
        [*_3B, "ac=none", "quant=float8_tensorwise", *_KEPT_WEIGHTS],
        [*_3B_PEER, *_NO_RECOMPUTE, *_float8("tensorwise")],
    ),
    "8b-bf16": Row([*_8B, "ac=memory_budget", "ac.budget=0.8", "optim.master=split"], [*_8B_PEER, *_SELECTIVE]),
    "8b-float8-rowwise": Row(
        [*_8B, "ac=none", "quant=float8_rowwise", *_OWN_FLOAT8], [*_8B_PEER, *_SELECTIVE, *_float8("rowwise")]
    ),
    "8b-float8-tensorwise": Row(
        [*_8B, "ac=none", "quant=float8_tensorwise", *_OWN_FLOAT8], [*_8B_PEER, *_SELECTIVE, *_float8("tensorwise")]
    ),
    "debug": Row(
        [
            "model=llama3_debug",
            "model.dim=32",
            "model.ffn_dim=64",
            "model.vocab_size=258",
            "tokenizer=bytes",
            "train.seq_len=64",
            "compile=none",
        ],
        ["--model.flavor=debugmodel"],
    ),
}
#: Overrides of all our rows. Compilation needs none: it is the default on a GPU.
COMMON = [
    "runner=bench",
    "parallel=single",
    f"runner.skipped_steps={SKIPPED_STEPS}",
    f"runner.measured_steps={MEASURED_STEPS}",
]
COMMON_PEER = [
    "--model.name=llama3",
    "--compile.enable",
    "--metrics.log_freq=1",
    "--metrics.disable_color_printing",
    "--training.dataset=c4_test",
    "--experimental.custom_import=torchtitan_sizes",
]


def main(arguments: list[str] | None = None) -> int:
    """Run the rows; return 1 if a side failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = [name for name in ROWS if name != "debug"]
    parser.add_argument(
        "--rows",
        type=lambda text: text.split(","),
        default=default,
        help=f"names, joined by commas: {', '.join(ROWS)} (default: all but debug)",
    )
    parser.add_argument("--torchtitan", type=Path, help="checkout of torchtitan 0.2.2; without it ours runs alone")
    parser.add_argument("--out", type=Path, required=True, help="path of the results without a suffix")
    parser.add_argument("--add", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of ours, on every row")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for name in options.rows:
        results[name] = compare(ROWS[name], options)
        write(results, options)
    return int(any("error" in side for row in results.values() for side in row.values() if isinstance(side, dict)))


def compare(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides of a row; ``ratio`` is our tokens/s over torchtitan's."""
    sides: dict[str, Any] = {"ours": run_ours(row, options.add)}
    if options.torchtitan is not None and row.peer is not None:
        sides["torchtitan"] = run_peer(row, options.torchtitan.resolve())
    rates = [side.get("tps") for side in sides.values()]
    return {**sides, "ratio": rates[0] / rates[1] if len(rates) == 2 and all(rates) else None}


def run_ours(
    row: Row,
    more: list[str],
    *,
    common: list[str] | None = None,
    limit_s: float | None = None,
    program: tuple[str, ...] = ("-m", "titanyaml"),
    variables: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run our side; return bench.json, the first losses, and each plugin's summaries before and after the first step.

    Args:
        common: overrides in place of ``COMMON``.
        limit_s: seconds after which the run is killed and counts as failed.
        program: Python's arguments before the overrides.
        variables: environment variables to add.
    """
    common = COMMON if common is None else common
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *program, *common, *row.ours, *more, f"run.dir={folder}/run"]
        process = run(command, cwd=HERE.parent, extra=variables or {}, limit_s=limit_s)
        run_dir = Path(folder, "run")
        if process.returncode or not (run_dir / "bench.json").is_file():
            return failure(command, process)
        plugins = {
            record["node"]: [record["summary"], record.get("verified", {}).get("summary")]
            for record in json.loads((run_dir / "pipeline.json").read_text())
            if "summary" in record
        }
        losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()[:10]]
        return {
            "command": command[1:-1],
            "first_losses": losses,
            "plugins": plugins,
            **json.loads((run_dir / "bench.json").read_text()),
        }


def run_peer(
    row: Row,
    checkout: Path,
    *,
    ranks: int = 1,
    skipped: int = SKIPPED_STEPS,
    measured: int = MEASURED_STEPS,
    limit_s: float | None = None,
) -> dict[str, Any]:
    """Run torchtitan; return the figures of its log: median speed of the measured steps, largest memory.

    Args:
        ranks: processes on this host; several are started by torchrun.
        skipped, measured: numbers of steps.
        limit_s: see ``run_ours``.
    """
    # HERE is on the path for torchtitan_sizes.py, which torchtitan imports
    search_path = [str(checkout), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(search_path)}
    program = ["-m", "torchtitan.train", *COMMON_PEER, *row.peer, f"--training.steps={skipped + measured}"]
    with free_port() as port:  # two comparisons may run at the same time, on a GPU each
        if ranks == 1:
            variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        else:
            torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
            torchrun += ["--local-addr=127.0.0.1", "--master-addr=127.0.0.1", f"--master-port={port}"]
            program = [*torchrun, "--local-ranks-filter=0", *program]  # the log of rank 0 alone is read
        command = [sys.executable, *program]
        process = run(command, cwd=checkout, extra=variables, limit_s=limit_s)
    steps = STEP.findall(process.stdout + process.stderr)
    rates = [float(tps.replace(",", "")) for number, _, _, tps in steps if int(number) > skipped]
    if process.returncode or len(rates) < measured:
        return failure(command, process)
    tps = statistics.median(rates)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True)
    return {
        "command": command[1:],
        "commit": git.stdout.strip() or None,
        "tps": tps,
        "tps_spread": (max(rates) - min(rates)) / tps,
        "loss": float(steps[-1][1]),
        "mem_reserved_gib": max(float(memory) for _, _, memory, _ in steps),
    }


def run(
    command: list[str], *, cwd: Path, extra: dict[str, str], limit_s: float | None = None
) -> subprocess.CompletedProcess:
    """Run a command; after ``limit_s`` seconds kill it and all processes that it started."""
    print(" ".join(command[1:]), file=sys.stderr, flush=True)
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, **extra}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the whole session: ranks would go on and hold the GPU
        out, err = process.communicate()
        err += f"\nkilled after {limit_s:.0f} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def failure(command: list[str], process: subprocess.CompletedProcess) -> dict[str, Any]:
    """The record of a side that failed: its command and the end of its output."""
    lines = (process.stderr or process.stdout).strip().splitlines()
    return {"command": command[1:], "error": f"exit code {process.returncode}: " + "\n".join(lines[-15:])}


def write(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Write both files."""
    # after every row, so that an interrupted comparison keeps its finished rows
    content = {
        "environment": machine.describe(),
        "skipped_steps": SKIPPED_STEPS,
        "measured_steps": MEASURED_STEPS,
        "rows": results,
    }
    Path(f"{options.out}.json").write_text(json.dumps(content, indent=1) + "\n")
    rows = []
    for name, row in results.items():
        ours, peer = row["ours"], row.get("torchtitan", {})
        rows.append(
            [
                name,
                rate(ours),
                rate(peer),
                show(row["ratio"], ".3f"),
                show(ours.get("mfu"), ".1%"),
                show(ours.get("fraction_of_floor"), ".1%"),
                show(ours.get("mem_reserved_gib"), ".1f"),
                show(peer.get("mem_reserved_gib"), ".1f"),
            ]
        )
    head = [
        "row",
        "ours, tokens/s",
        "torchtitan, tokens/s",
        "ratio",
        "our MFU",
        "our share of the floor",
        "our GiB",
        "torchtitan's GiB",
    ]
    devices = ", ".join(machine.gpus()) or machine.processor()
    Path(f"{options.out}.md").write_text(
        f"Median of {MEASURED_STEPS} steps after {SKIPPED_STEPS}, one device ({devices}); memory = peak reserved.\n\n"
        f"{table(head, rows)}\n"
    )


def rate(side: dict[str, Any]) -> str:
    if not side:
        return "not run"
    return "failed" if "error" in side else f"{side['tps']:,.0f} +- {side['tps_spread'] / 2:.1%}"


def show(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


if __name__ == "__main__":
    sys.exit(main())
