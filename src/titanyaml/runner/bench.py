"""Measure the training step (``runner=bench``): what is measured is what ``runner=train`` runs.

First the ceilings of this device at the model's exact shapes, then the first steps of the configured run: warm-up,
measured steps, and a short window under the profiler. The profiler costs time on the host, so that no measured step
runs under it. Validation, checkpoints and Aim are off (``conf/runner/bench.yaml``).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, schedule

from titanyaml import ceilings, hardware, machine
from titanyaml.config import dump
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.models import decoder
from titanyaml.pipeline.protocol import dtype_name
from titanyaml.rundir import RunDir, atomic_write, utc_now
from titanyaml.runner import bench_report, calibrate, setup
from titanyaml.runner.breakdown import breakdown
from titanyaml.runner.meter import StartupClock
from titanyaml.runner.profiler import activities
from titanyaml.runner.train import Trainer, build_trainer

if TYPE_CHECKING:
    from titanyaml.ceilings import Ceilings

log = logging.getLogger("titanyaml")


def bench(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Measure; write ``bench.json`` and the report ``<model>_<hardware>_<yyyymm>_<entity>.md``.

    Returns ``metric`` = ``tps`` (tokens/s per device, by the median step), ``step_s``, ``mfu``, ``fraction_of_floor``.
    """
    clock = StartupClock()
    if config.hardware.calibrate:
        calibrate.calibrate(run, env)
    device_ceilings = measure_ceilings(config, env)
    clock.lap("ceilings")
    # every step needs a record; logging is outside the clocks of a step
    log_all = dataclasses.replace(config, train=dataclasses.replace(config.train, log_every=1))
    trainer = build_trainer(log_all, run, env, clock=clock)
    gc.collect()
    gc.disable()  # until trainer.close: there are too few steps to collect in between, as training does
    try:
        records = [_step(trainer) for _ in range(config.runner.skipped_steps + config.runner.measured_steps)]
        kernels = _profile(trainer, env)
        result = summary(config, env, trainer, records[config.runner.skipped_steps :], device_ceilings)
        trainer.close_trackers("done")
    finally:
        trainer.close()
    result |= {"kernels": kernels, "ceilings": device_ceilings.record(), "environment": environment(env)}
    if trainer.ac_choice is not None:
        result["ac"] = trainer.ac_choice.record()
    if env.is_main:
        atomic_write(run.path / "bench.json", json.dumps(result, indent=1) + "\n")
        report = run.path / bench_report.file_name(result, entity=config.runner.entity)
        atomic_write(report, bench_report.text(config, run, result))
        _log_result(result, report)
    figures = {name: result[name] for name in ("tps", "step_s", "mfu", "fraction_of_floor") if result[name] is not None}
    return {"metric": result["tps"], "step": trainer.step, **figures}


def measure_ceilings(config: Config, env: Env) -> Ceilings:
    """What this device can do at the shapes of one rank's work. Every rank measures, since all would wait anyway."""
    dims, train = ParallelDims.resolve(config.parallel, env.world_size), config.train
    model, batch = decoder.build(config.model), {"seq_len": train.seq_len, "local_batch": train.local_batch}
    work = ceilings.rank_work(model, model.facts, dims, **batch, accumulation=setup.accumulation(config, dims))
    measured = ceilings.measure(work, device=env.device, dtype=setup.compute_dtype(config, env.device))
    if env.is_main:
        for precision in measured.precisions:
            if floor := measured.floor(precision):
                log.info("floor of a step, linear layers in %s: %.1f ms", precision, 1e3 * floor["step"])
    return measured


def _step(trainer: Trainer) -> dict[str, Any]:
    """Take one step as training does; returns its record."""
    trainer.one_step()
    if trainer.step == 1:
        trainer.after_first_step()
    return trainer.last_record


def _profile(trainer: Trainer, env: Env) -> dict[str, Any] | None:
    """Time by class of kernel; None with ``runner.profiled_steps=0``."""
    steps = trainer.config.runner.profiled_steps
    if not steps:
        return None
    wall_s = 0.0
    cycle = schedule(wait=0, warmup=1, active=steps, repeat=1)  # a second cycle would drop what the first one recorded
    with profile(activities=activities(env.device), schedule=cycle) as trace:
        for number in range(1 + steps):
            step_s = _step(trainer)["step_s"]
            wall_s += step_s if number else 0.0  # the first one pays for the start of the profiler
            trace.step()
    return breakdown(trace, steps=steps, wall_s=wall_s, device=env.device)


def summary(
    config: Config, env: Env, trainer: Trainer, records: list[dict[str, Any]], device_ceilings: Ceilings
) -> dict[str, Any]:
    """The figures of the measured steps; what is not known is None.

    ``tps`` = tokens of a step / median seconds of a step / devices. ``tps_spread`` = (largest - smallest step time) /
    median. ``mfu`` = tps * FLOPs per token / peak. ``fraction_of_floor`` = floor / median seconds of a step.
    """
    # the median: one slow step, such as a collection on another rank, is no property of the run
    times = [record["step_s"] for record in records]
    step_s, meter = statistics.median(times), trainer.meter
    tps = meter.tokens_per_step / step_s / env.world_size
    tflops = tps * meter.flops_per_token / 1e12
    context = trainer.built.context
    precision, quantised = _precision(trainer)
    floor = device_ceilings.floor(precision, quantised=quantised)
    return {
        "model": config.model.name,
        "hardware": _hardware(config, env),
        "date": utc_now(),
        "config_hash": dump.config_hash(config),
        "devices": env.world_size,
        "precision": precision,
        "parameters": context.facts.num_params,
        "mesh": dataclasses.asdict(context.dims),
        "tps": tps,
        "tps_spread": (max(times) - min(times)) / step_s,
        "step_s": step_s,
        "steps_s": times,
        "tokens_per_step": meter.tokens_per_step,
        "flops_per_token": meter.flops_per_token,
        "tflops": tflops,
        "peak_tflops": meter.peak_tflops,
        "mfu": tflops / meter.peak_tflops if meter.peak_tflops else None,
        "floor_ms": floor and {part: 1e3 * s for part, s in floor.items()},
        "fraction_of_floor": floor["step"] / step_s if floor else None,
        "floor_note": "" if floor else device_ceilings.why_no_floor(precision),
        "data_wait_s": statistics.median(record["data_wait_s"] for record in records),
        "mem_reserved_gib": records[-1].get("mem_reserved_gib"),
        "mem_active_gib": records[-1].get("mem_active_gib"),
        "loss": records[-1]["loss"],
        "startup_s": trainer.clock.record(),
    }


def _precision(trainer: Trainer) -> tuple[str, list[str] | None]:
    """(precision of the blocks' GEMMs, names of the layers that have it: None: all)."""
    change = dict(trainer.built.changes).get("quant")
    if change is None:
        return dtype_name(trainer.built.context.compute_dtype), None
    return trainer.config.pipeline.plugins["quant"]["recipe"], change.modules


def _hardware(config: Config, env: Env) -> str:
    """The option of conf/hardware, else the name that the driver tells, fit for a file name."""
    if config.hardware.name != "auto":
        return config.hardware.name
    return hardware.detect(env.device) or torch.cuda.get_device_name(env.device).lower().replace(" ", "-")


def environment(env: Env) -> dict[str, Any]:
    """``machine.describe``, and what only torch knows."""
    facts = machine.describe()
    name = torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else facts["processor"]
    cudnn = torch.backends.cudnn.version()
    return facts | {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn}


def _log_result(result: dict[str, Any], report: Path) -> None:
    speed = f"{result['tps']:,.0f} tokens/s per device"
    step = f"{1e3 * result['step_s']:.1f} ms a step, spread {100 * result['tps_spread']:.1f} %"
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    floor = result["floor_note"] or f"{result['fraction_of_floor']:.1%} of the floor"
    log.info("%s (%s)%s, %s", speed, step, mfu, floor)
    log.info("report: %s", report)
