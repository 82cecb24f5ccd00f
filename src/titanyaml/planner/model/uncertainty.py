"""How far off planned tokens/s may be, and why. docs/planner.md has the errors behind the widths."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.operators import CHEAP_BUDGET

#: Recipes and schedules of which the planner was held against at least one run.
_MEASURED_RECIPES = ("none", "float8_tensorwise", "float8_rowwise")
_MEASURED_SCHEDULES = ("1F1B", "Interleaved1F1B")
#: Devices of the largest published run, and eight times as many.
_LARGEST_RUN, _FAR_BEYOND = 512, 4096
#: Relative range where no reason applies.
_LEAST_RANGE = 0.10


class Reason(NamedTuple):
    """Why tokens/s may be off by the share ``width``. ``text`` is formatted with the job."""

    width: float
    applies: Callable[[Job], bool]
    text: str


# The widest first: the first that applies is the range.
_REASONS = (
    Reason(
        0.30,
        lambda job: job.shape.mixture is not None,
        "loads of experts are taken as even, which only a run can tell, and no mixture was measured",
    ),
    # launches and short GEMMs dominate: errors of 20 to 45 % were seen
    Reason(0.30, lambda job: job.tokens < 4096, "few tokens a forward do not fill the device"),
    Reason(
        0.30, lambda job: job.mesh.world_size > _FAR_BEYOND, f"nothing on more than {_FAR_BEYOND} devices was measured"
    ),
    Reason(
        0.25,
        lambda job: job.device.basis == "datasheet",
        "the rates of {job.device.name} are shares of its datasheet: nothing was measured on one",
    ),
    Reason(
        0.25,
        lambda job: "calibrated" in (job.device.basis, job.network.basis),
        "calibrated rates: of 107 known runs 103 are planned within 25 %, the median error is 7.2 %, the worst 37 %",
    ),
    Reason(
        0.25,
        lambda job: job.ac == "memory_budget" and job.ac_budget < CHEAP_BUDGET,
        f"what the compiler repeats for a budget below {CHEAP_BUDGET} is counted as the cheapest for a byte, and was "
        "not measured",
    ),
    Reason(
        0.20,
        lambda job: _LARGEST_RUN < job.mesh.world_size <= _FAR_BEYOND,
        f"no published run has more than {_LARGEST_RUN} devices",
    ),
    Reason(
        0.20,
        lambda job: job.mesh.world_size > 1 and job.network.basis == "datasheet",
        "the links of {job.network.name} are shares of their datasheets",
    ),
    Reason(0.20, lambda job: job.quant not in _MEASURED_RECIPES, "this float8 recipe was never measured"),
    Reason(
        0.20,
        # a bubble of its own: a schedule from a file
        lambda job: job.bubble is not None or (job.mesh.pp > 1 and job.schedule not in _MEASURED_SCHEDULES),
        "this pipeline schedule was never measured",
    ),
    Reason(
        0.20,
        lambda job: job.seq_len // job.mesh.cp >= 32768,
        "attention of long sequences depends on its kernel's release",
    ),
    Reason(0.15, lambda job: job.device.basis == "given", "the rates of {job.device.name} are as given"),
    Reason(0.15, lambda job: job.mesh.tp > 1, "tensor parallelism is planned within 15 %"),
    Reason(0.15, lambda job: job.mesh.pp > 1, "pipelines are planned within 15 %"),
    Reason(
        0.15,
        lambda job: job.uses_float8,
        "float8 is planned within 15 %: the same runs were published 10 to 15 % apart",
    ),
    Reason(0.15, lambda job: job.mesh.cp > 1, "attention over cp ranks is planned within 15 %"),
    Reason(
        0.15,
        lambda job: job.own_float8 and job.mesh.world_size > 1,
        "our own float8 products were measured on one GPU alone",
    ),
    Reason(0.15, lambda job: job.mesh.dp_replicate > 1, "no copies of shards (HSDP) were measured"),
)


def relative_range(job: Job) -> tuple[float, str]:
    """(share by which tokens/s may be off either way, all reasons that apply).

    Errors of several kinds do not add up: rows with tp, pp, cp and float8 together lie within 15 %.
    """
    reasons = [reason for reason in _REASONS if reason.applies(job)]
    if not reasons:
        return _LEAST_RANGE, "bfloat16 runs of dense models, with and without FSDP, are planned within 10 %"
    return reasons[0].width, "; ".join(reason.text.format(job=job) for reason in reasons)
