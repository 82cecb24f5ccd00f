"""A benchmark's report: who measured what on which machine, and everything that is needed to repeat it."""

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
    """The report in Markdown; ``result`` is the content of bench.json."""
    overrides = yaml.safe_load((run.path / "overrides.yaml").read_text())["overrides"]
    # in full: the command alone means something else with the next version's defaults
    resolved = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    sections = {
        "Who": config.runner.entity,
        "Model": _model(config, result),
        "Hardware and interconnect": _machine(config, result),
        "Result": _result(result),
        "Where the time goes": _kernels(result["kernels"]),
        "What the device can do": _ceilings(result["ceilings"]),
        "Versions and dates": _versions(result),
        "Notes": config.runner.notes or "none",
        "Command": f"    python -m titanyaml {shlex.join(overrides)}",
        "Configuration": f"SHA-256 {result['config_hash']}\n\n```yaml\n{resolved}```",
    }
    title = f"# {config.model.name} on {result['devices']} x {result['hardware']}"
    return "\n\n".join([title, *(f"## {name}\n\n{body}" for name, body in sections.items())]) + "\n"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; None is shown as unknown."""
    # what is not known is said so: a zero or a gap would be read as a figure
    lines = [["unknown" if cell is None else str(cell) for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _model(config: Config, result: dict[str, Any]) -> str:
    size = f"{config.model.name}, {result['parameters']:,} parameters"
    batch = f"sequences of {config.train.seq_len:,} tokens, {config.train.local_batch} per device and forward"
    step = f"{result['tokens_per_step']:,} tokens a step"
    return f"{size}; {batch}, {step}; {result['flops_per_token'] / 1e9:,.2f} GFLOP per token"


def _machine(config: Config, result: dict[str, Any]) -> str:
    devices = result["devices"]
    linked = config.runner.interconnect or ("one device" if devices == 1 else "not stated (runner.interconnect)")
    mesh = ", ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1) or "one rank"
    name = result["environment"]["device"]
    return f"{devices} x {name} ({result['hardware']}); interconnect: {linked}; mesh: {mesh}"


def _shown(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)


def _result(result: dict[str, Any]) -> str:
    flops = "tokens/s * (6*(parameters - input embedding) + 12*layers*heads*head_dim*seq)"
    peak = _shown(result["peak_tflops"], "g") or "unknown"
    floor = result["floor_note"] or f"floor of this device, linear layers in {result['precision']}"
    rows: list[list[Any]] = [
        ["tokens/s per device", f"{result['tps']:,.1f}", f"by the median of {len(result['steps_s'])} steps"],
        ["step", f"{1e3 * result['step_s']:,.2f} ms", "median"],
        ["spread", f"{result['tps_spread']:.2%}", "(slowest - fastest step) / median"],
        ["TFLOP/s per device", f"{result['tflops']:,.2f}", flops],
        ["MFU", _shown(result["mfu"], ".2%"), f"over the peak of {peak} TFLOP/s"],
        ["fraction of the floor", _shown(result["fraction_of_floor"], ".2%"), floor],
        ["memory reserved", _shown(result["mem_reserved_gib"], ",.2f"), "peak GiB"],
        ["memory active", _shown(result["mem_active_gib"], ",.2f"), "peak GiB"],
        ["wait for data", f"{1e3 * result['data_wait_s']:.2f} ms", "median of a step"],
        ["loss", f"{result['loss']:.4f}", "of the last measured step"],
    ]
    return table(["figure", "value", "meaning"], rows)


def _kernels(kernels: dict[str, Any] | None) -> str:
    if kernels is None:
        return "not profiled (runner.profiled_steps=0)"
    rows = [[kind, f"{ms:,.2f}", f"{ms / kernels['step_ms']:.1%}"] for kind, ms in kernels["ms"].items()]
    note = f"Under the profiler, where a step took {kernels['step_ms']:,.2f} ms."
    return f"{note}\n\n{table(['class', 'ms a step', 'share'], rows)}"


def _ceilings(ceilings: dict[str, Any]) -> str:
    gemm_rows = []
    for row in ceilings["gemm"]:
        shape = f"{row['tokens']} x {row['inputs']} x {row['outputs']}"
        for precision, ms in row["ms"].items():
            passes = [f"{pass_ms:.3f}" for pass_ms in ms.values()]
            gemm_rows.append([shape, row["layers"], precision, *passes, f"{row['tflops'][precision]:,.2f}"])
    gemm_head = ["tokens x in x out", "layers", "precision", "forward ms", "dgrad ms", "wgrad ms", "TFLOP/s"]
    attention = ceilings["attention"]["ms"].items()
    attention_rows = [[name, f"{ms['forward']:.3f}", f"{ms['backward']:.3f}"] for name, ms in attention]
    copy, adamw = ceilings["copy_tb_s"], ceilings["adamw"]["ns_per_parameter"]
    parts = ("linear", "head", "attention", "optimizer", "step")
    floor_rows = [[kind, *(f"{ms[part]:,.2f}" for part in parts)] for kind, ms in ceilings["floor_ms"].items()]
    sections = [
        table(gemm_head, gemm_rows),
        table(["attention", "forward ms", "backward ms"], attention_rows),
        f"Copy {copy:.3f} TB/s (read and written); AdamW {adamw:.4f} ns per parameter.",
        table(["floor", *(f"{part} ms" for part in parts)], floor_rows),
    ]
    return "\n\n".join(sections)


def _versions(result: dict[str, Any]) -> str:
    environment = result["environment"]
    libraries = {"CUDA": environment["cuda"], "cuDNN": environment["cudnn"]}
    versions = {"python": environment["python"], **environment["packages"], **libraries}
    rows = [[name, version] for name, version in versions.items() if version is not None]
    git = environment["git"]
    code = "no git repository" if git is None else f"{git['commit']}{', with changes' if git['dirty'] else ''}"
    return f"Measured {result['date']}; working directory at {code}.\n\n{table(['package', 'version'], rows)}"
