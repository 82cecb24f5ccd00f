"""Rules of pipeline parallelism: stages have layers, the pipe is filled, a schedule from a file comes to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanyaml.config import schema
from titanyaml.config.rules.mesh import sharing_ranks
from titanyaml.config.rules.view import Rule, into, nearest_numbers, ways
from titanyaml.config.scalar_types import spell
from titanyaml.config.schema_keys import keys_of
from titanyaml.config.world import count_ranks, has_plugin_for, resolve_degree
from titanyaml.errors import Problem
from titanyaml.pipeline_schedule import actions, stages
from titanyaml.pipeline_schedule.kinds import SCHEDULE_KINDS
from titanyaml.pipeline_schedule.validate import first_violation

RULES: list[Rule] = []
rule = into(RULES)

KEYS = {name: key.default for name, key in keys_of(schema.Parallel).items() if name.startswith("pp_")}


def _given(c: Any, *names: str) -> list[str]:
    """Those of the keys that differ from their defaults."""
    return [name for name in names if getattr(c.parallel, name) != KEYS[name]]


def _unset(names: list[str]) -> str:
    return " ".join(f"parallel.{name}={spell(KEYS[name])}" for name in names)


def _ranks(c: Any) -> int | None:
    return resolve_degree(c, "pp")


def _grid(c: Any) -> actions.Grid | None:
    """The schedule in the file; None where there is none, or none that can be read: another rule speaks."""
    try:
        return actions.read(Path(c.parallel.pp_schedule_csv).expanduser())
    except (OSError, ValueError, TypeError):
        return None


def _runs(c: Any) -> bool:
    return (_ranks(c) or 1) > 1


def _num_stages(c: Any) -> int | None:
    """Stages of the whole pipeline; None where another rule speaks."""
    if c.parallel.pp_schedule_csv is not None:
        grid = _grid(c)
        return None if grid is None or first_violation(grid, ranks=_ranks(c)) else len(actions.stage_owners(grid))
    kind = SCHEDULE_KINDS[c.parallel.pp_schedule]
    per_rank = kind.stages_per_rank(c.parallel.pp_stages_per_rank)
    return per_rank * _ranks(c) if kind.allows_stages(per_rank) else None


def _forwards(c: Any) -> int | None:
    """Microbatches of a step, where ``train.global_batch`` says it and the batch is whole."""
    ranks, pipeline = count_ranks(c), _ranks(c)
    if c.train.global_batch is None or ranks is None:
        return None
    others = [getattr(c.parallel, axis) for axis in ("cp", "tp")]
    if -1 in others or ranks % (others[0] * others[1] * pipeline):
        return None
    unit = c.train.local_batch * (ranks // (others[0] * others[1] * pipeline))
    return None if c.train.global_batch % unit else c.train.global_batch // unit


@rule("parallel", "launch")
def pipeline_keys_are_read(c: Any) -> Problem | None:
    given = _given(c, *KEYS)
    if _ranks(c) != 1 or not given:
        return None
    ranks = " parallel.dp_shard=1" * (c.parallel.dp_shard == -1) + " launch.nproc=null" * (c.launch.nproc is not None)
    return Problem(
        f"parallel.{given[0]}",
        f"is {spell(getattr(c.parallel, given[0]))}, but nothing reads it: parallel.pp is 1",
        hint=f"{_unset(given)} or parallel.pp=2{ranks}",
    )


@rule("parallel")
def pipeline_keys_agree(c: Any) -> Problem | None:
    """A file brings the order and the number of stages; a list of stages brings their layers."""
    for first, others in (
        ("pp_schedule_csv", ("pp_schedule", "pp_stages_per_rank")),
        ("pp_stages", ("pp_first_stage_less_layers", "pp_last_stage_less_layers")),
    ):
        idle = _given(c, *others)
        if _given(c, first) and idle:
            return Problem(
                f"parallel.{idle[0]}",
                f"is {spell(getattr(c.parallel, idle[0]))}, but nothing reads it: parallel.{first} is given",
                hint=f"{_unset(idle)} or {_unset([first])}",
            )
    return None


@rule("parallel", "launch", "pipeline.plugins")
def pipeline_ranks_split_something(c: Any) -> Problem | None:
    """Without a plugin that splits the model all pp ranks would silently do the same work."""
    if has_plugin_for(c, "pp") or not _runs(c):
        return None
    return Problem(
        "pipeline.plugins.pp",
        f"is off, but {_ranks(c)} ranks are to share the layers",
        allowed="titanyaml.plugins.pp.PipelineParallel, or a plugin of yours in its place",
        hint="parallel.pp=1",
    )


@rule("parallel", "launch")
def pipeline_stages_fit_schedule(c: Any) -> Problem | None:
    kind, asked = SCHEDULE_KINDS[c.parallel.pp_schedule], c.parallel.pp_stages_per_rank
    if c.parallel.pp_schedule_csv is not None or not _runs(c) or asked is None or kind.allows_stages(asked):
        return None
    others = [name for name, other in SCHEDULE_KINDS.items() if other.allows_stages(asked)]
    return Problem(
        "parallel.pp_stages_per_rank",
        f"is {asked}, which {kind.name} cannot run",
        allowed=str(kind.min_stages) if kind.max_stages else f"{kind.min_stages} or more",
        hint=f"parallel.pp_stages_per_rank={kind.min_stages} or parallel.pp_schedule={others[0]}",
    )


@rule("parallel", "launch", "model.num_layers")
def pipeline_stages_have_layers(c: Any) -> Problem | None:
    count = _num_stages(c) if _runs(c) else None
    layers = c.model.num_layers
    if count is None or count <= layers:
        return None
    hints = [f"model.num_layers={count}"]
    if c.parallel.pp_schedule_csv is None:
        per_rank = count // _ranks(c)
        hints += [f"parallel.pp={ranks}" for ranks in (layers // per_rank,) if ranks > 1]
    return Problem(
        "model.num_layers",
        f"is {layers}, fewer than the {count} stages of {_ranks(c)} pipeline ranks",
        allowed=f"{count} or more",
        hint=" or ".join(hints),
    )


@rule("parallel", "launch", "model.num_layers")
def pipeline_stages_share_the_layers(c: Any) -> Problem | None:
    """The list of stages, or the layers that the ends fall short by, add up to the model."""
    count = _num_stages(c) if _runs(c) else None
    layers = c.model.num_layers
    given = _given(c, "pp_stages", "pp_first_stage_less_layers", "pp_last_stage_less_layers")
    if count is None or count > layers or not given:
        return None
    try:
        stages.split_as_configured(
            layers,
            count,
            names=c.parallel.pp_stages,
            first_less=c.parallel.pp_first_stage_less_layers,
            last_less=c.parallel.pp_last_stage_less_layers,
        )
    except ValueError as error:
        even = ",".join(map(str, stages.split_evenly(layers, count)))
        hint = _unset(given) if given[0] != "pp_stages" else f"parallel.pp_stages=[{even}] or {_unset(given)}"
        return Problem(
            f"parallel.{given[0]}",
            f"is {spell(getattr(c.parallel, given[0]))}: {error}",
            hint=hint,
            allowed=f"{count} stages with {layers} layers in all, each with 1 or more",
        )
    return None


@rule("parallel", "launch", "train.global_batch", "train.local_batch")
def pipeline_is_full(c: Any) -> Problem | None:
    count = _forwards(c) if _runs(c) and c.parallel.pp_schedule_csv is None else None
    if count is None:
        return None
    kind, ranks = SCHEDULE_KINDS[c.parallel.pp_schedule], _ranks(c)
    if kind.is_filled_by(count, ranks=ranks):
        return None
    unit = c.train.global_batch // count
    near = nearest_numbers(count, [n for n in range(1, count + 2 * ranks + 1) if kind.is_filled_by(n, ranks=ranks)])
    rounds = f" in rounds of equal size, {ranks} or more in each" if kind.needs_whole_rounds else ""
    return Problem(
        "train.global_batch",
        f"is {c.train.global_batch}: {count} microbatch{'es' * (count > 1)} of "
        f"{unit} sequences do not fill {kind.name} on {ranks} ranks",
        hint=ways("train.global_batch", [unit * number for number in near]),
        allowed=f"{kind.min_microbatches(ranks)} microbatches or more{rounds}",
    )


@rule("parallel", "launch", "train.global_batch", "train.local_batch")
def pipeline_file_has_the_microbatches(c: Any) -> Problem | None:
    count = _forwards(c) if _runs(c) and c.parallel.pp_schedule_csv is not None else None
    grid = _grid(c)
    if count is None or grid is None or actions.microbatches(grid) == count:
        return None
    needed = c.train.global_batch // count * actions.microbatches(grid)
    return Problem(
        "train.global_batch",
        f"is {c.train.global_batch}, which is {count} microbatches, but "
        f"{c.parallel.pp_schedule_csv} runs {actions.microbatches(grid)}",
        allowed=f"{needed}, or null",
        hint=f"train.global_batch={needed} or train.global_batch=null",
    )


@rule("parallel", "launch")
def pipeline_file_comes_to_its_end(c: Any) -> Problem | None:
    if c.parallel.pp_schedule_csv is None or not _runs(c):
        return None
    path = Path(c.parallel.pp_schedule_csv).expanduser()
    try:
        violation = first_violation(actions.read(path), ranks=_ranks(c))
    except OSError as error:
        violation = f"cannot be read: {error.strerror} (looked in {Path.cwd()})"
    except ValueError as error:
        violation = str(error)
    if not violation:
        return None
    return Problem(
        "parallel.pp_schedule_csv",
        f"{c.parallel.pp_schedule_csv}: {violation}",
        allowed="a schedule that every rank can follow to its end",
        hint="parallel.pp_schedule_csv=null",
    )


@rule("parallel", "launch", "model.tie_embeddings")
def pipeline_ends_share_a_weight(c: Any) -> Problem | None:
    """Where one rank holds both ends, the shared weight would have to be in two FSDP groups."""
    if not c.model.tie_embeddings or not _runs(c) or sharing_ranks(c) in (1, None):
        return None
    grid = _grid(c)
    if grid is not None:
        if first_violation(grid, ranks=_ranks(c)):
            return None
        owners = actions.stage_owners(grid)
        joined, name = owners[0] == owners[-1], c.parallel.pp_schedule_csv
    else:
        joined, name = SCHEDULE_KINDS[c.parallel.pp_schedule].placement == "v", c.parallel.pp_schedule
    if not joined or c.parallel.pp_schedule_csv is not None and grid is None:
        return None
    way = "parallel.pp_schedule_csv=null" if grid is not None else "parallel.pp_schedule=InterleavedZeroBubble"
    return Problem(
        "model.tie_embeddings",
        f"is true, and {name} has the first and the last stage on one rank: FSDP "
        "shards the weight that they share with one of them only",
        allowed="schedules whose ends are on different ranks; or false; or one data rank",
        hint=f"{way} or model.tie_embeddings=false",
    )


def _splits(c: Any) -> str:
    """What to type for a schedule with whole backwards, where the one that is on runs them in two parts."""
    if not _runs(c):
        return ""
    if c.parallel.pp_schedule_csv is None:
        return "parallel.pp_schedule=Interleaved1F1B" if SCHEDULE_KINDS[c.parallel.pp_schedule].splits_backward else ""
    split = any(action.kind == "I" for row in actions.orders(_grid(c) or []) for action in row)
    return "parallel.pp_schedule_csv=null" if split else ""


@rule("parallel", "launch", "compile.mode")
def compiled_blocks_have_one_backward(c: Any) -> Problem | None:
    if c.compile.mode == "model" and _runs(c):
        return Problem(
            "compile.mode",
            "is 'model', but the model is cut into stages",
            allowed="block, none",
            hint="compile.mode=none",
        )
    if c.compile.mode != "block" or not (way := _splits(c)):
        return None
    return Problem(
        "compile.mode",
        "is 'block', but the schedule runs each backward in two parts, and that of a compiled block is one graph",
        allowed="none; or a schedule with whole backwards",
        hint=f"compile.mode=none or {way}",
    )


@rule("parallel", "launch", "ac.mode")
def blocks_are_recomputed_once(c: Any) -> Problem | None:
    """Torch asks for the gradients of one group of weights after the other, and each recomputes the block anew."""
    if c.ac.mode == "none" or not (way := _splits(c)):
        return None
    return Problem(
        "ac.mode",
        f"is {c.ac.mode}, but the schedule runs each backward in two parts, for which torch "
        "would recompute a block ten times",
        allowed="none; or a schedule with whole backwards",
        hint=f"ac=none or {way}",
    )


@rule("parallel", "launch", "model.moe.num_experts")
def mixtures_have_one_backward(c: Any) -> Problem | None:
    """Routers report loads as gradients, which the second part, for weights alone, does not form."""
    if not c.model.moe.num_experts or not (way := _splits(c)):
        return None
    return Problem(
        "parallel.pp_schedule",
        "runs each backward in two parts, in which the routers of "
        "model.moe.num_experts experts cannot report their loads",
        allowed="a schedule with whole backwards for a mixture of experts",
        hint=way,
    )


@rule("parallel", "launch")
def stages_are_gathered_whole(c: Any) -> Problem | None:
    if not _runs(c) or c.parallel.fsdp_prefetch is None:
        return None
    return Problem(
        "parallel.fsdp_prefetch",
        f"is {c.parallel.fsdp_prefetch}, but a pipeline gathers all weights of a stage before its first microbatch",
        allowed="null with parallel.pp above 1",
        hint="parallel.fsdp_prefetch=null",
    )
