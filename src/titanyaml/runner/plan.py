"""What a run will need and reach, on devices that need not be here (``runner=plan``). Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from titanyaml.config import degrees
from titanyaml.config.schema import Config
from titanyaml.planner.model import from_config
from titanyaml.planner.model import plan as planning
from titanyaml.planner.model.plan import Plan
from titanyaml.planner.report import page, timeline
from titanyaml.planner.report.budget import budget
from titanyaml.planner.report.remarks import warnings
from titanyaml.planner.search import choose_ac as planned
from titanyaml.planner.search import remedies, space
from titanyaml.planner.search.choose_ac import Choice
from titanyaml.rundir import RunDir, atomic_write


def plan(config: Config, run: RunDir, env: None) -> dict[str, Any]:
    """Plan ``config``: print tables, write plan.json, plan.md and timeline.json. A plan that does not fit is a result.

    Returns:
        ``metric`` and ``tps``: planned tokens per second and device, 0 where it does not fit; and ``fits``.

    Raises:
        ConfigError: the device, the links or the model are not known well enough.
    """
    console = Console(width=None if Console().is_terminal else 160)
    config, choice = _settled(config)
    made = planning.plan(from_config.job(config))
    record = _record(config, made) | ({} if choice is None else {"ac": choice.record()})
    if config.runner.trace:
        from titanyaml.runner import tracing  # torch, and seconds

        record["trace"] = tracing.compare(config)
    page.show(record, console)
    if choice is not None:
        console.print(choice.sentence(), highlight=False, soft_wrap=True)
    atomic_write(run.path / "plan.json", json.dumps(record, indent=1) + "\n")
    atomic_write(run.path / "plan.md", page.markdown(record))
    atomic_write(run.path / "timeline.json", json.dumps(timeline.trace_events(made.step)) + "\n")
    console.print(f"written: {run.path}/plan.json, plan.md, timeline.json", highlight=False, soft_wrap=True)
    speed = made.tps if made.fits else 0.0
    return {"metric": speed, "tps": speed, "fits": made.fits}


def _settled(config: Config) -> tuple[Config, Choice | None]:
    """``ac=auto`` decided for the planned device; where nothing fits, the plan of the least memory is the result."""
    if config.ac.mode != "auto":
        return config, None
    device = config.hardware
    limit_gib, why = planned.limit(config, device_gib=device.memory_gib, reserve_gib=device.reserve_gib)
    choice = planned.choose(config, from_config.job(config), limit_gib=limit_gib, why=why)
    made = planned.concrete(config, choice)
    if config.ac.memory_gib is not None:  # what must be met, and named where it is not
        made = replace(made, hardware=replace(device, memory_gib=limit_gib + device.reserve_gib))
    return made, choice


def _record(config: Config, made: Plan) -> dict[str, Any]:
    """Everything that plan.json holds."""
    mesh = {axis: made.job.mesh.size(axis) for axis in degrees.AXES}
    tokens = config.runner.token_budget or config.train.steps * made.job.tokens_per_step
    spent = budget(made, tokens=tokens, power_w=config.hardware.power_w, price_per_hour=config.hardware.price_per_hour)
    remarks = warnings(made)
    if config.parallel.fsdp_cpu_offload:
        remarks.append("parallel.fsdp_cpu_offload is planned as if weights and optimizer were on the device")
    if config.quant.emulate:
        remarks.append("quant.emulate is planned as if nothing were cast: it is slower than bfloat16")
    ways = remedies.changes(config, made)
    if not made.fits:
        told = "; ".join(map(_way, ways.found))
        remarks[0] += f". What fits: {told}" * bool(told)
        remarks[1:1] = [few] if (few := ways.few()) else []
    return {
        "model": config.model.name,
        "mesh_name": space.name(mesh),
        **made.record(),
        "budget": spent,
        "tokens_per_day": spent["tokens_per_day"],
        "gpu_hours": spent["gpu_hours"],
        "cost": spent["cost"],
        "changes": [asdict(way) for way in ways.found],
        "warnings": remarks,
    }


def _way(way: remedies.Change) -> str:
    cost = f"{100 * way.slowdown:.0f} % slower" if way.slowdown > 0 else f"{-100 * way.slowdown:.0f} % faster"
    return f"{way.typed} ({cost}, {way.devices} devices)"
