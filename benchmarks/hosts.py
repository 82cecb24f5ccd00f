"""Meshes of one host's GPUs: speed of each, beside torchtitan's where that is at hand, and what must hold on them.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python benchmarks/hosts.py --out benchmarks/results/h200x2
    python benchmarks/hosts.py --list                                   # rows of this host, with expected seconds
    python benchmarks/hosts.py --rows 'cp2-*,tp2*' --budget-s 550 --out benchmarks/results/h200x2
    python benchmarks/hosts.py --debug --rows fsdp2,cp2-ring,kill --out /tmp/dry      # any machine

``<out>.json`` is written after every row and read again by the next call, which adds its rows; ``<out>.md`` is the
table. Rows that the budget has no room for are named and left out. 1 where a row failed or a check does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import compare
import hosts_checks
import hosts_rows
from hosts_rows import Work

from titanyaml import machine
from titanyaml.launch.local import free_port
from titanyaml.runner.bench_report import table

#: Expected seconds of what is no speed row. All are limits times three: beyond, a run is killed and has failed.
CHECKS = {"operators": 60, "kill": 60, "parity-float64": 85, "parity-bfloat16": 85}


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="*", help="names or patterns, joined by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--out", type=Path, help="path of the results without a suffix")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end before so many seconds")
    parser.add_argument("--ranks", type=int, default=len(machine.gpus()) or 2, help="GPUs to use (default: all)")
    parser.add_argument("--torchtitan", type=Path, help="checkout of torchtitan 0.2.2; without it ours runs alone")
    parser.add_argument("--add", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of ours, on speed rows")
    parser.add_argument("--one-rank", action="store_true", help="rank 0 of each speed row by itself: see one_rank.py")
    parser.add_argument("--debug", action="store_true", help="a tiny model: a dry run")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if options.ranks < 2 or options.ranks % 2:
        parser.error(f"--ranks is {options.ranks}; allowed: even numbers from 2 on")
    if options.torchtitan is not None and not (options.torchtitan / "torchtitan").is_dir():
        parser.error(f"--torchtitan is {options.torchtitan}, which holds no checkout of torchtitan")
    expected_s = {name: work.expected_s for name, work in hosts_rows.rows(options.ranks).items()} | CHECKS
    matched = {pattern: [name for name in expected_s if fnmatch(name, pattern)] for pattern in options.rows.split(",")}
    if absent := [pattern for pattern, names in matched.items() if not names]:
        parser.error(f"no row is called {', '.join(absent)}; --list names them")
    chosen = list(dict.fromkeys(name for names in matched.values() for name in names))
    if options.list:
        print("\n".join(f"{name:28} {expected_s[name]:4} s" for name in chosen))
        return 0
    if options.out is None:
        parser.error("--out is missing")
    results = _earlier(options)
    remaining_s = lambda: options.budget_s - (time.monotonic() - started)  # noqa: E731
    for name in chosen:
        if not options.debug and expected_s[name] > remaining_s():
            print(f"{name}: left out, {expected_s[name]} s expected and {remaining_s():.0f} s left", file=sys.stderr)
            continue
        limit_s = min(3 * expected_s[name], max(remaining_s(), 1.0))
        began = time.monotonic()
        results["rows"][name] = _one(name, options, limit_s, remaining_s) | {"wall_s": time.monotonic() - began}
        write(results, options)
        print(f"{name}: {_short(results['rows'][name])}", file=sys.stderr, flush=True)
    return int(any(not _good(results["rows"][name]) for name in chosen if name in results["rows"]))


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """What a call before has written, with this machine's topology."""
    path = Path(f"{options.out}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    return {"environment": machine.describe(), "topology": topology(), "steps": list(_steps(options)), "rows": rows}


def _steps(options: argparse.Namespace) -> tuple[int, int]:
    """Steps that are skipped and measured, where a row does not say otherwise."""
    return (1, 2) if options.debug else (hosts_rows.SKIPPED, hosts_rows.MEASURED)


def topology() -> dict[str, Any]:
    """The links between the GPUs and the libraries that use them."""
    import torch

    try:
        matrix = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        matrix = f"unknown: {error}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    print(matrix, f"NCCL {nccl}", file=sys.stderr)
    return {"matrix": matrix, "nccl": nccl}


def _one(name: str, options: argparse.Namespace, limit_s: float, remaining_s: Callable[[], float]) -> dict[str, Any]:
    if name not in CHECKS:
        return _speed(hosts_rows.rows(options.ranks)[name], options, limit_s, remaining_s)
    if options.one_rank:
        return {"left_out": "takes several ranks"}
    with tempfile.TemporaryDirectory() as folder:
        return _check(name, options, Path(folder), limit_s)


def _check(name: str, options: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, Any]:
    more = hosts_rows.SMALL if options.debug else []
    if name == "kill":
        return hosts_checks.kill(folder, limit_s=limit_s, more=more)
    if name.startswith("parity-"):
        only = ["fsdp2", "cp2-allgather"] if options.debug else None
        return hosts_checks.parity(
            options.ranks, folder, dtype=name.removeprefix("parity-"), limit_s=limit_s, only=only, more=more
        )
    return _operators(options, folder, limit_s)


def _operators(options: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, Any]:
    """``async_tp_ops.py`` on 2 ranks, and on all."""
    reports: dict[str, Any] = {"ok": True}
    for ranks in sorted({2, options.ranks}):
        out = folder / f"{ranks}.json"
        with free_port() as port:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=1",
                f"--nproc-per-node={ranks}",
                "--local-addr=127.0.0.1",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                str(compare.HERE / "async_tp_ops.py"),
                str(out),
                *["--debug"] * options.debug,
            ]
            process = compare.run(command, cwd=compare.HERE.parent, extra={}, limit_s=limit_s)
        reports |= (
            {f"tp{ranks}": json.loads(out.read_text())}
            if not process.returncode and out.exists()
            else {f"tp{ranks}": compare.failure(command, process), "ok": False}
        )
    return reports


def _speed(work: Work, options: argparse.Namespace, limit_s: float, remaining_s: Callable[[], float]) -> dict[str, Any]:
    """Both sides of a row, as compare.py has them."""
    if options.debug and work.compiled:
        return {"left_out": "works in compiled graphs of a GPU"}
    if options.one_rank and work.compiled:
        return {"left_out": "reads the memory of its peers"}
    if options.one_rank and any(override.startswith("parallel.pp_") for override in work.ours):
        return {"left_out": "its ranks wait for each other"}
    program = (str(compare.HERE / "one_rank.py"), str(work.ranks)) if options.one_rank else ("-m", "titanyaml")
    skipped, measured = _steps(options) if options.debug else work.steps
    common = [
        "runner=bench",
        *hosts_rows.MODEL,
        f"runner.skipped_steps={skipped}",
        f"runner.measured_steps={measured}",
        f"runner.profiled_steps={0 if options.debug else hosts_rows.PROFILED}",
    ]
    more = [*options.add, *(_small(work) if options.debug else [])]
    if options.one_rank and "tp" in "".join(work.ours):
        # ids of which rank 0 has the embeddings: of others it would get zeros, whose norm's gradient has no bound
        more += ["data=stdlib", "data.max_files=100"]
    row = compare.Row(work.ours, work.peer)
    sides: dict[str, Any] = {
        "ours": compare.run_ours(row, more, common=common, limit_s=limit_s, program=program, variables=work.variables)
    }
    has_peer = options.torchtitan is not None and not options.one_rank and work.peer is not None
    if has_peer and remaining_s() > work.expected_s:
        sides["torchtitan"] = compare.run_peer(
            row,
            options.torchtitan.resolve(),
            ranks=work.ranks,
            skipped=skipped,
            measured=measured,
            limit_s=min(limit_s, remaining_s()),
        )
    rates = [side.get("tps") for side in sides.values()]
    sides["ratio"] = rates[0] / rates[1] if len(rates) == 2 and all(rates) else None
    return sides


def _small(work: Work) -> list[str]:
    """The dry run's changes of a row; its batch where a pipeline needs several."""
    emulated = ["quant.emulate=true", "quant.product=torchao", "quant.fast_accum=null"]
    float8 = emulated if any(override.startswith("quant=") for override in work.ours) else []
    batch = ["train.global_batch=8"] if any("pp2" in override for override in work.ours) else []
    return [*hosts_rows.DEBUG, *float8, *batch]


def _good(row: dict[str, Any]) -> bool:
    return row.get("ok", True) and not any("error" in side for side in row.values() if isinstance(side, dict))


def _short(row: dict[str, Any]) -> str:
    if "ours" not in row:
        return row.get("left_out") or ("holds" if _good(row) else "DOES NOT HOLD")
    ours = row["ours"]
    return ours.get("error") or f"{ours['tps']:,.0f} tokens/s per GPU, {row['wall_s']:.0f} s"


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Both files."""
    Path(f"{options.out}.json").write_text(json.dumps(results, indent=1) + "\n")
    speeds, checks = [], []
    for name, row in results["rows"].items():
        if "ours" not in row:
            checks.append([name, _short(row)])
            continue
        ours, peer = row["ours"], row.get("torchtitan", {})
        kernels = (ours.get("kernels") or {}).get("ms", {})
        figures = (
            (row["ratio"], ".3f"),
            (ours.get("mem_reserved_gib"), ".1f"),
            *((kernels.get(kind), ".1f") for kind in ("exposed_communication", "idle")),
        )
        speeds.append(
            [
                name,
                compare.rate(ours),
                compare.rate(peer),
                *(compare.show(*figure) for figure in figures),
                (ours.get("plugins", {}).get("async_tp") or ["", ""])[1] or "",
            ]
        )
    head = [
        "row",
        "ours, tokens/s per GPU",
        "torchtitan",
        "ratio",
        "GiB",
        "exposed communication, ms",
        "idle, ms",
        "async TP",
    ]
    devices = ", ".join(machine.gpus()) or machine.processor()
    Path(f"{options.out}.md").write_text(
        f"{devices}; median of {results['steps'][1]} steps after {results['steps'][0]}; memory = peak reserved.\n\n"
        f"{table(head, speeds)}\n\n{table(['check', 'result'], checks)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
