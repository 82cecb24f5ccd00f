"""Rules on what is measured: profiles, benchmarks and calibrations."""

import re
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.hints import with_resets
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.config.world import count_ranks
from titanyaml.errors import Problem

rule = RuleTable()


def _no_profile(c: Any) -> str:
    return with_resets(c, "profile=none", kind="none")


@rule("profile.kind")
def memory_profile_needs_gpu(c: Any) -> Problem | None:
    kind = c.profile.kind
    if kind not in ("memory", "both") or machine.gpus():
        return None
    message = f"is {kind}, but snapshots show CUDA memory, and this machine has no GPU"
    return problem("profile.kind", message, "trace, none", "profile=trace", _no_profile(c))


@rule("profile", "runner.name")
def profile_needs_training(c: Any) -> Problem | None:
    runner = c.runner.name
    if c.profile.kind == "none" or runner not in ("bench", "eval", "sample"):
        return None
    reason = "would disturb what it measures" if runner == "bench" else "trains nothing"
    message = f"is {c.profile.kind}, but runner={runner} {reason}"
    return problem("profile.kind", message, "none, or runner=train", _no_profile(c), "runner=train")


@rule("profile", "train.steps")
def profile_fits_steps(c: Any) -> Problem | None:
    steps = c.train.steps
    window = c.profile.wait + c.profile.warmup + c.profile.active
    if c.profile.kind == "none" or window <= steps:
        return None
    message = f"a window of {window} steps (wait + warmup + active) does not fit into train.steps={steps}"
    return problem("profile.wait", message, f"at most {steps} together", f"train.steps={window}", _no_profile(c))


@rule("profile", "parallel", "launch")
def profile_ranks_exist(c: Any) -> Problem | None:
    ranks = count_ranks(c)
    if c.profile.kind == "none" or ranks is None:
        return None
    # an empty list would profile nothing, without a word
    absent = [rank for rank in c.profile.ranks if not 0 <= rank < ranks]
    if c.profile.ranks and not absent:
        return None
    fault = f"has no rank {absent[0]}" if absent else "is profiled on no rank"
    plural = "s" if ranks > 1 else ""
    message = f"is {c.profile.ranks}, but a run of {ranks} rank{plural} {fault}"
    return problem("profile.ranks", message, f"numbers of 0 .. {ranks - 1}", "'profile.ranks=[0]'", _no_profile(c))


def bench_steps(runner: Any) -> int:
    """Steps that runner=bench takes; ``runner`` is the section of that name."""
    profiled = runner.profiled_steps + 1 if runner.profiled_steps else 0  # the profiler starts one step earlier
    return int(runner.skipped_steps + runner.measured_steps + profiled)


@rule("runner", "train.steps")
def bench_fits_steps(c: Any) -> Problem | None:
    # a benchmark takes the first steps of the run that the configuration describes
    if c.runner.name != "bench" or (steps := bench_steps(c.runner)) <= c.train.steps:
        return None
    terms = "runner.skipped_steps + runner.measured_steps + runner.profiled_steps and one before these"
    message = f"is {c.train.steps}, but runner=bench takes {steps} ({terms})"
    return problem("train.steps", message, f">= {steps}", f"train.steps={steps}")


@rule("runner.name", "validation.batches", "checkpoint.enabled")
def bench_only_trains(c: Any) -> Problem | None:
    if c.runner.name != "bench" or not (c.validation.batches or c.checkpoint.enabled):
        return None
    key = "validation.batches" if c.validation.batches else "checkpoint.enabled"
    message = "asks for what runner=bench leaves out, since it lies outside the step"
    # both at once: where one is on, the other mostly is too
    return problem(key, message, "", "validation=none checkpoint=none")


@rule("runner")
def bench_entity_fits_file_name(c: Any) -> Problem | None:
    if c.runner.name != "bench" or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", c.runner.entity):
        return None
    legal = re.sub(r"[^A-Za-z0-9.-]+", "-", c.runner.entity).strip("-.") or "local"
    message = f"is {c.runner.entity!r}; it ends the name of a file whose parts are joined by _"
    return problem("runner.entity", message, "letters, digits, dots and hyphens", f"runner.entity={legal}")


@rule("hardware.calibrate", "runner.name")
def calibrate_needs_bench(c: Any) -> Problem | None:
    if not c.hardware.calibrate or c.runner.name == "bench":
        return None
    message = f"is true, but runner={c.runner.name} measures no rates"
    fixes = ("runner=bench", "hardware.calibrate=false")
    return problem("hardware.calibrate", message, "true with runner=bench", *fixes)
