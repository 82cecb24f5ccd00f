"""Rules of pipeline parallelism: stages have layers, microbatches fill the pipeline, a schedule file can be run.

The functions named ``check_...`` take plain values; the plugin (``plugins.pp``) calls them too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanyaml.config import schema
from titanyaml.config.rules.hints import reset_nproc
from titanyaml.config.rules.view import RuleTable, nearest_numbers, problem, settings
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema_keys import keys_of
from titanyaml.config.world import count_ranks, resolve_degree, resolve_token_degree
from titanyaml.errors import Problem
from titanyaml.pipeline_schedule import actions, stages
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS
from titanyaml.pipeline_schedule.validate import first_violation

rule = RuleTable()

_DEFAULTS = {name: key.default for name, key in keys_of(schema.Parallel).items() if name.startswith("pp_")}


def _changed(c: Any, *names: str) -> list[str]:
    """Those of the keys that differ from their defaults."""
    return [name for name in names if getattr(c.parallel, name) != _DEFAULTS[name]]


def _spell(c: Any, name: str) -> str:
    return spell(getattr(c.parallel, name))


def _reset(names: list[str]) -> str:
    return " ".join(f"parallel.{name}={spell(_DEFAULTS[name])}" for name in names)


def _ranks(c: Any) -> int:
    """Pipeline ranks; 1 where they are unknown: another rule speaks."""
    return resolve_degree(c, "pp") or 1


def read_grid(csv: str | None) -> actions.Grid | None:
    """The schedule in the file; None where there is none, or it cannot be read, which ``check_file`` reports."""
    try:
        return None if csv is None else actions.read(Path(csv).expanduser())
    except (OSError, ValueError):
        return None


def count_stages(schedule: str, csv: str | None, stages_per_rank: int | None, ranks: int) -> int | None:
    """Stages of the whole pipeline; None where the schedule cannot be run."""
    if csv is not None:
        grid = read_grid(csv)
        return None if grid is None or first_violation(grid, ranks=ranks) else len(actions.stage_owners(grid))
    kind = SCHEDULE_KINDS[schedule]
    per_rank = kind.stages_per_rank(stages_per_rank)
    return per_rank * ranks if kind.allows_stages(per_rank) else None


def _count_stages(c: Any) -> int | None:
    """As ``count_stages``; None without a pipeline too."""
    ranks = _ranks(c)
    if ranks == 1:
        return None
    return count_stages(c.parallel.pp_schedule, c.parallel.pp_schedule_csv, c.parallel.pp_stages_per_rank, ranks)


def _count_microbatches(c: Any) -> int | None:
    """Microbatches of a step; None without a pipeline, without ``train.global_batch``, or if it does not divide."""
    batch, pp = c.train.global_batch, _ranks(c)
    if batch is None or pp == 1 or (ranks := count_ranks(c)) is None:
        return None
    # cp, tp and pp ranks work on the same sequences; all others on sequences of their own
    cp, tp = c.parallel.cp, c.parallel.tp
    if min(cp, tp) < 1 or ranks % (cp * tp * pp):
        return None
    sequences = c.train.local_batch * (ranks // (cp * tp * pp))
    return None if batch % sequences else int(batch // sequences)


@rule("parallel", "launch")
def pp_keys_need_pp(c: Any) -> Problem | None:
    changed = _changed(c, *_DEFAULTS)
    if not changed or resolve_degree(c, "pp") != 1:
        return None
    message = f"is {_spell(c, changed[0])}, but nothing reads it: parallel.pp is 1"
    # a derived dp_shard would need an even number of GPUs
    dp_shard = " parallel.dp_shard=1" if c.parallel.dp_shard == -1 else ""
    pipeline = f"parallel.pp=2{dp_shard}{reset_nproc(c)}"
    return problem(f"parallel.{changed[0]}", message, "", _reset(changed), pipeline, is_unread=True)


@rule("parallel")
def pp_keys_agree(c: Any) -> Problem | None:
    # a file brings the order and the number of stages; a list of stages brings their layers
    for strong, weak in (
        ("pp_schedule_csv", ("pp_schedule", "pp_stages_per_rank")),
        ("pp_stages", ("pp_first_stage_less_layers", "pp_last_stage_less_layers")),
    ):
        unread = _changed(c, *weak)
        if _changed(c, strong) and unread:
            message = f"is {_spell(c, unread[0])}, but nothing reads it: parallel.{strong} is given"
            return problem(f"parallel.{unread[0]}", message, "", _reset(unread), _reset([strong]), is_unread=True)
    return None


def check_stages_per_rank(schedule: str, stages_per_rank: int | None) -> Problem | None:
    """The schedule can run so many stages on a rank."""
    kind = SCHEDULE_KINDS[schedule]
    if stages_per_rank is None or kind.allows_stages(stages_per_rank):
        return None
    key = "parallel.pp_stages_per_rank"
    allowed = str(kind.min_stages) if kind.max_stages else f"{kind.min_stages} or more"
    able = next(name for name, schedule_kind in SCHEDULE_KINDS.items() if schedule_kind.allows_stages(stages_per_rank))
    fixes = (f"{key}={kind.min_stages}", f"parallel.pp_schedule={able}")
    return problem(key, f"is {stages_per_rank}, which {kind.name} cannot run", allowed, *fixes)


@rule("parallel", "launch")
def pp_schedule_runs_stages_per_rank(c: Any) -> Problem | None:
    if c.parallel.pp_stages_per_rank is None or c.parallel.pp_schedule_csv is not None or _ranks(c) == 1:
        return None
    return check_stages_per_rank(c.parallel.pp_schedule, c.parallel.pp_stages_per_rank)


def check_num_layers(num_layers: int, num_stages: int, *, ranks: int, from_file: bool) -> Problem | None:
    """Every stage gets a layer."""
    if num_stages <= num_layers:
        return None
    message = f"is {num_layers}, fewer than the {num_stages} stages of {ranks} pipeline ranks"
    fewer_ranks = num_layers // (num_stages // ranks)
    fewer = f"parallel.pp={fewer_ranks}" if fewer_ranks > 1 and not from_file else ""
    return problem("model.num_layers", message, f"{num_stages} or more", f"model.num_layers={num_stages}", fewer)


@rule("parallel", "launch", "model.num_layers")
def pp_stages_have_layers(c: Any) -> Problem | None:
    if (num_stages := _count_stages(c)) is None:
        return None
    from_file = c.parallel.pp_schedule_csv is not None
    return check_num_layers(c.model.num_layers, num_stages, ranks=_ranks(c), from_file=from_file)


def check_stage_layers(
    num_layers: int, num_stages: int, *, names: Sequence[str], first_less: int | None, last_less: int | None
) -> Problem | None:
    """The listed stages, or the layers by which the ends fall short, add up to the model.

    Args:
        names: ``parallel.pp_stages``. first_less, last_less: the two keys of the ends.
    """
    less = {"pp_first_stage_less_layers": first_less, "pp_last_stage_less_layers": last_less}
    changed = [name for name, layers in less.items() if layers is not None]
    try:
        if names or changed:
            stages.split_as_configured(num_layers, num_stages, names=names, first_less=first_less, last_less=last_less)
        return None
    except ValueError as error:
        reason = str(error)
    allowed = f"{num_stages} stages with {num_layers} layers in all, each with 1 or more"
    if not names:
        return problem(f"parallel.{changed[0]}", f"is {less[changed[0]]}: {reason}", allowed, _reset(changed))
    even = f"parallel.pp_stages={spell(stages.split_evenly(num_layers, num_stages))}"
    message = f"is {spell(list(names))}: {reason}"
    return problem("parallel.pp_stages", message, allowed, even, _reset(["pp_stages", *changed]))


@rule("parallel", "launch", "model.num_layers")
def pp_stages_add_up_to_layers(c: Any) -> Problem | None:
    num_stages, num_layers = _count_stages(c), c.model.num_layers
    if num_stages is None or num_stages > num_layers:
        return None
    first_less, last_less = c.parallel.pp_first_stage_less_layers, c.parallel.pp_last_stage_less_layers
    names = c.parallel.pp_stages
    return check_stage_layers(num_layers, num_stages, names=names, first_less=first_less, last_less=last_less)


def check_microbatches(schedule: str, microbatches: int, *, ranks: int, sequences: int) -> Problem | None:
    """The microbatches of a step keep every rank of a named schedule busy.

    Args:
        sequences: of one microbatch, over all data ranks.
    """
    kind = SCHEDULE_KINDS[schedule]
    if kind.is_filled_by(microbatches, ranks=ranks):
        return None
    plural = "es" if microbatches > 1 else ""
    unfilled = f"{microbatches} microbatch{plural} of {sequences} sequences do not fill {kind.name} on {ranks} ranks"
    rounds = f" in rounds of equal size, {ranks} or more in each" if kind.needs_whole_rounds else ""
    allowed = f"{kind.min_microbatches(ranks)} microbatches or more{rounds}"
    # a legal number is at most 2 * ranks away: every multiple of ranks fills whole rounds
    legal = [n for n in range(1, microbatches + 2 * ranks + 1) if kind.is_filled_by(n, ranks=ranks)]
    fixes = settings("train.global_batch", [sequences * n for n in nearest_numbers(microbatches, legal)])
    return problem("train.global_batch", f"is {sequences * microbatches}: {unfilled}", allowed, fixes)


@rule("parallel", "launch", "train.global_batch", "train.local_batch")
def microbatches_fill_pipeline(c: Any) -> Problem | None:
    if c.parallel.pp_schedule_csv is not None or (microbatches := _count_microbatches(c)) is None:
        return None
    sequences = c.train.global_batch // microbatches
    return check_microbatches(c.parallel.pp_schedule, microbatches, ranks=_ranks(c), sequences=sequences)


def check_file(csv: str, *, ranks: int) -> Problem | None:
    """The schedule in the file can be read, and every rank can follow it to its end."""
    try:
        violation = first_violation(actions.read(Path(csv).expanduser()), ranks=ranks)
    except OSError as error:
        violation = f"cannot be read: {error.strerror} (looked in {Path.cwd()})"
    except ValueError as error:
        violation = str(error)
    if not violation:
        return None
    key, allowed = "parallel.pp_schedule_csv", "a schedule that every rank can follow to its end"
    return problem(key, f"{csv}: {violation}", allowed, f"{key}=null")


@rule("parallel", "launch")
def pp_schedule_file_is_runnable(c: Any) -> Problem | None:
    csv = c.parallel.pp_schedule_csv
    return None if csv is None or _ranks(c) == 1 else check_file(csv, ranks=_ranks(c))


def check_file_microbatches(csv: str, microbatches: int, *, sequences: int) -> Problem | None:
    """A step has as many microbatches as the file runs. ``sequences``: of one microbatch, over all data ranks."""
    grid = read_grid(csv)
    if grid is None or actions.microbatches(grid) == microbatches:
        return None
    key, batch = "train.global_batch", sequences * actions.microbatches(grid)
    runs = f"which is {microbatches} microbatches, but {csv} runs {actions.microbatches(grid)}"
    message = f"is {sequences * microbatches}, {runs}"
    return problem(key, message, f"{batch}, or null", f"{key}={batch}", f"{key}=null")


@rule("parallel", "launch", "train.global_batch", "train.local_batch")
def pp_schedule_file_matches_microbatches(c: Any) -> Problem | None:
    csv = c.parallel.pp_schedule_csv
    if csv is None or (microbatches := _count_microbatches(c)) is None:
        return None
    return check_file_microbatches(csv, microbatches, sequences=c.train.global_batch // microbatches)


@rule("parallel", "launch", "model.tie_embeddings")
def tied_embeddings_need_separate_ends(c: Any) -> Problem | None:
    # where one rank holds both ends, the shared weight would have to be in two FSDP groups
    if not c.model.tie_embeddings or _ranks(c) == 1 or resolve_token_degree(c) in (1, None):
        return None
    # the nearest relative of the two schedules in a V: zero bubble, but in a loop
    csv, fix = c.parallel.pp_schedule_csv, "parallel.pp_schedule=InterleavedZeroBubble"
    joined, name = SCHEDULE_KINDS[c.parallel.pp_schedule].placement == "v", c.parallel.pp_schedule
    if csv is not None:
        grid = read_grid(csv)
        if grid is None or first_violation(grid, ranks=_ranks(c)):
            return None
        owners = actions.stage_owners(grid)
        joined, name, fix = owners[0] == owners[-1], csv, "parallel.pp_schedule_csv=null"
    if not joined:
        return None
    ends = f"{name} has the first and the last stage on one rank"
    message = f"is true, and {ends}: FSDP shards the weight that they share with one of them only"
    allowed = "schedules whose ends are on different ranks; or false; or one data rank"
    return problem("model.tie_embeddings", message, allowed, fix, "model.tie_embeddings=false")


def find_whole_backward(schedule: str, csv: str | None) -> str:
    """The override for a schedule with whole backward passes; "" if this one does not split them in two parts."""
    if csv is None:
        return "parallel.pp_schedule=Interleaved1F1B" if SCHEDULE_KINDS[schedule].splits_backward else ""
    split = any(action.kind == "I" for row in actions.orders(read_grid(csv) or []) for action in row)
    return "parallel.pp_schedule_csv=null" if split else ""


def _find_whole_backward(c: Any) -> str:
    return "" if _ranks(c) == 1 else find_whole_backward(c.parallel.pp_schedule, c.parallel.pp_schedule_csv)


#: node: (why it excludes a backward pass in two parts, for the input first and for the weights later; how it is off).
_TWO_PARTS = {
    "compile": ("and that of a compiled block is one graph", "compile.mode=none"),
    # torch asks for the gradients of one group of weights after the other, and each time recomputes the block
    "ac": ("for which torch would recompute a block ten times", "ac=none"),
}


def refuse_split_backward(node: str, mode: str, fix: str) -> Problem:
    """The problem of compile or ac in a schedule that splits the backward pass; ``fix``: ``find_whole_backward``."""
    reason, off = _TWO_PARTS[node]
    message = f"is {mode}, but the schedule runs each backward in two parts, {reason}"
    return problem(f"{node}.mode", message, "none; or a schedule with whole backwards", off, fix)


@rule("parallel", "launch", "compile.mode")
def split_backward_excludes_compile(c: Any) -> Problem | None:
    if c.compile.mode != "block" or not (fix := _find_whole_backward(c)):
        return None
    return refuse_split_backward("compile", "block", fix)


@rule("parallel", "launch", "ac.mode")
def split_backward_excludes_ac(c: Any) -> Problem | None:
    if c.ac.mode == "none" or not (fix := _find_whole_backward(c)):
        return None
    return refuse_split_backward("ac", c.ac.mode, fix)


def check_split_routers(num_experts: int, fix: str) -> Problem | None:
    """Routers report loads as gradients, which the backward pass for the weights alone does not form."""
    if not num_experts or not fix:
        return None
    message = (
        f"runs each backward in two parts, in which the routers of {num_experts} experts cannot report their loads"
    )
    return problem("parallel.pp_schedule", message, "a schedule with whole backwards for a mixture of experts", fix)


@rule("parallel", "launch", "model.moe.num_experts")
def split_backward_excludes_moe(c: Any) -> Problem | None:
    experts = c.model.moe.num_experts
    return check_split_routers(experts, _find_whole_backward(c)) if experts else None
