"""Rules on what is measured: profiles and benchmarks."""

from __future__ import annotations

import re
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.hints import switch
from titanyaml.config.rules.view import Rule, into
from titanyaml.config.world import count_ranks
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


def _off(c: Any) -> str:
    return switch(c, "profile=none", kind="none")


@rule("profile.kind")
def snapshots_need_a_gpu(c: Any) -> Problem | None:
    if c.profile.kind not in ("memory", "both") or machine.gpus():
        return None
    return Problem(
        "profile.kind",
        f"is {c.profile.kind}, but snapshots show CUDA memory, and this machine has no GPU",
        allowed="trace, none",
        hint=f"profile=trace or {_off(c)}",
    )


@rule("profile", "runner.name")
def profile_is_of_training(c: Any) -> Problem | None:
    if c.profile.kind == "none" or c.runner.name not in ("bench", "eval", "sample"):
        return None
    why = "would disturb what it measures" if c.runner.name == "bench" else "trains nothing"
    return Problem(
        "profile.kind",
        f"is {c.profile.kind}, but runner={c.runner.name} {why}",
        allowed="none, or runner=train",
        hint=f"{_off(c)} or runner=train",
    )


@rule("profile", "train.steps")
def profile_fits_steps(c: Any) -> Problem | None:
    window = c.profile.wait + c.profile.warmup + c.profile.active
    if c.profile.kind == "none" or window <= c.train.steps:
        return None
    return Problem(
        "profile.wait",
        f"a window of {window} steps (wait + warmup + active) does not fit into train.steps={c.train.steps}",
        allowed=f"at most {c.train.steps} together",
        hint=f"train.steps={window} or {_off(c)}",
    )


@rule("profile", "parallel", "launch")
def profiled_ranks_exist(c: Any) -> Problem | None:
    ranks = count_ranks(c)
    if c.profile.kind == "none" or ranks is None:
        return None
    absent = [rank for rank in c.profile.ranks if not 0 <= rank < ranks]
    if c.profile.ranks and not absent:
        return None
    what = f"has no rank {absent[0]}" if absent else "is profiled on no rank"
    return Problem(
        "profile.ranks",
        f"is {c.profile.ranks}, but a run of {ranks} rank{'s' * (ranks > 1)} {what}",
        allowed=f"numbers of 0 .. {ranks - 1}",
        hint=f"'profile.ranks=[0]' or {_off(c)}",
    )


def bench_steps(runner: Any) -> int:
    """Steps that runner=bench takes."""
    profiled = runner.profiled_steps + 1 if runner.profiled_steps else 0  # one more starts the profiler
    return runner.skipped_steps + runner.measured_steps + profiled


@rule("runner", "train.steps")
def bench_fits_steps(c: Any) -> Problem | None:
    """A benchmark takes the first steps of the run that the configuration describes."""
    if c.runner.name != "bench":
        return None
    needed = bench_steps(c.runner)
    if needed <= c.train.steps:
        return None
    return Problem(
        "train.steps",
        f"is {c.train.steps}, but runner=bench takes {needed} (runner.skipped_steps + "
        "runner.measured_steps + runner.profiled_steps and one before these)",
        allowed=f">= {needed}",
        hint=f"train.steps={needed}",
    )


@rule("runner.name", "validation.batches", "checkpoint.enabled")
def bench_only_trains(c: Any) -> Problem | None:
    if c.runner.name != "bench" or not (c.validation.batches or c.checkpoint.enabled):
        return None
    key = "validation.batches" if c.validation.batches else "checkpoint.enabled"
    return Problem(
        key,
        "asks for what runner=bench leaves out, since it lies outside the step",
        hint="validation=none checkpoint=none",
    )


@rule("runner")
def entity_is_part_of_a_file_name(c: Any) -> Problem | None:
    if c.runner.name != "bench" or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", c.runner.entity):
        return None
    legal = re.sub(r"[^A-Za-z0-9.-]+", "-", c.runner.entity).strip("-.") or "local"
    return Problem(
        "runner.entity",
        f"is {c.runner.entity!r}; it ends the name of a file whose parts are joined by _",
        allowed="letters, digits, dots and hyphens",
        hint=f"runner.entity={legal}",
    )


@rule("hardware.calibrate", "runner.name")
def benchmarks_calibrate(c: Any) -> Problem | None:
    if not c.hardware.calibrate or c.runner.name == "bench":
        return None
    return Problem(
        "hardware.calibrate",
        f"is true, but runner={c.runner.name} measures no rates",
        allowed="true with runner=bench",
        hint="runner=bench or hardware.calibrate=false",
    )
