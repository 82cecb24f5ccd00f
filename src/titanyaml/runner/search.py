"""``hydra/sweeper=titan_search``: what was typed becomes the space of a search, and what it finds the jobs of a sweep.

One value that is typed is kept, several are chosen among, and what is not typed is tried as ``planner.space.Space``
says. Several values of a key that a search does not choose make several searches. Imports no torch.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from titanyaml.config import degrees, dump
from titanyaml.config.hydra import compose_hook
from titanyaml.config.hydra.report import compose_report
from titanyaml.config.nearest import keys_of
from titanyaml.config.schema import Config
from titanyaml.errors import ConfigError, Problem
from titanyaml.planner.search import search as searching
from titanyaml.planner.search import space
from titanyaml.planner.search.neighbours import UNREAD
from titanyaml.planner.search.search import Found, Result
from titanyaml.planner.search.space import Space
from titanyaml.rundir import atomic_write
from titanyaml.runner.search_progress import Progress

#: What may be typed of a dimension: its group and its key.
_DIMENSIONS = {
    "ac": "ac",
    "ac.mode": "ac",
    "ac.keep_products": "keep_products",
    "quant": "quant",
    "quant.recipe": "quant",
    "quant.fsdp_float8_all_gather": "gather",
    "quant.product": "product",
    "optim.master": "master",
    "train.local_batch": "local_batch",
    "parallel.pp_schedule": "schedule",
    "compile.async_tp": "async_tp",
}
_GROUPS = {"ac": "ac.mode", "quant": "quant.recipe"}
_AXES = {f"parallel.{axis}": axis for axis in degrees.AXES}
#: What the command that runs a found configuration leaves out of what was typed.
_PLANNING = ("runner=plan", "runner.", "run.", "hydra")


@dataclass(frozen=True)
class Typed:
    """The overrides of a search. given: values of dimensions and axes by name; bases: what every candidate is composed
    with, once for each combination of several values of other keys; keys: all that were typed."""

    given: dict[str, list[Any]]
    bases: list[list[str]]
    keys: frozenset[str]


def run(arguments: Sequence[str], master: DictConfig, loader: Any, launcher: Any, *, jobs: int) -> Any:
    """Search, tell, and launch the ``jobs`` fastest; ``search.json`` in the sweep's folder holds the ten best.

    Raises:
        ConfigError: a value that is wrong whatever is chosen, no number of ranks, or nothing that fits.
    """
    if not 1 <= jobs <= searching.BEST:
        raise ConfigError(
            [
                Problem(
                    "hydra.sweeper.jobs",
                    f"is {jobs}",
                    f"1 .. {searching.BEST}, of the best that a search lists",
                    "hydra.sweeper.jobs=1",
                )
            ]
        )
    composing = compose_hook.Loader(loader, master.hydra.job.config_name)
    overrides = [composing.parse(text) for text in arguments]
    typed = sort_out(overrides)
    _check_values(overrides, composing)
    found, total = [], Result()
    for base in typed.bases:
        config = _base(base, typed, composing)
        with Progress() as progress:
            result = searching.search(config, _space(typed, config), progress.tell)
        found += [(_kept(base), config, one) for one in result.best]
        total = Result(
            [],
            total.tried + result.tried,
            total.legal + result.legal,
            total.fitted + result.fitted,
            total.refused + result.refused,
        )
    if not found:
        raise _nothing(total)
    found = sorted(found, key=lambda one: -one[2].plan.tps)[: searching.BEST]
    folder = Path(master.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    command = _command(*found[0])
    rows = [one.row() | {"base": kept, "command": _command(kept, config, one)} for kept, config, one in found]
    counts = {"tried": total.tried, "legal": total.legal, "fitted": total.fitted}
    atomic_write(folder / "search.json", json.dumps({**counts, "command": command, "best": rows}, indent=1) + "\n")
    planning = found[0][1].runner.name == "plan"
    if not planning:
        _tell(rows, counts, command)
    done = launcher.launch([[*kept, *one.change.split()] for kept, _, one in found[:jobs]], initial_job_idx=0)
    if planning:
        _tell(rows, counts, command)
    for job in done:
        _ = job.return_value  # raises what the job raised
    return done


def sort_out(overrides: list[Override]) -> Typed:
    """Overrides by what a search does with them.

    Raises:
        ConfigError: a range such as ``interval(0,1)``, of which there are endless values.
    """
    given: dict[str, list[Any]] = {}
    others: list[list[str]] = []
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line!r}: endless values", key=key, hint=f"{key}=<a>,<b>")
        if override.is_sweep_override():
            texts = [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]
            values = list(override.sweep_iterator())
        else:
            texts, values = [override.input_line], [override.value()]
        if key == "parallel" or key in _DIMENSIONS or key in _AXES:
            given[_DIMENSIONS.get(key) or _AXES.get(key, key)] = values
            # one value takes part in the composition, which may be refused for it
            others += [texts] if len(texts) == 1 else []
        else:
            others.append(texts)
    keys = frozenset(_GROUPS.get(override.key_or_group, override.key_or_group) for override in overrides)
    return Typed(given, [list(one) for one in itertools.product(*others)], keys)


def _check_values(overrides: list[Override], composing: compose_hook.Loader) -> None:
    """That each of several values can be had at all, before thousands are tried beside it.

    Raises:
        ConfigError: no such option, or a value of a wrong kind.
    """
    several = [override for override in overrides if override.is_sweep_override()]
    wrong = [
        problem
        for override in several
        for text in override.sweep_string_iterator()
        for problem in compose_report(
            [f"{override.get_key_element()}={text}"], loader=composing, multirun=True
        ).problems
    ]
    if wrong:
        raise ConfigError(wrong)


def _base(base: list[str], typed: Typed, composing: compose_hook.Loader) -> Config:
    """The configuration around which is searched. What only rules on chosen keys refuse is left to the candidates."""
    report = compose_report(base, loader=composing)
    wrong = [problem for problem in report.problems if not _is_chosen(problem)]
    if wrong or report.cfg is None:
        raise ConfigError(wrong or report.problems)
    return dump.to_dataclass(OmegaConf.masked_copy(report.cfg, list(keys_of(Config))))


def _is_chosen(problem: Problem) -> bool:
    parts = ("parallel", "ac", "quant", "compile.async_tp", "launch.nproc", "train.local_batch", "train.global_batch")
    return any(problem.key == part or problem.key.startswith(f"{part}.") for part in parts)


def _space(typed: Typed, config: Config) -> Space:
    """What is typed in place of what is tried by itself.

    Raises:
        ConfigError: neither a mesh nor a number of ranks, or a mesh that is none.
    """
    given = {name: tuple(values) for name, values in typed.given.items()}
    axes = {axis: given.pop(axis) for axis in degrees.AXES if given.get(axis, (-1,)) != (-1,)}
    named = tuple(_mesh(name, config) for name in given.pop("parallel", ()) if name != "auto")
    if not named and config.launch.nproc is None:
        raise ConfigError(
            "is null, and no mesh is given: a search must know on how many devices",
            key="launch.nproc",
            hint="launch.nproc=256 or parallel=fsdp32_tp8,fsdp64_tp4",
        )
    _check_ranks(named, axes, config.launch.nproc)
    dimensions = {name: values for name, values in given.items() if name in _DIMENSIONS.values()}
    if "auto" in dimensions.get("ac", ()):  # that is what a search does
        del dimensions["ac"]
    return Space(
        meshes=tuple(mesh | {axis: axes[axis][0] for axis in axes} for mesh in named) or None,
        axes=axes,
        typed=typed.keys,
        **dimensions,
    )


def _check_ranks(named: tuple[dict[str, int], ...], axes: dict[str, tuple[int, ...]], nproc: int | None) -> None:
    """That meshes have as many ranks as are started.

    Raises:
        ConfigError: one has not.
    """
    for mesh in named:
        sizes = mesh | {axis: axes[axis][0] for axis in axes}
        ranks = math.prod(sizes[axis] for axis in degrees.MESH_AXES)
        if nproc not in (None, ranks):
            name = space.name(sizes)
            raise ConfigError(
                [
                    Problem(
                        "launch.nproc",
                        f"is {nproc}, but parallel={name} has {ranks} ranks",
                        f"{ranks}, or null, for parallel={name}; or meshes of {nproc} ranks",
                        f"launch.nproc={ranks} or launch.nproc=null or parallel=auto",
                    )
                ]
            )


def _mesh(name: str, config: Config) -> dict[str, int]:
    if name == "single":
        named: dict[str, int] | None = {}
    else:
        named = degrees.parse_mesh_name(str(name))
    if named is None:
        raise ConfigError(f"{name!r} is no mesh", key="parallel", hint="parallel=fsdp8,fsdp4_tp2")
    return {axis: named.get(axis, 1) for axis in degrees.AXES}


def _kept(base: list[str]) -> list[str]:
    """What a job is composed with beside what was chosen for it."""
    chosen = {"parallel", "launch.nproc", "train.global_batch", *_AXES, *_DIMENSIONS}
    return [text for text in base if text.lstrip("+").partition("=")[0] not in chosen]


def _command(kept: list[str], config: Config, found: Found) -> str:
    """What trains a configuration; under torchrun where it takes several hosts."""
    typed = [shlex.quote(text) for text in kept if not text.lstrip("+~").startswith(_PLANNING)]
    world, host = found.plan.job.mesh.world_size, config.cluster.gpus_per_host
    started = "python"
    if world > host:
        started = (
            f"torchrun --nnodes={-(-world // host)} --nproc-per-node={host} --rdzv-backend=c10d "
            "--rdzv-endpoint=$HEAD:29500"
        )
    return " ".join([started, "-m titanyaml", *typed, found.change])


def _nothing(total: Result) -> ConfigError:
    """Why nothing was found."""
    if total.legal:
        return ConfigError(
            f"of {total.tried} configurations {total.legal} are legal and none fits",
            key="parallel",
            hint="launch.nproc=<more ranks>, or a smaller train.seq_len",
        )
    most = collections.Counter(total.refused).most_common(1)
    why = f"; most often: {most[0][0]}" if most else ": no mesh of these degrees divides the ranks and the batch"
    unread = most and most[0][0].endswith(UNREAD)
    return ConfigError(
        f"none of {total.tried} configurations is legal{why}",
        key="parallel",
        hint="leave that key out" if unread else "launch.nproc=<ranks> train.global_batch=<a multiple of them>",
    )


def _tell(rows: list[dict[str, Any]], counts: dict[str, int], command: str) -> None:
    console = Console(width=None if Console().is_terminal else 200)
    table = Table(title="fastest that fit", title_justify="left")
    for number, name in enumerate(("configuration", "tokens/s", "MFU %", "GiB", "where time goes")):
        table.add_column(name, justify="right" if 0 < number < 4 else "left", overflow="fold")
    for row in rows:
        table.add_row(
            row["change"], f"{row['tps']:,.0f}", f"{100 * row['mfu']:.1f}", f"{row['memory_gib']:.1f}", row["why"]
        )
    console.print(table)
    console.print(f"{counts['tried']} tried, {counts['legal']} legal, {counts['fitted']} fit", highlight=False)
    console.print(f"run the first: {command}", highlight=False, soft_wrap=True, markup=False)
    if "optim.master=split" in rows[0]["change"]:
        console.print(
            "optim.master=split rounds reduced gradients to bfloat16; type optim.master=float32 to keep them",
            highlight=False,
            soft_wrap=True,
        )
