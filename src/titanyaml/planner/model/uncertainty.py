"""How far off planned tokens/s may be, and why. docs/planner.md has the errors behind the widths."""

from collections.abc import Iterator

from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.operators import CHEAP_BUDGET

#: Recipes and schedules of which the planner was held against at least one run.
_MEASURED_RECIPES = ("none", "float8_tensorwise", "float8_rowwise")
_MEASURED_SCHEDULES = ("1F1B", "Interleaved1F1B")
#: Devices of the largest published run, and eight times as many.
_LARGEST_RUN, _FAR_BEYOND = 512, 4096


def relative_range(job: Job) -> tuple[float, str]:
    """(share by which tokens/s may be off either way, all reasons that apply).

    Errors of several kinds do not add up: rows with tp, pp, cp and float8 together lie within 15 %.
    """
    reasons = list(_reasons(job))
    if not reasons:
        return 0.10, "bfloat16 runs of dense models, with and without FSDP, are planned within 10 %"
    return reasons[0][0], "; ".join(text for _, text in reasons)


def _reasons(job: Job) -> Iterator[tuple[float, str]]:
    """(width, reason) of all that apply, the widest first."""
    mesh, device, network = job.mesh, job.device, job.network
    if job.shape.mixture is not None:
        yield 0.30, "loads of experts are taken as even, which only a run can tell, and no mixture was measured"
    if job.tokens < 4096:  # launches and short GEMMs dominate: errors of 20 to 45 % were seen
        yield 0.30, "few tokens a forward do not fill the device"
    if mesh.world_size > _FAR_BEYOND:
        yield 0.30, f"nothing on more than {_FAR_BEYOND} devices was measured"
    if device.basis == "datasheet":
        yield 0.25, f"the rates of {device.name} are shares of its datasheet: nothing was measured on one"
    if "calibrated" in (device.basis, network.basis):
        errors = "of 107 known runs 103 are planned within 25 %, the median error is 7.2 %, the worst 37 %"
        yield 0.25, f"calibrated rates: {errors}"
    if job.ac == "memory_budget" and job.ac_budget < CHEAP_BUDGET:
        repeated = f"what the compiler repeats for a budget below {CHEAP_BUDGET}"
        yield 0.25, f"{repeated} is counted as the cheapest for a byte, and was not measured"
    if _LARGEST_RUN < mesh.world_size <= _FAR_BEYOND:
        yield 0.20, f"no published run has more than {_LARGEST_RUN} devices"
    if mesh.world_size > 1 and network.basis == "datasheet":
        yield 0.20, f"the links of {network.name} are shares of their datasheets"
    if job.quant not in _MEASURED_RECIPES:
        yield 0.20, "this float8 recipe was never measured"
    # a bubble of its own: a schedule from a file
    if job.bubble is not None or (mesh.pp > 1 and job.schedule not in _MEASURED_SCHEDULES):
        yield 0.20, "this pipeline schedule was never measured"
    if job.seq_len // mesh.cp >= 32768:
        yield 0.20, "attention of long sequences depends on its kernel's release"
    if device.basis == "given":
        yield 0.15, f"the rates of {device.name} are as given"
    if mesh.tp > 1:
        yield 0.15, "tensor parallelism is planned within 15 %"
    if mesh.pp > 1:
        yield 0.15, "pipelines are planned within 15 %"
    if job.uses_float8:
        yield 0.15, "float8 is planned within 15 %: the same runs were published 10 to 15 % apart"
    if mesh.cp > 1:
        yield 0.15, "attention over cp ranks is planned within 15 %"
    if job.own_float8 and mesh.world_size > 1:
        yield 0.15, "our own float8 products were measured on one GPU alone"
    if mesh.dp_replicate > 1:
        yield 0.15, "no copies of shards (HSDP) were measured"
