"""Rules on the loop: schedule, kernels, dtypes, names of folders, what is read at the start."""

import re
from pathlib import Path
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.view import RuleTable, problem
from titanyaml.errors import Problem

rule = RuleTable()


@rule("schedule", "train.steps")
def schedule_fits_steps(c: Any) -> Problem | None:
    decay = c.schedule.decay_steps if c.schedule.kind == "wsd" else 0
    warmup, steps = c.schedule.warmup_steps, c.train.steps
    if warmup + decay <= steps:
        return None
    phases = f"warm-up of {warmup} steps and decay of {decay}" if decay else f"warm-up of {warmup} steps"
    shorter = f"schedule.warmup_steps={steps - decay}" if decay <= steps else ""
    message = f"{phases} do not fit into train.steps={steps}"
    allowed = f"at most {steps} steps together"
    return problem("schedule.warmup_steps", message, allowed, f"train.steps={warmup + decay}", shorter)


@rule("schedule")
def wsd_needs_decay_steps(c: Any) -> Problem | None:
    if c.schedule.kind != "wsd" or c.schedule.decay_steps:
        return None
    fixes = ("schedule.decay_steps=1", "schedule=constant")
    return problem("schedule.decay_steps", "is 0: wsd without decay is constant", "1 or more", *fixes)


@rule("kernels.name", "runner.name", "train.compute_dtype")
def fused_kernels_need_gpu(c: Any) -> Problem | None:
    # ``kernels.kernel_choice`` reports what only torch can see
    if c.kernels.name != "fused" or c.runner.name == "check":
        return None
    if not machine.gpus():
        obstacle = "there is no GPU here"
    elif c.train.compute_dtype == "float64":
        obstacle = "train.compute_dtype is float64"
    else:
        return None
    message = f"is fused, but {obstacle}: Triton kernels compute in 32 bits on a GPU"
    return problem("kernels.name", message, "auto, torch", "kernels=torch", "kernels=auto")


@rule("train.compute_dtype", "train.param_dtype", "train.reduce_dtype")
def float64_dtypes_go_together(c: Any) -> Problem | None:
    names = ("compute_dtype", "param_dtype", "reduce_dtype")
    dtypes = {name: getattr(c.train, name) for name in names}
    wide = [name for name in names if dtypes[name] == "float64"]
    narrow = [name for name in names if dtypes[name] != "float64"]
    if not wide or not narrow:
        return None
    message = f"is {dtypes[narrow[0]]}, but train.{wide[0]} is float64"
    allowed = f"float64 for {names[0]}, {names[1]} and {names[2]} together, or for none of them"
    fixes = [" ".join(f"train.{name}=float64" for name in narrow), " ".join(f"train.{name}=float32" for name in wide)]
    return problem(f"train.{narrow[0]}", message, allowed, *fixes)


@rule("train.compute_dtype", "train.reduce_dtype")
def reduce_dtype_is_as_wide_as_compute_dtype(c: Any) -> Problem | None:
    if c.train.reduce_dtype != "bfloat16" or c.train.compute_dtype == "bfloat16":
        return None
    message = f"is bfloat16, which may round gradients of compute_dtype={c.train.compute_dtype}"
    fixes = ("train.reduce_dtype=float32", "train.compute_dtype=bfloat16")
    return problem("train.reduce_dtype", message, "float32; bfloat16 where compute_dtype is bfloat16", *fixes)


@rule("run.name", "run.id")
def run_names_are_folder_names(c: Any) -> Problem | None:
    for key, name in (("run.name", c.run.name), ("run.id", c.run.id)):
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            legal = re.sub(r"[/\\]+", "-", name).strip(".-") or "a"
            message = f"is {name!r}, which is no name for a folder"
            return problem(key, message, "a text without slashes", f"{key}={legal}")
    return None


@rule("run.dir")
def run_dir_is_a_folder(c: Any) -> Problem | None:
    folder = c.run.dir
    # an empty path would resolve to the current folder
    if folder.strip() and Path(folder).resolve() != Path("/"):
        return None
    message = f"is {folder!r}, which is no folder for a run"
    return problem("run.dir", message, "a folder of its own", "run.dir=outputs/mine")


@rule("checkpoint.resume")
def checkpoint_to_resume_exists(c: Any) -> Problem | None:
    resume = c.checkpoint.resume
    if resume in ("auto", "none") or (resume and Path(resume).expanduser().exists()):
        return None
    message = f"{resume!r} does not exist (looked in {Path.cwd()})"
    fixes = ("checkpoint.resume=auto", "checkpoint.resume=none")
    return problem("checkpoint.resume", message, "auto, none, or a checkpoint's folder", *fixes)


@rule("runner.name", "runner.checkpoint")
def runner_checkpoint_exists(c: Any) -> Problem | None:
    runner = c.runner.name
    if runner not in ("eval", "sample"):
        return None
    folder = c.runner.checkpoint
    if folder and Path(folder).expanduser().exists():
        return None
    failure = f"{folder!r} does not exist (looked in {Path.cwd()})" if folder else "is required"
    message = f"{failure}: runner={runner} reads a model from it"
    return problem("runner.checkpoint", message, "a run folder or a checkpoint folder", "runner.checkpoint=<folder>")


@rule("runner.name", "validation.batches")
def eval_needs_batches(c: Any) -> Problem | None:
    if c.runner.name != "eval" or c.validation.batches:
        return None
    message = "is 0: runner=eval measures the loss of that many batches"
    return problem("validation.batches", message, "1 or more", "validation.batches=8")
