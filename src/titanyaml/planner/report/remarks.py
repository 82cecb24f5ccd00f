"""What a reviewer would say about a plan: one function per remark, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from titanyaml.planner.model import cost, operators
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import GIB
from titanyaml.planner.model.plan import Plan, plan_job
from titanyaml.planner.model.primitives import Gemm

Remark = Callable[[Plan], str | None]

#: Share of memory above which the allocator may have to free cached blocks and retry.
_TIGHT_SHARE = 0.92
#: Share of a step from which waiting for one axis is worth a remark.
_EXPOSED_SHARE = 0.12


def remarks_on(plan: Plan) -> list[str]:
    """All remarks that apply."""
    return [text for remark in _REMARKS if (text := remark(plan))]


def _does_not_fit(plan: Plan) -> str | None:
    if plan.fits:
        return None
    part, size = max(plan.memory.parts.items(), key=lambda item: item[1])
    return (
        f"does not fit: {plan.total_gib:.1f} GiB of {plan.limit_gib:.1f}, the largest part is {part} with "
        f"{size / GIB:.1f} GiB"
    )


def _tight(plan: Plan) -> str | None:
    share = plan.total_gib / plan.limit_gib
    if not _TIGHT_SHARE < share <= 1.0:
        return None
    return (
        f"{100 * share:.0f} % of the memory is used: the allocator may have to free and retry, which costs speed, "
        "and memory is planned within about 5 %"
    )


def _lower_bound(plan: Plan) -> str | None:
    text = "memory of a pipeline is a lower bound: up to a quarter more was published"
    return text if plan.memory.lower_bound else None


def _tp_across_hosts(plan: Plan) -> str | None:
    tp, host = plan.job.mesh.tp, plan.job.network.gpus_per_host
    if tp <= host:
        return None
    return f"parallel.tp={tp} spans hosts of {host}: each block waits for the network card; parallel.tp={host} or less"


def _small_float8(plan: Plan) -> str | None:
    if not plan.job.uses_float8:
        return None
    small = [linear.name for linear in plan.job.shape.linears if not _gains_by_float8(plan.job, linear.name)]
    if not small:
        return None
    return (
        f"float8 gains nothing in {', '.join(small)}: casts cost more than the products save at these shapes; "
        f"quant.filter_fqns=[{','.join(small)}] or a larger batch"
    )


def _gains_by_float8(job: Job, name: str) -> bool:
    plain = replace(job, quant="none")
    return _linear_seconds(job, name) < _linear_seconds(plain, name)


def _linear_seconds(job: Job, name: str) -> float:
    """Seconds of one linear layer's three GEMMs (forward, both gradients) and its casts."""
    linears = {linear.name: linear for linear in job.shape.linears}
    inputs, outputs = linears[name].local(job.mesh.tp)
    dtype = "fp8" if job.uses_float8 else "bf16"
    shapes = ((job.tokens, outputs, inputs), (job.tokens, inputs, outputs), (outputs, inputs, job.tokens))
    seconds = sum(cost.gemm_seconds(job, Gemm(name, *shape, dtype)) for shape in shapes)
    if not job.uses_float8:
        return seconds
    # the cast of an input is shared by all layers that read it
    readers = sum(linear.reads == linears[name].reads for linear in linears.values())
    elements = job.tokens * (inputs / readers + outputs) + inputs * outputs
    return seconds + elements * operators.cast_bytes(job) / cost.bandwidth(job)


def _unfilled_pipeline(plan: Plan) -> str | None:
    job = plan.job
    if job.mesh.pp == 1 or plan.step.bubble < 0.2:
        return None
    return (
        f"pipeline ranks wait {100 * plan.step.bubble:.0f} % of the step: {job.microbatches} microbatches for "
        f"{job.mesh.pp} ranks; a larger train.local_batch, or parallel.pp_schedule=Interleaved1F1B"
    )


def _exposed(plan: Plan) -> str | None:
    advice = {
        "tp": "a smaller parallel.tp" if plan.job.async_tp else "compile.async_tp=true, or a smaller parallel.tp",
        "shard": "a larger train.local_batch, or fewer shards with copies (hsdpRxS)",
        "cp": "parallel.cp_method=ring, or a smaller parallel.cp",
    }
    shares = {axis: plan.step.times.seconds.get(f"exposed_{axis}", 0.0) / plan.step.seconds for axis in advice}
    texts = [
        f"{100 * share:.0f} % of the step waits for {axis} transfers ({advice[axis]})"
        for axis, share in shares.items()
        if share > _EXPOSED_SHARE
    ]
    return "; ".join(texts) or None


def _few_tokens(plan: Plan) -> str | None:
    if plan.job.tokens >= 4096:
        return None
    return (
        f"{plan.job.tokens} tokens a forward do not fill the device: errors of 20 to 45 % were seen there; a "
        "larger train.local_batch"
    )


def _needless_recompute(plan: Plan) -> str | None:
    job = plan.job
    for mode in ("none", "selective_op"):
        if job.ac in ("none", mode) or not plan.fits:
            continue
        lighter = plan_job(replace(job, ac=mode))
        # with 5 % to spare, within which memory is planned
        if lighter.fits and lighter.total_gib < 0.95 * lighter.limit_gib and lighter.tps > 1.01 * plan.tps:
            gain = lighter.tps / plan.tps - 1
            return f"ac={mode} fits too ({lighter.total_gib:.1f} GiB) and would be {100 * gain:.0f} % faster"
    return None


def _eager(plan: Plan) -> str | None:
    text = "compile=none: rotation and activation run piece by piece; compile=block"
    return None if plan.job.compiled else text


_REMARKS: tuple[Remark, ...] = (
    _does_not_fit,  # the first: runner/plan.py adds the changes that would fit to it
    _tight,
    _lower_bound,
    _tp_across_hosts,
    _small_float8,
    _unfilled_pipeline,
    _exposed,
    _few_tokens,
    _needless_recompute,
    _eager,
)
