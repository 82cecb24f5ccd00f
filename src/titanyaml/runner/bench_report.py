"""A benchmark's report: who measured what on which machine, with everything that is needed to do it again."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import yaml

from titanyaml.config.schema import Config
from titanyaml.rundir import RunDir


def file_name(result: dict[str, Any], *, entity: str) -> str:
    """``<model>_<hardware>_<yyyymm>_<entity>.md``."""
    return f"{result['model']}_{result['hardware']}_{result['date'][:7].replace('-', '')}_{entity}.md"


def text(config: Config, run: RunDir, result: dict[str, Any]) -> str:
    """The report in Markdown.

    Args:
        result: the content of bench.json.
    """
    typed = yaml.safe_load((run.path / "overrides.yaml").read_text())["overrides"]
    sections = {
        "Who": config.runner.entity,
        "Model": f"{config.model.name}, {result['parameters']:,} parameters; sequences of {config.train.seq_len:,} "
        f"tokens, {config.train.local_batch} per device and forward, {result['tokens_per_step']:,} tokens a "
        f"step; {result['flops_per_token'] / 1e9:,.2f} GFLOP per token",
        "Hardware and interconnect": _machine(config, result),
        "Result": _result(result),
        "Where the time goes": _kernels(result["kernels"]),
        "What the device can do": _ceilings(result["ceilings"]),
        "Versions and dates": _versions(result),
        "Notes": config.runner.notes or "none",
        "Command": f"    python -m titanyaml {shlex.join(typed)}",
        "Configuration": f"SHA-256 {result['config_hash']}\n\n```yaml\n"
        f"{yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)}```",
    }
    title = f"# {config.model.name} on {result['devices']} x {result['hardware']}"
    return "\n\n".join([title, *(f"## {name}\n\n{body}" for name, body in sections.items())]) + "\n"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; None is shown as unknown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join("unknown" if cell is None else str(cell) for cell in row) + " |" for row in lines
    )


def _machine(config: Config, result: dict[str, Any]) -> str:
    devices = result["devices"]
    linked = config.runner.interconnect or ("one device" if devices == 1 else "not stated (runner.interconnect)")
    mesh = ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1) or "one rank"
    name = result["environment"]["device"]
    return f"{devices} x {name} ({result['hardware']}); interconnect: {linked}; mesh: {mesh}"


def _shown(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _result(result: dict[str, Any]) -> str:
    steps = len(result["steps_s"])
    return table(
        ["figure", "value", "meaning"],
        [
            ["tokens/s per device", f"{result['tps']:,.1f}", f"by the median of {steps} steps"],
            ["step", f"{1e3 * result['step_s']:,.2f} ms", "median"],
            ["spread", f"{result['tps_spread']:.2%}", "(slowest - fastest step) / median"],
            [
                "TFLOP/s per device",
                f"{result['tflops']:,.2f}",
                "tokens/s * (6*(parameters - input embedding) + 12*layers*heads*head_dim*seq)",
            ],
            [
                "MFU",
                _shown(result["mfu"], ".2%"),
                f"over the peak of {_shown(result['peak_tflops'], 'g') or 'unknown'} TFLOP/s",
            ],
            [
                "fraction of the floor",
                _shown(result["fraction_of_floor"], ".2%"),
                result["floor_note"] or f"floor of this device, linear layers in {result['precision']}",
            ],
            ["memory reserved", _shown(result["mem_reserved_gib"], ",.2f"), "peak GiB"],
            ["memory active", _shown(result["mem_active_gib"], ",.2f"), "peak GiB"],
            ["wait for data", f"{1e3 * result['data_wait_s']:.2f} ms", "median of a step"],
            ["loss", f"{result['loss']:.4f}", "of the last measured step"],
        ],
    )


def _kernels(kernels: dict[str, Any] | None) -> str:
    if kernels is None:
        return "not profiled (runner.profiled_steps=0)"
    rows = [[kind, f"{ms:,.2f}", f"{ms / kernels['step_ms']:.1%}"] for kind, ms in kernels["ms"].items()]
    note = f"Under the profiler, where a step took {kernels['step_ms']:,.2f} ms."
    return f"{note}\n\n{table(['class', 'ms a step', 'share'], rows)}"


def _ceilings(ceilings: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['tokens']} x {row['inputs']} x {row['outputs']}",
            row["layers"],
            kind,
            *(f"{ms:.3f}" for ms in times.values()),
            f"{row['tflops'][kind]:,.2f}",
        ]
        for row in ceilings["gemm"]
        for kind, times in row["ms"].items()
    ]
    head = ["tokens x in x out", "layers", "precision", "forward ms", "dgrad ms", "wgrad ms", "TFLOP/s"]
    products = table(head, rows)
    attention = table(
        ["attention", "forward ms", "backward ms"],
        [[name, f"{ms['forward']:.3f}", f"{ms['backward']:.3f}"] for name, ms in ceilings["attention"]["ms"].items()],
    )
    floors = table(
        ["floor", "linear ms", "head ms", "attention ms", "optimizer ms", "step ms"],
        [
            [kind, *(f"{parts[name]:,.2f}" for name in ("linear", "head", "attention", "optimizer", "step"))]
            for kind, parts in ceilings["floor_ms"].items()
        ],
    )
    rest = (
        f"Copy {ceilings['copy_tb_s']:.3f} TB/s (read and written); AdamW "
        f"{ceilings['adamw']['ns_per_parameter']:.4f} ns per parameter."
    )
    return "\n\n".join([products, attention, rest, floors])


def _versions(result: dict[str, Any]) -> str:
    found = result["environment"]
    versions = {"python": found["python"], **found["packages"], "CUDA": found["cuda"], "cuDNN": found["cudnn"]}
    rows = [[name, version] for name, version in versions.items() if version is not None]
    git = found["git"]
    code = "no git repository" if git is None else f"{git['commit']}{', with changes' if git['dirty'] else ''}"
    return f"Measured {result['date']}; working directory at {code}.\n\n{table(['package', 'version'], rows)}"
