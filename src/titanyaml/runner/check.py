"""Show what would run, without running it: the configuration, the mesh, the pipeline (``runner=check``).

The pipeline is the real one, applied to the model on meta under a fake process group of the mesh's size, so that each
row of the table is what the plugin did, not what it intends.
"""

import dataclasses
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from titanyaml.config import world
from titanyaml.config.schema import Config
from titanyaml.distributed import compat
from titanyaml.distributed.env import Env
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.pipeline import show
from titanyaml.pipeline.protocol import dtype_name
from titanyaml.pipeline_parallel.partition import schedules_table, stages_table
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.planner.search.choose_ac import AcChoice
from titanyaml.rundir import RunDir
from titanyaml.runner import auto_ac, run_report, setup


def check(config: Config, run: RunDir | None, env: Env) -> dict[str, Any]:
    """Print the configuration, the mesh and the pipeline table; nothing is trained and no rank is started."""
    # unknown where torchrun will start the ranks: then as many as the degrees ask for
    world_size = world.count_ranks(config) or world.fixed_product(config.parallel)[0]
    dims = ParallelDims.resolve(config.parallel, world_size)
    console = Console()
    # as it was typed: ac=auto is resolved below, and has a table of its own
    console.print(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), markup=False, highlight=False)
    config, choice = auto_ac.resolve(config, env)
    # a mesh needs a process group of its size; this one has no other ranks
    with compat.fake_process_group(world_size):
        mesh = dims.build("cpu") if world_size > 1 else None
        model, ctx, resolved, changes = setup.transform(config, env, dims, mesh=mesh)
        console.print(mesh_table(dims))
        console.print(show.table(resolved, changes))
        console.print(show.module_table(resolved, changes))
        if isinstance(model, StagedModel):
            console.print(stages_table(model.partition))
            console.print(schedules_table(model.partition))
    if choice is not None:
        console.print(options_table(choice))
        console.print(choice.sentence(), highlight=False)
    facts, seq_len = ctx.facts, config.train.seq_len
    active = f" ({facts.num_active_params:,} active)" if facts.num_experts else ""
    model_size = f"{config.model.name}: {facts.num_params:,} parameters{active}"
    flops = f"{facts.flops_per_token(seq_len) / 1e9:,.2f} GFLOP per token at {seq_len} tokens"
    batch = f"{setup.global_batch(config, dims) * seq_len:,} tokens a step, accumulation {ctx.accumulation}"
    compute = f"compute {dtype_name(ctx.compute_dtype)} on {env.device.type}"
    masters = f"masters {run_report.master_format(config)}"
    console.print(f"{model_size}, {flops}; {batch}; {compute}, {masters}", highlight=False)
    return {"world_size": world_size}


def mesh_table(dims: ParallelDims) -> Table:
    """A row per axis with more than one rank."""
    table = Table(title=f"mesh: {dims.world_size} rank{'s' if dims.world_size > 1 else ''}", title_justify="left")
    table.add_column("axis")
    table.add_column("ranks", justify="right")
    sizes = {axis: size for axis, size in dataclasses.asdict(dims).items() if size > 1}
    for axis, size in (sizes or {"none: one rank": 1}).items():
        table.add_row(axis, str(size))
    return table


def options_table(choice: AcChoice) -> Table:
    """The ways to recompute among which ``ac=auto`` chose, the fastest first."""
    table = Table(title="ac=auto", title_justify="left")
    table.add_column("recomputation")
    for column in ("GiB planned", "ms a step", f"fits into {choice.limit.gib:.1f}"):
        table.add_column(column, justify="right")
    for option in choice.options:
        fits = "yes" if option.fits else "no"
        table.add_row(option.typed, f"{option.memory_gib:.2f}", f"{1000 * option.step_s:.1f}", fits)
    return table
