"""Memory, speed and cost of a run, on devices that need not be here (``runner=plan``). Imports no torch."""

import json
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from titanyaml.config import degrees
from titanyaml.config.schema import Config
from titanyaml.planner.model import from_config
from titanyaml.planner.model.plan import Plan, plan_job
from titanyaml.planner.report import render
from titanyaml.planner.report.remarks import remarks_on
from titanyaml.planner.search import choose_ac
from titanyaml.planner.search.choose_ac import AcChoice
from titanyaml.planner.search.remedies import Remedy, find_remedies
from titanyaml.planner.search.space import mesh_name
from titanyaml.rundir import RunDir, atomic_write


def plan(config: Config, run: RunDir, env: None) -> dict[str, Any]:
    """Plan ``config``: print tables, write plan.json, plan.md and timeline.json. A plan that does not fit is a result.

    Returns:
        ``metric`` and ``tps``: planned tokens per second and device, 0 where it does not fit; and ``fits``.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    console = Console(width=None if Console().is_terminal else 160)
    config, choice = _resolve_ac(config)
    planned = plan_job(from_config.job(config))
    record = _record(config, planned) | ({} if choice is None else {"ac": choice.record()})
    if config.runner.trace:
        from titanyaml.runner import tracing  # imports torch, and takes seconds

        record["trace"] = tracing.compare(config)
    render.show(record, console)
    if choice is not None:
        console.print(choice.sentence(), highlight=False, soft_wrap=True)
    atomic_write(run.path / "plan.json", json.dumps(record, indent=1) + "\n")
    atomic_write(run.path / "plan.md", render.markdown(record))
    atomic_write(run.path / "timeline.json", json.dumps(render.timeline(planned.step)) + "\n")
    console.print(f"written: {run.path}/plan.json, plan.md, timeline.json", highlight=False, soft_wrap=True)
    tps = planned.tps if planned.fits else 0.0
    return {"metric": tps, "tps": tps, "fits": planned.fits}


def _resolve_ac(config: Config) -> tuple[Config, AcChoice | None]:
    """``ac=auto`` for the planned device; where nothing fits, the choice of the least memory, whose plan says so."""
    if config.ac.mode != "auto":
        return config, None
    limit = choose_ac.memory_limit(config, device_gib=config.hardware.memory_gib)
    choice = choose_ac.choose(config, from_config.job(config), limit)
    resolved = choose_ac.concrete(config, choice)
    if config.ac.memory_gib is not None:  # the plan is held to the typed limit, as a device with so much memory
        device = replace(config.hardware, memory_gib=limit.gib + config.hardware.reserve_gib)
        resolved = replace(resolved, hardware=device)
    return resolved, choice


def _record(config: Config, planned: Plan) -> dict[str, Any]:
    """The content of plan.json."""
    mesh = {axis: planned.job.mesh.size(axis) for axis in degrees.AXES}
    tokens = config.runner.token_budget or config.train.steps * planned.job.tokens_per_step
    device = config.hardware
    spent = planned.budget(tokens, power_w=device.power_w, price_per_hour=device.price_per_hour)
    remarks = remarks_on(planned)
    if config.parallel.fsdp_cpu_offload:
        remarks.append("parallel.fsdp_cpu_offload is planned as if weights and optimizer were on the device")
    if config.quant.emulate:
        remarks.append("quant.emulate is planned as if nothing were cast: it is slower than bfloat16")
    search = find_remedies(config, planned)
    if not planned.fits:  # then the first remark says so
        if search.remedies:
            remarks[0] += f". What fits: {'; '.join(map(_describe, search.remedies))}"
        # right behind it, where fewer than three changes fit
        remarks[1:1] = filter(None, [search.remark()])
    return {
        "model": config.model.name,
        "mesh_name": mesh_name(mesh),
        **planned.record(),
        "budget": spent,
        **{name: spent[name] for name in ("tokens_per_day", "gpu_hours", "cost")},
        "changes": [asdict(remedy) for remedy in search.remedies],
        "warnings": remarks,
    }


def _describe(remedy: Remedy) -> str:
    percent = 100 * abs(remedy.slowdown)
    cost = f"{percent:.0f} % slower" if remedy.slowdown > 0 else f"{percent:.0f} % faster"
    return f"{remedy.typed} ({cost}, {remedy.devices} devices)"
