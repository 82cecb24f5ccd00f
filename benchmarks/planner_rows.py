"""Published rows against the planner: the tables of docs/planner.md, its scatter plot, and what tests/planner asserts.

    python benchmarks/planner_rows.py            print the tables
    python benchmarks/planner_rows.py --write    and write them, with the plot, into docs/

``published_throughput.csv`` holds what the sources state, ``measured_torchtitan_h200.csv`` what torchtitan 0.2.2
reached on one and two H200, ``measured_titanyaml_h200.csv`` what this project did: a line there is what was typed,
tokens/s and GiB reserved, and needs nothing else. What a source leaves unsaid is said in ``_READINGS``, by source:
nothing is chosen row by row.
"""

from __future__ import annotations

import argparse
import csv
import functools
import html
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from titanyaml.config import dump, schema
from titanyaml.config.hydra import compose_hook, store
from titanyaml.config.hydra.composition_report import compose_report
from titanyaml.config.schema_keys import keys_of
from titanyaml.planner.model import devices, from_config, memory, memory_of_kept, step
from titanyaml.planner.model.inputs import Job, Mesh, Software
from titanyaml.planner.model.shape import Shape

HERE = Path(__file__).parent

SHAPES = {
    "Llama 3.1 8B": Shape("8B", 128256, 4096, 32, 32, 8, 128, 14336),
    "Llama 3 8B": Shape("8B", 128256, 4096, 32, 32, 8, 128, 14336),
    "8B": Shape("8B", 128256, 4096, 32, 32, 8, 128, 14336),
    "3B": Shape("3B", 128256, 3072, 28, 24, 8, 128, 8192),
    "Llama 3.1 70B": Shape("70B", 128256, 8192, 80, 64, 8, 128, 28672),
    "Llama 3.1 405B": Shape("405B", 128256, 16384, 126, 128, 8, 128, 53248),
    **{
        f"MPT {name}": Shape(
            name, 50368, dim, layers, heads, heads, dim // heads, 4 * dim, tied=True, gated=False, rotary=False
        )
        for name, dim, layers, heads in (
            ("1B", 2048, 24, 16),
            ("3B", 2560, 32, 20),
            ("7B", 4096, 32, 32),
            ("13B", 5120, 40, 40),
            ("30B", 7168, 48, 56),
            ("70B", 8192, 80, 64),
        )
    },
}

_TITAN = Software(
    "torchtitan 2024-12",
    loss="plain",
    optimizer_bytes=80.0,
    attention="flash",
    keeps_even=False,
    keeps_scattered=True,
    gathers_float8=True,
    root_copies=4.0,
    weights="autocast",
    reduces_each=False,
    fused_norms=False,
)


@dataclass(frozen=True)
class Reading:
    """What a source does not say: its GPU among conf/hardware, and its software."""

    group: str
    hardware: str
    software: Software


_READINGS = {
    "torchtitan benchmarks 2024-12": Reading("torchtitan", "h100_500w", _TITAN),
    "torchtitan benchmarks asyncTP 2025-06": Reading(
        "torchtitan", "h100_500w", replace(_TITAN, name="torchtitan 2025-06", loss="compiled", optimizer_bytes=28.0)
    ),
    "torchtitan benchmarks Trainy H200 2025-06": Reading(
        "torchtitan",
        "h200",
        replace(_TITAN, name="torchtitan 2025-06", loss="compiled", optimizer_bytes=28.0, root_copies=2.0),
    ),
    "torchao float8 training docs (via torchtitan)": Reading("torchao", "h100_500w", replace(_TITAN, root_copies=2.0)),
    "MosaicML llm-foundry benchmarks": Reading(
        "llm-foundry",
        "",
        Software(
            "FSDP1 2023",
            loss="plain",
            optimizer_bytes=28.0,
            attention="flash",
            keeps_even=False,
            gemm_age=0.88,
            attention_age=0.7,
        ),
    ),
    "torchtitan 0.2.2 on H200": Reading(
        "measured",
        "h200",
        replace(
            _TITAN, name="torchtitan 0.2.2", loss="compiled", optimizer_bytes=28.0, attention="cudnn", root_copies=2.0
        ),
    ),
}

#: GB/s: a gather between the two H200 of the measured rows, where NVLink multicast is off.
_PAIR = 215.0
_AC = {"selective": "selective_op", "selective per-op": "selective_op", "full": "full", "none": "none"}


@dataclass(frozen=True)
class Row:
    """One published row and what is planned for it. reason: why it is left out, "" where it is not."""

    source: str
    label: str
    group: str
    published: float
    memory: float | None
    raw: dict[str, str]
    job: Job | None = None
    reason: str = ""
    tps: float = 0.0
    gib: float = 0.0

    @property
    def error(self) -> float:
        """Planned over published, less 1."""
        return self.tps / self.published - 1

    @property
    def memory_error(self) -> float | None:
        """The same of memory, None where none is stated."""
        return None if self.memory is None or self.job is None else self.gib / self.memory - 1


def quant(text: str) -> str | None:
    """Our name of a source's precision; None where it is not clear."""
    for word, name in (("rowwise_with_gw_hp", "float8_rowwise_with_gw_hp"), ("rowwise", "float8_rowwise")):
        if word in text:
            return name
    if "tensorwise" in text or text.startswith("float8"):
        return "float8_tensorwise"
    return "none" if text in ("bf16", "amp_bf16") else "float8_tensorwise" if text == "amp_fp8" else None


def left_out(row: dict[str, str]) -> str:
    """Why a row cannot be planned, "" where it can."""
    if "MI300X" in row["hardware"]:
        return "AMD MI300X: no rates of it"
    if row["source"].startswith(("NVIDIA NeMo", "Megatron-Bridge")):
        mixture = any(word in row["model"] for word in ("DeepSeek", "A3B", "A22B", "OSS"))
        return "recomputation and accumulation are not stated" + "; a mixture of experts" * mixture
    if row["model"] not in SHAPES:
        return "the model's sizes are not stated"
    return ""


def _number(row: dict[str, str], name: str, default: int = 1) -> int:
    return int(row.get(name) or default)


def job(row: dict[str, str]) -> Job:
    """What the row ran."""
    reading = _READINGS[row["source"]]
    option = reading.hardware or ("a100_80gb" if row["hardware"].startswith("A100") else "h100_sxm")
    hardware, cluster = devices.shipped_device(option)
    if option == "a100_80gb":
        hardware = replace(hardware, memory_gib=float(row["gpu_mem_gb"]))
    software = reading.software
    if option == "a100_80gb":
        software = replace(software, gemm_age=1.0)
    if reading.group == "measured":
        cluster = replace(cluster, nvlink_gb_s=_PAIR)
    ranks, pp = _number(row, "n_gpus"), _number(row, "pp")
    tp, cp = _number(row, "tp"), _number(row, "cp")
    mesh = Mesh(dp_shard=ranks // (tp * cp * pp), tp=tp, cp=cp, pp=pp)
    text = row["precision_or_quant"]
    name = quant(text)
    gathers = name == "float8_tensorwise" and ("all-gather" in text or row["source"].startswith("torchtitan"))
    accumulation = next((int(part.split("=")[1]) for part in row["notes"].split("; ") if "accum=" in part), 1)
    interleaved = row["pp_schedule"].startswith("Interleaved")
    return Job(
        SHAPES[row["model"]],
        mesh,
        devices.device(hardware),
        devices.network(cluster, world_size=ranks),
        software,
        seq_len=_number(row, "seq_len", 8192),
        local_batch=_number(row, "local_batch"),
        accumulation=accumulation,
        microbatches=pp,
        schedule=row["pp_schedule"] or "1F1B",
        stages_per_rank=2 if interleaved else 1,
        ac=_AC[row["activation_ckpt"] or "selective"],
        quant=name,
        float8_gather=gathers,
        compiled=row["compile"] == "true",
        async_tp=("all_gather", "reduce_scatter") * (row["async_tp"] == "true"),
        cp_method="ring",
    )


def _planned(row: dict[str, str]) -> Row:
    mesh = "".join(f" {axis}{row[axis]}" for axis in ("tp", "cp", "pp") if _number(row, axis) > 1)
    label = (
        f"{row['model']}, {row['n_gpus']} {row['hardware'].split(' (')[0]}{mesh}, {row['local_batch']} x "
        f"{row['seq_len'] or 8192}, {row['precision_or_quant']}"
        + ", eager" * (row["compile"] == "false")
        + ", async TP" * (row["async_tp"] == "true")
        + (f", {row['pp_schedule']}" if row["pp_schedule"] else "")
        + (f", AC {row['activation_ckpt']}" if row["activation_ckpt"] else "")
    )
    reason = left_out(row)
    if reason:
        return Row(row["source"], label, row["source"], float(row["tokens_per_s_per_gpu"]), None, row, reason=reason)
    return _reckoned(row["source"], label, _READINGS[row["source"]].group, row, job(row))


def own(row: dict[str, str]) -> Row:
    """A run of this project: what was typed is planned as it was typed."""
    return _reckoned("titanyaml on H200", row["options"], "titanyaml", row, _typed(row["options"]))


@functools.cache
def _typed(options: str) -> Job:
    """Kept: rows of several files are the same work, and composing takes longest."""
    typed = ["runner=plan", "hardware=h200", f"cluster.nvlink_gb_s={_PAIR}", *options.split()]
    report = compose_report(typed, loader=_loader())
    assert not report.problems, report.problems
    return from_config.job(dump.to_dataclass(OmegaConf.masked_copy(report.cfg, list(keys_of(schema.Config)))))


@functools.cache
def _loader() -> compose_hook.Loader:
    store.register()
    return compose_hook.main_loader()


def _reckoned(source: str, label: str, group: str, row: dict[str, str], made: Job) -> Row:
    planned = step.plan_step(made)
    tps = made.tokens_per_step / planned.seconds / made.mesh.world_size
    gib = float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None
    return Row(
        source,
        label,
        group,
        float(row["tokens_per_s_per_gpu"]),
        gib,
        row,
        made,
        "",
        tps,
        memory_of_kept.plan_memory(made).total / memory.GIB,
    )


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / name).open(encoding="utf-8")))


def rows() -> list[Row]:
    """Every row of the three files."""
    published = _read("published_throughput.csv")
    for row in _read("measured_torchtitan_h200.csv"):
        published.append(
            {
                "source": "torchtitan 0.2.2 on H200",
                "hardware": "H200",
                "pp": "1",
                "pp_schedule": "",
                "compile": "true",
                "async_tp": "false",
                "notes": "",
                "gpu_mem_gb": "141",
                "precision_or_quant": row.pop("quant"),
                **row,
            }
        )
    return [*map(_planned, published), *map(own, _read("measured_titanyaml_h200.csv"))]


#: Columns in one of which the rows of a pair differ.
_VARIED = ("compile", "async_tp", "precision_or_quant", "pp_schedule", "activation_ckpt")


def pairs(planned: list[Row]) -> list[tuple[Row, Row]]:
    """Rows of one source that differ in one choice, or in sequence length and cp together, slower one first.

    Published differences below 2 % bind nobody and are left out.
    """
    found = []
    for i, one in enumerate(planned):
        for other in planned[i + 1 :]:
            if one.reason or other.reason or one.source != other.source:
                continue
            differs = {name for name in one.raw if one.raw[name] != other.raw[name]} - {
                "tokens_per_s_per_gpu",
                "peak_mem_gib",
                "notes",
                "mfu_pct",
            }
            alike = differs == {"seq_len", "cp", "dp_shard"} or (len(differs) == 1 and differs <= set(_VARIED))
            if alike and abs(other.published / one.published - 1) >= 0.02:
                found.append((one, other) if one.published < other.published else (other, one))
    return found


def statistics_of(errors: list[float]) -> tuple[float, float, float]:
    """(median, p90, worst) of absolute errors."""
    sizes = sorted(abs(error) for error in errors)
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], sizes[-1]


GROUPS = {
    "torchtitan": "#1f77b4",
    "torchao": "#ff7f0e",
    "llm-foundry": "#2ca02c",
    "measured": "#d62728",
    "titanyaml": "#9467bd",
}


def summary(planned: list[Row]) -> str:
    """Errors by group as a table."""
    lines = [
        "| rows | number | tokens/s: median, p90, worst (%) | memory without pp: number, median, worst (%) |",
        "|---|---|---|---|",
    ]
    for group in GROUPS:
        mine = [row for row in planned if row.group == group and not row.reason]
        tps = ", ".join(f"{100 * value:.1f}" for value in statistics_of([row.error for row in mine]))
        sizes = [row.memory_error for row in mine if row.memory_error is not None and row.job.mesh.pp == 1]
        gib = ", ".join([f"{len(sizes)}", *(f"{100 * statistics_of(sizes)[i]:.1f}" for i in (0, 2))]) if sizes else "-"
        lines.append(f"| {group} | {len(mine)} | {tps} | {gib} |")
    return "\n".join(lines)


def table(planned: list[Row]) -> str:
    """Every planned row."""
    lines = ["| row | published | planned | error | GiB published | planned | error |", "|---|---|---|---|---|---|---|"]
    for group in GROUPS:
        for row in planned:
            if row.group == group and not row.reason:
                gib = (
                    ["", "", ""]
                    if row.memory is None
                    else [f"{row.memory:.1f}", f"{row.gib:.1f}", f"{100 * row.memory_error:+.1f} %"]
                )
                lines.append(
                    f"| {group}: {row.label} | {row.published:,.0f} | {row.tps:,.0f} | "
                    f"{100 * row.error:+.1f} % | {' | '.join(gib)} |"
                )
    return "\n".join(lines)


def omitted(planned: list[Row]) -> str:
    """Rows that are left out, each with its reason."""
    lines = ["| row | reason |", "|---|---|"]
    return "\n".join(lines + [f"| {row.source}: {row.label} | {row.reason} |" for row in planned if row.reason])


def plot(planned: list[Row]) -> str:
    """Planned over published tokens/s, both logarithmic, as SVG: the line is equality, the band 20 % either way."""
    size, edge, low, high = 560, 60, 10.0, 100_000.0

    def at(value: float) -> float:
        return edge + (size - 2 * edge) * math.log(value / low) / math.log(high / low)

    def line(factor: float, style: str) -> str:
        start, end = max(low, low / factor), min(high, high / factor)
        return (
            f'<line x1="{at(start):.1f}" y1="{size - at(start * factor):.1f}" x2="{at(end):.1f}" '
            f'y2="{size - at(end * factor):.1f}" {style}/>'
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
    ]
    for value in (10, 100, 1_000, 10_000, 100_000):
        spot = at(value)
        parts += [
            f'<line x1="{spot:.1f}" y1="{edge}" x2="{spot:.1f}" y2="{size - edge}" stroke="#ddd"/>',
            f'<line x1="{edge}" y1="{size - spot:.1f}" x2="{size - edge}" y2="{size - spot:.1f}" stroke="#ddd"/>',
            f'<text x="{spot:.1f}" y="{size - edge + 18}" text-anchor="middle">{value:,}</text>',
            f'<text x="{edge - 6}" y="{size - spot + 4:.1f}" text-anchor="end">{value:,}</text>',
        ]
    parts += [line(1.0, 'stroke="black"'), *(line(f, 'stroke="#999" stroke-dasharray="4 4"') for f in (1.2, 1 / 1.2))]
    for number, (group, colour) in enumerate(GROUPS.items()):
        dots = [row for row in planned if row.group == group and not row.reason]
        parts += [
            f'<circle cx="{at(row.published):.1f}" cy="{size - at(row.tps):.1f}" r="3.5" fill="{colour}" '
            f'fill-opacity="0.7"><title>{html.escape(row.label)}: {100 * row.error:+.1f} %</title></circle>'
            for row in dots
        ]
        parts += [
            f'<circle cx="{edge + 14}" cy="{edge + 14 + 18 * number}" r="4" fill="{colour}"/>',
            f'<text x="{edge + 24}" y="{edge + 18 + 18 * number}">{group} ({len(dots)})</text>',
        ]
    parts += [
        f'<text x="{size / 2}" y="{size - 12}" text-anchor="middle">published tokens/s per device</text>',
        f'<text x="16" y="{size / 2}" text-anchor="middle" transform="rotate(-90 16 {size / 2})">planned</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


DOCS = HERE.parent / "docs"
BEGIN, END = "<!-- rows: written by benchmarks/planner_rows.py -->\n", "<!-- end of rows -->\n"


def page(text: str, planned: list[Row]) -> str:
    """docs/planner.md with fresh tables."""
    head, _, rest = text.partition(BEGIN)
    tables = f"{summary(planned)}\n\n### Row by row\n\n{table(planned)}\n\n### Left out\n\n{omitted(planned)}\n"
    return f"{head}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description="Published rows against the planner.")
    parser.add_argument("--write", action="store_true", help="write the tables and the plot into docs/")
    write, planned = parser.parse_args().write, rows()
    print(f"{summary(planned)}\n\n{table(planned)}")
    if write:
        text = (DOCS / "planner.md").read_text(encoding="utf-8")
        (DOCS / "planner.md").write_text(page(text, planned), encoding="utf-8")
        (DOCS / "planner.svg").write_text(plot(planned), encoding="utf-8")


if __name__ == "__main__":
    main()
