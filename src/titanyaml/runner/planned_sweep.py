"""``hydra/sweeper=titan_search``: overrides become the space of a search, and what it finds the jobs of a sweep.

One value that is typed is kept, several are chosen among, and what is not typed is tried as ``planner/search/space.py``
says. Several values of a key that a search does not choose make several searches. Imports no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.plugins.launcher import Launcher
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from titanyaml.config import degrees
from titanyaml.config.hydra.compose_hook import Loader
from titanyaml.config.hydra.composition_report import compose_report
from titanyaml.config.schema import Config
from titanyaml.config.schema_keys import is_under
from titanyaml.errors import ConfigError, Problem
from titanyaml.planner.search import space
from titanyaml.planner.search.fastest import NUM_BEST, RankedConfig, SearchResult, find_fastest
from titanyaml.planner.search.space import Space
from titanyaml.planner.search.variants import UNREAD
from titanyaml.rundir import atomic_write

#: Dimension of a search by the group or key that is typed for it.
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
_KEY_OF_GROUP = {"ac": "ac.mode", "quant": "quant.recipe"}
_AXES = {f"parallel.{axis}": axis for axis in degrees.AXES}
#: Keys that the candidates decide: what a rule says of them is no problem of the search.
_DECIDED = ("parallel", "ac", "quant", "compile.async_tp", "launch.nproc", "train.local_batch", "train.global_batch")
#: Beginnings of overrides that belong to the search, not to the command that runs what it found.
_OF_SEARCH = ("runner=plan", "runner.", "run.", "hydra")
#: Seconds between two plain lines of progress, and between two changes of a terminal's one line.
_LINE_S, _CHANGE_S = 5.0, 0.25


@dataclass(frozen=True)
class SearchOverrides:
    """The overrides of a search, by what it does with them."""

    values: dict[str, list[Any]]  # of dimensions and axes, by name
    bases: list[list[str]]  # what all candidates are composed with: one for each combination of other keys' values
    keys: frozenset[str]  # all that were typed


@dataclass(frozen=True)
class _Job:
    """A configuration that was found."""

    base: list[str]  # overrides that it shares with the other candidates
    config: Config  # around which was searched
    ranked: RankedConfig

    @property
    def overrides(self) -> list[str]:
        return [*self.base, *self.ranked.overrides.split()]

    def command(self) -> str:
        """What trains it; under torchrun where it takes several hosts."""
        typed = [shlex.quote(text) for text in self.base if not text.lstrip("+~").startswith(_OF_SEARCH)]
        num_ranks, per_host = self.ranked.plan.job.mesh.world_size, self.config.cluster.gpus_per_host
        program = "python"
        if num_ranks > per_host:
            hosts = -(-num_ranks // per_host)
            rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500"
            program = f"torchrun --nnodes={hosts} --nproc-per-node={per_host} {rendezvous}"
        return " ".join([program, "-m titanyaml", *typed, self.ranked.overrides])

    def record(self) -> dict[str, Any]:
        """For search.json."""
        return self.ranked.record() | {"base": self.base, "command": self.command()}


def run(arguments: Sequence[str], loader: Loader, launcher: Launcher, *, folder: Path, jobs: int) -> Any:
    """Search, print what was found, write the ten best to ``folder/search.json``, and launch the ``jobs`` fastest.

    Raises ConfigError for a value that is wrong whatever is chosen, no number of ranks, or nothing that fits.
    """
    if not 1 <= jobs <= NUM_BEST:
        allowed = f"1 .. {NUM_BEST}, of the best that a search lists"
        raise ConfigError([Problem("hydra.sweeper.jobs", f"is {jobs}", allowed, "hydra.sweeper.jobs=1")])
    parsed = [loader.parse(text) for text in arguments]
    typed = sort_overrides(parsed)
    _check_values(parsed, loader)
    all_jobs: list[_Job] = []
    total = SearchResult()
    decided = {"parallel", "launch.nproc", "train.global_batch", *_AXES, *_DIMENSIONS}
    for base in typed.bases:
        config = _base_config(base, loader)
        with ProgressLine() as line:
            result = find_fastest(config, _space(typed, config), line.show)
        undecided = [text for text in base if text.lstrip("+").partition("=")[0] not in decided]
        all_jobs += [_Job(undecided, config, ranked) for ranked in result.best]
        total.tried += result.tried
        total.legal += result.legal
        total.fitted += result.fitted
        total.refused += result.refused
    if not all_jobs:
        raise _nothing_found(total)
    best = sorted(all_jobs, key=lambda job: -job.ranked.plan.tps)[:NUM_BEST]
    records = [job.record() for job in best]
    counts = {"tried": total.tried, "legal": total.legal, "fitted": total.fitted}
    content = {**counts, "command": best[0].command(), "best": records}
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "search.json", json.dumps(content, indent=1) + "\n")
    # a plan fills the screen, so that the table goes below it; a training or a benchmark runs for hours: above
    is_plan = best[0].config.runner.name == "plan"
    if not is_plan:
        _print_table(records, counts)
    returns = launcher.launch([job.overrides for job in best[:jobs]], initial_job_idx=0)
    if is_plan:
        _print_table(records, counts)
    for job_return in returns:
        _ = job_return.return_value  # raises what the job raised
    return returns


def sort_overrides(overrides: list[Override]) -> SearchOverrides:
    """Sort overrides by what a search does with them; an ``interval(0,1)``, of endless values, is refused."""
    dimensions: dict[str, list[Any]] = {}
    alternatives: list[list[str]] = []
    texts: list[str]
    values: list[Any]
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line!r}: endless values", key=key, hint=f"{key}=<a>,<b>")
        if override.is_sweep_override():
            texts = [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]
            values = list(override.sweep_iterator())
        else:
            texts, values = [str(override.input_line)], [override.value()]
        is_dimension = key == "parallel" or key in _DIMENSIONS or key in _AXES
        if is_dimension:
            dimensions[_DIMENSIONS.get(key) or _AXES.get(key, key)] = values
        # a single value of a dimension is composed too, so that its own problems are found
        if not is_dimension or len(texts) == 1:
            alternatives.append(texts)
    keys = frozenset(_KEY_OF_GROUP.get(override.key_or_group, override.key_or_group) for override in overrides)
    return SearchOverrides(dimensions, [list(base) for base in itertools.product(*alternatives)], keys)


def _check_values(overrides: list[Override], loader: Loader) -> None:
    """Check each of several values by itself, before thousands of candidates are tried with it."""
    swept = [override for override in overrides if override.is_sweep_override()]
    texts = [f"{override.get_key_element()}={text}" for override in swept for text in override.sweep_string_iterator()]
    reports = [compose_report([text], loader=loader, multirun=True) for text in texts]
    if problems := [problem for report in reports for problem in report.problems]:
        raise ConfigError(problems)


def _base_config(base: list[str], loader: Loader) -> Config:
    """The configuration around which is searched; what only the candidates decide may be wrong in it."""
    report = compose_report(base, loader=loader)
    problems = [problem for problem in report.problems if not is_under(problem.key, _DECIDED)]
    if problems or report.cfg is None:
        raise ConfigError(problems or report.problems)
    return report.config()


def _space(typed: SearchOverrides, config: Config) -> Space:
    """The space of a search: of each dimension what was typed, else what is tried unasked."""
    values = {name: tuple(listed) for name, listed in typed.values.items()}
    # -1 is derived, as if nothing was typed
    axes = {axis: values.pop(axis) for axis in degrees.AXES if values.get(axis, (-1,)) != (-1,)}
    names = [name for name in values.pop("parallel", ()) if name != "auto"]
    if not names and config.launch.nproc is None:
        raise ConfigError(
            "is null, and no mesh is given: a search must know on how many devices",
            key="launch.nproc",
            hint="launch.nproc=256 or parallel=fsdp32_tp8,fsdp64_tp4",
        )
    meshes = tuple(_mesh(name) | {axis: sizes[0] for axis, sizes in axes.items()} for name in names)
    _check_num_ranks(meshes, config.launch.nproc)
    dimensions = {name: listed for name, listed in values.items() if name in _DIMENSIONS.values()}
    if "auto" in dimensions.get("ac", ()):  # that is what a search does
        del dimensions["ac"]
    return Space(meshes=meshes or None, axes=axes, typed=typed.keys, **dimensions)


def _check_num_ranks(meshes: Sequence[dict[str, int]], nproc: int | None) -> None:
    """Raise ConfigError for a mesh that has not as many ranks as are started."""
    for mesh in meshes:
        num_ranks = math.prod(mesh[axis] for axis in degrees.MESH_AXES)
        if nproc not in (None, num_ranks):
            name = space.mesh_name(mesh)
            problem = Problem(
                "launch.nproc",
                f"is {nproc}, but parallel={name} has {num_ranks} ranks",
                f"{num_ranks}, or null, for parallel={name}; or meshes of {nproc} ranks",
                f"launch.nproc={num_ranks} or launch.nproc=null or parallel=auto",
            )
            raise ConfigError([problem])


def _mesh(name: str) -> dict[str, int]:
    mesh = {} if name == "single" else degrees.parse_mesh_name(str(name))
    if mesh is None:
        raise ConfigError(f"{name!r} is no mesh", key="parallel", hint="parallel=fsdp8,fsdp4_tp2")
    return {axis: mesh.get(axis, 1) for axis in degrees.AXES}


def _nothing_found(total: SearchResult) -> ConfigError:
    if total.legal:
        return ConfigError(
            f"of {total.tried} configurations {total.legal} are legal and none fits",
            key="parallel",
            hint="launch.nproc=<more ranks>, or a smaller train.seq_len",
        )
    reason, hint = ": no mesh of these degrees divides the ranks and the batch", ""
    if total.refused:
        [(problem, _)] = total.refused.most_common(1)
        reason = f"; most often: {problem}"
        hint = "leave that key out" if problem.endswith(UNREAD) else ""
    return ConfigError(
        f"none of {total.tried} configurations is legal{reason}",
        key="parallel",
        hint=hint or "launch.nproc=<ranks> train.global_batch=<a multiple of them>",
    )


def _print_table(records: list[dict[str, Any]], counts: dict[str, int]) -> None:
    console = Console(width=None if Console().is_terminal else 200)
    table = Table(title="fastest that fit", title_justify="left")
    for number, name in enumerate(("configuration", "tokens/s", "MFU %", "GiB", "where time goes")):
        table.add_column(name, justify="right" if 0 < number < 4 else "left", overflow="fold")
    for record in records:
        figures = (f"{record['tps']:,.0f}", f"{100 * record['mfu']:.1f}", f"{record['memory_gib']:.1f}")
        table.add_row(record["change"], *figures, record["why"])
    console.print(table)
    first = records[0]
    console.print(f"{counts['tried']} tried, {counts['legal']} legal, {counts['fitted']} fit", highlight=False)
    console.print(f"run the first: {first['command']}", highlight=False, soft_wrap=True, markup=False)
    if "optim.master=split" in first["change"]:
        # the one choice of a search that rounds gradients
        remark = "optim.master=split rounds reduced gradients to bfloat16; type optim.master=float32 to keep them"
        console.print(remark, highlight=False, soft_wrap=True)


class ProgressLine:
    """How far a search is, on standard error: one line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._status = Status("search", console=self._console) if self._console.is_terminal else None
        self._begin = self._last_shown = time.monotonic()

    def __enter__(self) -> ProgressLine:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._status:
            self._status.stop()

    def show(self, result: SearchResult) -> None:
        """Print what the search is at, if the last time is long enough ago."""
        seconds = time.monotonic()
        # a search may call this thousands of times a second
        if seconds - self._last_shown < (_CHANGE_S if self._status else _LINE_S):
            return
        self._last_shown = seconds
        text = f"search, {seconds - self._begin:.0f} s, {result.phase}: {result.tried:,} tried, {result.fitted:,} fit"
        if result.best:
            first = result.best[0]
            text += f", best so far {first.plan.tps:,.0f} tokens/s: {first.overrides}"
        if self._status:
            self._status.update(Text(text))
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
