"""What a reviewer would say about a plan, each with what to do about it."""

from collections.abc import Iterator
from dataclasses import replace

from titanyaml.config.decoder_shape import LinearShape
from titanyaml.planner.model import cost, operators
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import GIB
from titanyaml.planner.model.plan import Plan, plan_job
from titanyaml.planner.model.primitives import Gemm

#: Share of memory above which the allocator may have to free cached blocks and retry.
_TIGHT_SHARE = 0.92
#: Share of a step from which waiting for one axis is worth a remark.
_EXPOSED_SHARE = 0.12


def remarks_on(plan: Plan) -> list[str]:
    """All remarks that apply. The first says where a plan does not fit: runner/plan.py adds what would fit to it."""
    return [*_on_memory(plan), *_on_speed(plan)]


def _on_memory(plan: Plan) -> Iterator[str]:
    gib, limit = plan.total_gib, plan.limit_gib
    if not plan.fits:
        part, size = max(plan.memory.parts.items(), key=lambda item: item[1])
        largest = f"the largest part is {part} with {size / GIB:.1f} GiB"
        yield f"does not fit: {gib:.1f} GiB of {limit:.1f}, {largest}"
    if _TIGHT_SHARE < gib / limit <= 1.0:
        risk = "the allocator may have to free and retry, which costs speed, and memory is planned within about 5 %"
        yield f"{100 * gib / limit:.0f} % of the memory is used: {risk}"
    if plan.memory.lower_bound:
        yield "memory of a pipeline is a lower bound: up to a quarter more was published"


def _on_speed(plan: Plan) -> Iterator[str]:
    job, step = plan.job, plan.step
    tp, pp, host = job.mesh.tp, job.mesh.pp, job.network.gpus_per_host
    if tp > host:
        remark = f"parallel.tp={tp} spans hosts of {host}: each block waits for the network card"
        yield f"{remark}; parallel.tp={host} or less"
    plain, linears = replace(job, quant="none"), job.shape.linears if job.uses_float8 else ()
    if slower := [linear.name for linear in linears if _linear_seconds(job, linear) >= _linear_seconds(plain, linear)]:
        remark = f"float8 gains nothing in {', '.join(slower)}: casts cost more than the products save at these shapes"
        yield f"{remark}; quant.filter_fqns=[{','.join(slower)}] or a larger batch"
    if pp > 1 and step.bubble >= 0.2:
        remark = f"pipeline ranks wait {100 * step.bubble:.0f} % of the step: {job.microbatches} microbatches"
        yield f"{remark} for {pp} ranks; a larger train.local_batch, or parallel.pp_schedule=Interleaved1F1B"
    advice = {
        "tp": "a smaller parallel.tp" if job.async_tp else "compile.async_tp=true, or a smaller parallel.tp",
        "shard": "a larger train.local_batch, or fewer shards with copies (hsdpRxS)",
        "cp": "parallel.cp_method=ring, or a smaller parallel.cp",
    }
    shares = {axis: step.times.seconds.get(f"exposed_{axis}", 0.0) / step.seconds for axis in advice}
    waits = {axis: f"{100 * share:.0f} % of the step waits for {axis} transfers" for axis, share in shares.items()}
    if exposed := [f"{waits[axis]} ({advice[axis]})" for axis in advice if shares[axis] > _EXPOSED_SHARE]:
        yield "; ".join(exposed)
    if job.tokens < 4096:
        remark = f"{job.tokens} tokens a forward do not fill the device: errors of 20 to 45 % were seen there"
        yield f"{remark}; a larger train.local_batch"
    yield from _needless_recompute(plan)
    if not job.compiled:
        yield "compile=none: rotation and activation run piece by piece; compile=block"


def _linear_seconds(job: Job, linear: LinearShape) -> float:
    """Seconds of one linear layer's three GEMMs (forward, both gradients) and its casts."""
    inputs, outputs = linear.local(job.mesh.tp)
    dtype = "fp8" if job.uses_float8 else "bf16"
    shapes = ((job.tokens, outputs, inputs), (job.tokens, inputs, outputs), (outputs, inputs, job.tokens))
    seconds = sum(cost.gemm_seconds(job, Gemm(linear.name, *shape, dtype)) for shape in shapes)
    if not job.uses_float8:
        return seconds
    # the cast of an input is shared by all layers that read it
    readers = sum(reader.reads == linear.reads for reader in job.shape.linears)
    elements = job.tokens * (inputs / readers + outputs) + inputs * outputs
    return seconds + elements * operators.cast_bytes(job) / cost.bandwidth(job)


def _needless_recompute(plan: Plan) -> Iterator[str]:
    """The lightest recomputation that fits too, where it is faster."""
    job = plan.job
    for mode in ("none", "selective_op"):
        if job.ac in ("none", mode) or not plan.fits:
            continue
        lighter = plan_job(replace(job, ac=mode))
        # with 5 % to spare, within which memory is planned
        if lighter.fits and lighter.total_gib < 0.95 * lighter.limit_gib and lighter.tps > 1.01 * plan.tps:
            gain = lighter.tps / plan.tps - 1
            yield f"ac={mode} fits too ({lighter.total_gib:.1f} GiB) and would be {100 * gain:.0f} % faster"
            return
