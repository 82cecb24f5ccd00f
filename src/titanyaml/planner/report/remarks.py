"""What a reviewer would say to a plan: one function a remark, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from titanyaml.planner.model import cost, operators
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.plan import Plan, plan

Remark = Callable[[Plan], str | None]


def warnings(made: Plan) -> list[str]:
    """All remarks that apply."""
    return [text for remark in _REMARKS if (text := remark(made))]


def _does_not_fit(made: Plan) -> str | None:
    if made.fits:
        return None
    part, size = max(made.memory.parts.items(), key=lambda one: one[1])
    return (
        f"does not fit: {made.total_gib:.1f} GiB of {made.limit_gib:.1f}, the largest part is {part} with "
        f"{size / 2**30:.1f} GiB"
    )


def _tight(made: Plan) -> str | None:
    share = made.total_gib / made.limit_gib
    if not 0.92 < share <= 1.0:
        return None
    return (
        f"{100 * share:.0f} % of the memory is used: the allocator may have to free and retry, which costs speed, "
        "and memory is planned within about 5 %"
    )


def _lower_bound(made: Plan) -> str | None:
    text = "memory of a pipeline is a lower bound: up to a quarter more was published"
    return text if made.memory.lower_bound else None


def _tp_across_hosts(made: Plan) -> str | None:
    tp, host = made.job.mesh.tp, made.job.network.gpus_per_host
    if tp <= host:
        return None
    return f"parallel.tp={tp} spans hosts of {host}: each block waits for the network card; parallel.tp={host} or less"


def _small_float8(made: Plan) -> str | None:
    job = made.job
    if job.quant == "none":
        return None
    small = [one.name for one in job.shape.linears if not _gains(job, one.name)]
    if not small:
        return None
    return (
        f"float8 gains nothing in {', '.join(small)}: casts cost more than the products save at these shapes; "
        f"quant.filter_fqns=[{','.join(small)}] or a larger batch"
    )


def _gains(job: Job, name: str) -> bool:
    def seconds(of: Job) -> float:
        one = next(one for one in of.shape.linears if one.name == name)
        inputs, outputs = operators.local(of, one)
        shapes = ((of.tokens, outputs, inputs), (of.tokens, inputs, outputs), (outputs, inputs, of.tokens))
        dtype = "fp8" if of.quant != "none" else "bf16"
        products = sum(cost.gemm_seconds(of, operators.Gemm(name, *shape, dtype)) for shape in shapes)
        sharing = sum(other.reads == one.reads for other in of.shape.linears)
        elements = of.tokens * (inputs / sharing + outputs) + inputs * outputs
        return products + (elements * operators.cast_bytes(of) / cost.bandwidth(of) if dtype == "fp8" else 0.0)

    return seconds(job) < seconds(replace(job, quant="none"))


def _unfilled_pipe(made: Plan) -> str | None:
    job = made.job
    if job.mesh.pp == 1 or made.step.bubble < 0.2:
        return None
    return (
        f"pipeline ranks wait {100 * made.step.bubble:.0f} % of the step: {job.microbatches} microbatches for "
        f"{job.mesh.pp} ranks; a larger train.local_batch, or parallel.pp_schedule=Interleaved1F1B"
    )


def _exposed(made: Plan) -> str | None:
    overlapped = bool(made.job.async_tp)
    advice = {
        "tp": "a smaller parallel.tp" if overlapped else "compile.async_tp=true, or a smaller parallel.tp",
        "shard": "a larger train.local_batch, or fewer shards with copies (hsdpRxS)",
        "cp": "parallel.cp_method=ring, or a smaller parallel.cp",
    }
    found = []
    for axis, way in advice.items():
        share = made.step.times.seconds.get(f"exposed_{axis}", 0.0) / made.step.seconds
        if share > 0.12:
            found.append(f"{100 * share:.0f} % of the step waits for {axis} transfers ({way})")
    return "; ".join(found) or None


def _few_tokens(made: Plan) -> str | None:
    if made.job.tokens >= 4096:
        return None
    return (
        f"{made.job.tokens} tokens a forward do not fill the device: errors of 20 to 45 % were seen there; a "
        "larger train.local_batch"
    )


def _needless_recompute(made: Plan) -> str | None:
    job = made.job
    for mode in ("none", "selective_op"):
        if job.ac in ("none", mode) or not made.fits:
            continue
        lighter = plan(replace(job, ac=mode))
        if lighter.fits and lighter.total_gib < 0.95 * lighter.limit_gib and lighter.tps > 1.01 * made.tps:
            gain = lighter.tps / made.tps - 1
            return f"ac={mode} fits too ({lighter.total_gib:.1f} GiB) and would be {100 * gain:.0f} % faster"
    return None


def _eager(made: Plan) -> str | None:
    text = "compile=none: rotation and activation run piece by piece; compile=block"
    return None if made.job.compiled else text


_REMARKS: tuple[Remark, ...] = (
    _does_not_fit,
    _tight,
    _lower_bound,
    _tp_across_hosts,
    _small_float8,
    _unfilled_pipe,
    _exposed,
    _few_tokens,
    _needless_recompute,
    _eager,
)
