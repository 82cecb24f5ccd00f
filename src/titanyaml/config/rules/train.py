"""Rules on the loop: schedule, dtypes, names, what is read at the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titanyaml import machine
from titanyaml.config.rules.view import Rule, into
from titanyaml.errors import Problem

RULES: list[Rule] = []
rule = into(RULES)


@rule("schedule", "train.steps")
def schedule_fits_steps(c: Any) -> Problem | None:
    decay = c.schedule.decay_steps if c.schedule.kind == "wsd" else 0
    needed = c.schedule.warmup_steps + decay
    if needed <= c.train.steps:
        return None
    what = f"warm-up of {c.schedule.warmup_steps} steps" + (f" and decay of {decay}" if decay else "")
    hints = [f"train.steps={needed}"]
    hints += [f"schedule.warmup_steps={c.train.steps - decay}"] if decay <= c.train.steps else []
    return Problem(
        "schedule.warmup_steps",
        f"{what} do not fit into train.steps={c.train.steps}",
        allowed=f"at most {c.train.steps} steps together",
        hint=" or ".join(hints),
    )


@rule("schedule")
def wsd_decays(c: Any) -> Problem | None:
    if c.schedule.kind != "wsd" or c.schedule.decay_steps:
        return None
    return Problem(
        "schedule.decay_steps",
        "is 0: wsd without decay is constant",
        allowed="1 or more",
        hint="schedule.decay_steps=1 or schedule=constant",
    )


@rule("kernels.name", "runner.name", "train.compute_dtype")
def fused_kernels_run_here(c: Any) -> Problem | None:
    """``kernels.choice`` says the same of what only torch can see."""
    if c.kernels.name != "fused" or c.runner.name == "check":
        return None
    if not machine.gpus():
        why = "there is no GPU here"
    elif c.train.compute_dtype == "float64":
        why = "train.compute_dtype is float64"
    else:
        return None
    return Problem(
        "kernels.name",
        f"is fused, but {why}: Triton kernels compute in 32 bits on a GPU",
        allowed="auto, torch",
        hint="kernels=torch or kernels=auto",
    )


@rule("train.compute_dtype", "train.param_dtype", "train.reduce_dtype")
def float64_is_everywhere(c: Any) -> Problem | None:
    names = ("compute_dtype", "param_dtype", "reduce_dtype")
    got = {name: getattr(c.train, name) for name in names}
    wide = [name for name in names if got[name] == "float64"]
    if len(wide) in (0, 3):
        return None
    other = next(name for name in names if name not in wide)
    return Problem(
        f"train.{other}",
        f"is {got[other]}, but train.{wide[0]} is float64",
        allowed="float64 for compute_dtype, param_dtype and reduce_dtype together, or for none of them",
        hint=" ".join(f"train.{name}=float64" for name in names if name not in wide)
        + " or "
        + " ".join(f"train.{name}=float32" for name in wide),
    )


@rule("train.compute_dtype", "train.reduce_dtype")
def reduction_is_as_wide_as_compute(c: Any) -> Problem | None:
    if c.train.reduce_dtype != "bfloat16" or c.train.compute_dtype == "bfloat16":
        return None
    return Problem(
        "train.reduce_dtype",
        f"is bfloat16, which may round gradients of compute_dtype={c.train.compute_dtype}",
        allowed="float32; bfloat16 where compute_dtype is bfloat16",
        hint="train.reduce_dtype=float32 or train.compute_dtype=bfloat16",
    )


@rule("optim.groups")
def group_patterns_compile(c: Any) -> Problem | None:
    for index, group in enumerate(c.optim.groups):
        try:
            re.compile(group.pattern)
        except re.error as error:
            return Problem(f"optim.groups[{index}].pattern", f"{group.pattern!r} is no regular expression: {error}")
    return None


@rule("run.name", "run.id")
def names_are_folders(c: Any) -> Problem | None:
    for key, name in (("run.name", c.run.name), ("run.id", c.run.id)):
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            legal = re.sub(r"[/\\]+", "-", name).strip(".-") or "a"
            return Problem(
                key,
                f"is {name!r}, which is no name for a folder",
                allowed="a text without slashes",
                hint=f"{key}={legal}",
            )
    return None


@rule("run.dir")
def run_has_a_folder(c: Any) -> Problem | None:
    if c.run.dir.strip() and Path(c.run.dir).resolve() != Path("/"):
        return None
    return Problem(
        "run.dir",
        f"is {c.run.dir!r}, which is no folder for a run",
        allowed="a folder of its own",
        hint="run.dir=outputs/mine",
    )


@rule("checkpoint.resume")
def resume_path_exists(c: Any) -> Problem | None:
    resume = c.checkpoint.resume
    if resume in ("auto", "none") or (resume and Path(resume).expanduser().exists()):
        return None
    return Problem(
        "checkpoint.resume",
        f"{resume!r} does not exist (looked in {Path.cwd()})",
        allowed="auto, none, or a checkpoint's folder",
        hint="checkpoint.resume=auto or checkpoint.resume=none",
    )


@rule("runner.name", "runner.checkpoint")
def runner_has_a_checkpoint(c: Any) -> Problem | None:
    if c.runner.name not in ("eval", "sample"):
        return None
    given = c.runner.checkpoint
    if given and Path(given).expanduser().exists():
        return None
    message = "is required" if not given else f"{given!r} does not exist (looked in {Path.cwd()})"
    return Problem(
        "runner.checkpoint",
        f"{message}: runner={c.runner.name} reads a model from it",
        allowed="a run folder or a checkpoint folder",
        hint="runner.checkpoint=<folder>",
    )


@rule("runner.name", "validation.batches")
def evaluation_has_batches(c: Any) -> Problem | None:
    if c.runner.name != "eval" or c.validation.batches:
        return None
    return Problem(
        "validation.batches",
        "is 0: runner=eval measures the loss of that many batches",
        allowed="1 or more",
        hint="validation.batches=8",
    )
