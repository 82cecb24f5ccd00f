"""How far a plan may be off either way, and why: one row a reason. docs/planner.md has the errors behind the widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.operators import CHEAP_BUDGET

#: Recipes and schedules of which somebody's run is among the rows that the planner is held to.
_RECIPES = ("none", "float8_tensorwise", "float8_rowwise")
_SCHEDULES = ("1F1B", "Interleaved1F1B")
#: Devices of the largest published run, and eight times as many.
_LARGEST, _WIDE = 512, 4096


@dataclass(frozen=True)
class Reason:
    """width: share of the speed. words: of a job to which it applies, "" of another."""

    width: float
    words: Callable[[Job], str]


def _when(applies: Callable[[Job], bool], words: str) -> Callable[[Job], str]:
    return lambda job: words if applies(job) else ""


def _device(job: Job) -> str:
    if job.device.basis != "datasheet":
        return ""
    return f"the rates of {job.device.name} are shares of its datasheet: nothing was measured on one"


def _calibrated(job: Job) -> str:
    if "calibrated" not in (job.device.basis, job.network.basis):
        return ""
    return "calibrated rates: of 107 known runs 103 are planned within 25 %, the median error is 7.2 %, the worst 37 %"


def _given(job: Job) -> str:
    return f"the rates of {job.device.name} are as given" if job.device.basis == "given" else ""


def _links(job: Job) -> str:
    unmeasured = job.mesh.world_size > 1 and job.network.basis == "datasheet"
    return f"the links of {job.network.name} are shares of their datasheets" if unmeasured else ""


_REASONS = (
    Reason(
        0.30,
        _when(
            lambda job: job.shape.mixture is not None,
            "loads of experts are taken as even, which only a run can tell, and no mixture was measured",
        ),
    ),
    Reason(0.30, _when(lambda job: job.tokens < 4096, "few tokens a forward do not fill the device")),
    Reason(0.25, _device),
    Reason(0.30, _when(lambda job: job.mesh.world_size > _WIDE, f"nothing on more than {_WIDE} devices was measured")),
    Reason(0.25, _calibrated),
    Reason(
        0.25,
        _when(
            lambda job: job.ac == "memory_budget" and job.ac_budget < CHEAP_BUDGET,
            f"what the compiler repeats for a budget below {CHEAP_BUDGET} is counted as the cheapest for a "
            "byte, and was not measured",
        ),
    ),
    Reason(
        0.20,
        _when(
            lambda job: _LARGEST < job.mesh.world_size <= _WIDE, f"no published run has more than {_LARGEST} devices"
        ),
    ),
    Reason(0.20, _links),
    Reason(0.20, _when(lambda job: job.quant not in _RECIPES, "this float8 recipe was never measured")),
    Reason(
        0.20,
        _when(
            lambda job: job.mesh.pp > 1 and job.schedule not in _SCHEDULES or job.bubble is not None,
            "this pipeline schedule was never measured",
        ),
    ),
    Reason(
        0.20,
        _when(
            lambda job: job.seq_len // job.mesh.cp >= 32768,
            "attention of long sequences depends on its kernel's release",
        ),
    ),
    Reason(0.15, _given),
    Reason(0.15, _when(lambda job: job.mesh.tp > 1, "tensor parallelism is planned within 15 %")),
    Reason(0.15, _when(lambda job: job.mesh.pp > 1, "pipelines are planned within 15 %")),
    Reason(
        0.15,
        _when(
            lambda job: job.quant != "none",
            "float8 is planned within 15 %: the same runs were published 10 to 15 % apart",
        ),
    ),
    Reason(0.15, _when(lambda job: job.mesh.cp > 1, "attention over cp ranks is planned within 15 %")),
    Reason(
        0.15,
        _when(
            lambda job: job.own_float8 and job.mesh.world_size > 1,
            "our own float8 products were measured on one GPU alone",
        ),
    ),
    Reason(0.15, _when(lambda job: job.mesh.dp_replicate > 1, "no copies of shards (HSDP) were measured")),
)
#: Of everything else, dense bfloat16 runs with and without FSDP.
_LEAST = 0.10


def of(job: Job) -> tuple[float, str]:
    """(half width, why): the widest reason's, with all reasons that apply, the widest first. Errors of several kinds do
    not add up: rows that have all of tp, pp, cp and float8 lie within 15 %."""
    found = [(reason.width, words) for reason in _REASONS if (words := reason.words(job))]
    if not found:
        return _LEAST, "bfloat16 runs of dense models, with and without FSDP, are planned within 10 %"
    return found[0][0], "; ".join(words for _, words in found)
