"""Published and measured runs beside their plans: what docs/planner.md shows and tests/planner asserts.

``published_throughput.csv`` holds what the sources state, ``measured_torchtitan_h200.csv`` what torchtitan 0.2.2
reached on one and two H200, ``measured_titanyaml_h200.csv`` what this project did. A line of the last is a command,
tokens/s and GiB reserved, and needs nothing else. What a source does not state is in ``_READINGS``, by source: nothing
is chosen row by row. ``planner_page.py`` prints the errors and writes them into docs/.
"""

from __future__ import annotations

import csv
import functools
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.hydra import compose_hook, store
from titanyaml.config.hydra.composition_report import compose_report
from titanyaml.planner.model import devices, from_config
from titanyaml.planner.model.inputs import Job, Mesh, Software
from titanyaml.planner.model.plan import plan_job

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"

_LLAMA_8B = DecoderShape("8B", 128256, 4096, 32, 32, 8, 128, 14336)
SHAPES = {
    "Llama 3.1 8B": _LLAMA_8B,
    "Llama 3 8B": _LLAMA_8B,
    "8B": _LLAMA_8B,
    "3B": DecoderShape("3B", 128256, 3072, 28, 24, 8, 128, 8192),
    "Llama 3.1 70B": DecoderShape("70B", 128256, 8192, 80, 64, 8, 128, 28672),
    "Llama 3.1 405B": DecoderShape("405B", 128256, 16384, 126, 128, 8, 128, 53248),
}
#: MPT (llm-foundry): width, layers, heads. Learned positions, feed-forwards of two matrices, four times as wide.
_MPT = {
    "1B": (2048, 24, 16),
    "3B": (2560, 32, 20),
    "7B": (4096, 32, 32),
    "13B": (5120, 40, 40),
    "30B": (7168, 48, 56),
    "70B": (8192, 80, 64),
}
for _name, (_dim, _layers, _heads) in _MPT.items():
    _sizes = (50368, _dim, _layers, _heads, _heads, _dim // _heads, 4 * _dim)
    SHAPES[f"MPT {_name}"] = DecoderShape(_name, *_sizes, tied=True, gated=False, rotary=False)

#: torchtitan of December 2024: its revision's defaults.
_TITAN = Software(
    "torchtitan 2024-12",
    loss="plain",
    optimizer_bytes=80.0,  # foreach AdamW: each of its steps reads and writes memory; fused: 28
    attention="flash",
    keeps_even=False,
    keeps_scattered=True,
    gathers_float8=True,
    root_copies=4.0,  # embedding and head stay gathered, and once more in the pool of the all-gather's stream
    weights="autocast",
    reduces_each=False,
    fused_norms=False,
)
_TITAN_2025 = replace(_TITAN, name="torchtitan 2025-06", loss="compiled", optimizer_bytes=28.0)
#: FSDP1, and the kernels of 2023.
_FOUNDRY = Software(
    "FSDP1 2023",
    loss="plain",
    optimizer_bytes=28.0,
    attention="flash",
    keeps_even=False,
    gemm_age=0.88,
    attention_age=0.7,
)


@dataclass(frozen=True)
class Reading:
    """What a source does not state."""

    group: str
    hardware: str  # of conf/hardware; "": as the row says
    software: Software


_READINGS = {
    "torchtitan benchmarks 2024-12": Reading("torchtitan", "h100_500w", _TITAN),
    "torchtitan benchmarks asyncTP 2025-06": Reading("torchtitan", "h100_500w", _TITAN_2025),
    "torchtitan benchmarks Trainy H200 2025-06": Reading("torchtitan", "h200", replace(_TITAN_2025, root_copies=2.0)),
    "torchao float8 training docs (via torchtitan)": Reading("torchao", "h100_500w", replace(_TITAN, root_copies=2.0)),
    "MosaicML llm-foundry benchmarks": Reading("llm-foundry", "", _FOUNDRY),
    "torchtitan 0.2.2 on H200": Reading(
        "measured", "h200", replace(_TITAN_2025, name="torchtitan 0.2.2", attention="cudnn", root_copies=2.0)
    ),
}

#: GB/s of an all-gather between the two H200 of the measured rows, where NVLink multicast is off.
_PAIR_GB_S = 215.0
_AC = {"selective": "selective_op", "selective per-op": "selective_op", "full": "full", "none": "none"}


@dataclass(frozen=True)
class Row:
    """A published or measured run and its plan."""

    source: str
    label: str
    group: str
    published: float  # tokens/s per device
    memory: float | None  # GiB reserved, where stated
    raw: dict[str, str]  # the line of the file
    job: Job | None = None
    reason: str = ""  # why it is not planned; "" where it is
    tps: float = 0.0  # planned
    gib: float = 0.0  # planned

    @property
    def error(self) -> float:
        """Planned over published tokens/s, less 1."""
        return self.tps / self.published - 1

    @property
    def memory_error(self) -> float | None:
        """Planned over published memory, less 1; None where none is stated."""
        return None if self.memory is None or self.job is None else self.gib / self.memory - 1


def quant_recipe(text: str) -> str | None:
    """Our name of a source's precision; None where it is not clear."""
    for word in ("rowwise_with_gw_hp", "rowwise"):
        if word in text:
            return f"float8_{word}"
    # torchtitan's float8 of 2024 and Transformer Engine's (amp_fp8) scale whole tensors
    if "tensorwise" in text or text.startswith("float8") or text == "amp_fp8":
        return "float8_tensorwise"
    return "none" if text in ("bf16", "amp_bf16") else None


def reason_left_out(row: dict[str, str]) -> str:
    """Why a row cannot be planned, "" where it can."""
    if "MI300X" in row["hardware"]:
        return "AMD MI300X: no rates of it"
    if row["source"].startswith(("NVIDIA NeMo", "Megatron-Bridge")):
        mixture = any(word in row["model"] for word in ("DeepSeek", "A3B", "A22B", "OSS"))
        return "recomputation and accumulation are not stated" + ("; a mixture of experts" if mixture else "")
    return "" if row["model"] in SHAPES else "the model's sizes are not stated"


def _number(row: dict[str, str], name: str, default: int = 1) -> int:
    return int(row.get(name) or default)


def published_job(row: dict[str, str]) -> Job:
    """What the row ran."""
    reading, a100 = _READINGS[row["source"]], row["hardware"].startswith("A100")
    option = reading.hardware or ("a100_80gb" if a100 else "h100_sxm")
    hardware, cluster = devices.shipped_device(option)
    software = reading.software
    if option == "a100_80gb":  # its rates are fitted to rows of that age
        hardware, software = replace(hardware, memory_gib=float(row["gpu_mem_gb"])), replace(software, gemm_age=1.0)
    if reading.group == "measured":
        cluster = replace(cluster, nvlink_gb_s=_PAIR_GB_S)
    ranks, pp, tp, cp = (_number(row, name) for name in ("n_gpus", "pp", "tp", "cp"))
    precision = row["precision_or_quant"]
    recipe = quant_recipe(precision)
    stated_gather = "all-gather" in precision or row["source"].startswith("torchtitan")
    accumulation = next((int(part.split("=")[1]) for part in row["notes"].split("; ") if "accum=" in part), 1)
    return Job(
        SHAPES[row["model"]],
        Mesh(dp_shard=ranks // (tp * cp * pp), tp=tp, cp=cp, pp=pp),
        devices.device(hardware),
        devices.network(cluster, world_size=ranks),
        software,
        seq_len=_number(row, "seq_len", 8192),
        local_batch=_number(row, "local_batch"),
        accumulation=accumulation,
        # the defaults of that time: as many microbatches as ranks, two stages per rank where they interleave
        microbatches=pp,
        schedule=row["pp_schedule"] or "1F1B",
        stages_per_rank=2 if row["pp_schedule"].startswith("Interleaved") else 1,
        ac=_AC[row["activation_ckpt"] or "selective"],
        quant=recipe,
        float8_gather=recipe == "float8_tensorwise" and stated_gather,
        compiled=row["compile"] == "true",
        async_tp=("all_gather", "reduce_scatter") if row["async_tp"] == "true" else (),
        cp_method="ring",
    )


def _label(row: dict[str, str]) -> str:
    mesh = "".join(f" {axis}{row[axis]}" for axis in ("tp", "cp", "pp") if _number(row, axis) > 1)
    parts = [
        row["model"],
        f"{row['n_gpus']} {row['hardware'].split(' (')[0]}{mesh}",
        f"{row['local_batch']} x {row['seq_len'] or 8192}",
        row["precision_or_quant"],
        "eager" if row["compile"] == "false" else "",
        "async TP" if row["async_tp"] == "true" else "",
        row["pp_schedule"],
        f"AC {row['activation_ckpt']}" if row["activation_ckpt"] else "",
    ]
    return ", ".join(filter(None, parts))


def _published_row(row: dict[str, str]) -> Row:
    if reason := reason_left_out(row):
        source = row["source"]
        return Row(source, _label(row), source, float(row["tokens_per_s_per_gpu"]), None, row, reason=reason)
    return _planned_row(row["source"], _label(row), _READINGS[row["source"]].group, row, published_job(row))


def own_row(row: dict[str, str]) -> Row:
    """A run of this project, planned as it was typed."""
    return _planned_row("titanyaml on H200", row["options"], "titanyaml", row, _composed_job(row["options"]))


# Cached: rows of several files are the same command, and composing takes longest.
@functools.cache
def _composed_job(options: str) -> Job:
    typed = ["runner=plan", "hardware=h200", f"cluster.nvlink_gb_s={_PAIR_GB_S}", *options.split()]
    report = compose_report(typed, loader=_loader())
    assert not report.problems, report.problems
    return from_config.job(report.config())


@functools.cache
def _loader() -> compose_hook.Loader:
    store.register()
    return compose_hook.main_loader()


def _planned_row(source: str, label: str, group: str, row: dict[str, str], job: Job) -> Row:
    plan = plan_job(job)
    published, gib = float(row["tokens_per_s_per_gpu"]), float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None
    return Row(source, label, group, published, gib, row, job, "", plan.tps, plan.total_gib)


def _read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((HERE / name).open(encoding="utf-8")))


def rows() -> list[Row]:
    """Every row of the three files."""
    common = {"source": "torchtitan 0.2.2 on H200", "hardware": "H200", "gpu_mem_gb": "141", "notes": ""}
    common |= {"pp": "1", "pp_schedule": "", "compile": "true", "async_tp": "false"}
    measured = _read("measured_torchtitan_h200.csv")
    measured = [{**common, "precision_or_quant": row.pop("quant"), **row} for row in measured]
    published = _read("published_throughput.csv") + measured
    return [*map(_published_row, published), *map(own_row, _read("measured_titanyaml_h200.csv"))]


#: Columns in one of which the rows of a pair differ.
_VARIED = ("compile", "async_tp", "precision_or_quant", "pp_schedule", "activation_ckpt")
#: Columns that say what came out, not what was run.
_RESULTS = {"tokens_per_s_per_gpu", "peak_mem_gib", "notes", "mfu_pct"}


def pairs(planned: list[Row]) -> list[tuple[Row, Row]]:
    """Rows of one source that differ in one choice, or in sequence length and cp together, slower one first.

    Published differences below 2 % bind nobody and are left out.
    """
    found_pairs = []
    for i, first in enumerate(planned):
        for second in planned[i + 1 :]:
            if first.reason or second.reason or first.source != second.source:
                continue
            differing = {name for name in first.raw if first.raw[name] != second.raw[name]} - _RESULTS
            comparable = differing == {"seq_len", "cp", "dp_shard"} or (len(differing) == 1 and differing <= {*_VARIED})
            if comparable and abs(second.published / first.published - 1) >= 0.02:
                found_pairs.append((first, second) if first.published < second.published else (second, first))
    return found_pairs


def statistics_of(errors: list[float]) -> tuple[float, float, float]:
    """(median, p90, worst) of absolute errors."""
    sizes = sorted(abs(error) for error in errors)
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], sizes[-1]
