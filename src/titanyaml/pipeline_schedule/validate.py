"""Whether ranks can follow a schedule to its end; if not, where it breaks first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titanyaml.pipeline_schedule.actions import Action, Grid, microbatches, orders
from titanyaml.pipeline_schedule.simulate import Stuck, simulate


def first_violation(grid: Grid, *, ranks: int) -> str:
    """The first thing wrong, with its row, rank and (where it has one) column; empty where nothing is."""
    checks = (_rows, _stages, _complete, _ordered, _ends)
    return next((problem for check in checks for problem in check(grid, ranks)), "")


def _where(rank: int, column: int | None = None) -> str:
    return f"row {rank + 1} (rank {rank}){'' if column is None else f', column {column + 1}'}"


def _cells(grid: Grid) -> Iterator[tuple[int, int, Action]]:
    """(rank, column, action), row by row."""
    for rank, row in enumerate(grid):
        for column, cell in enumerate(row):
            for action in cell:
                yield rank, column, action


def _rows(grid: Grid, ranks: int) -> Iterator[str]:
    if len(grid) != ranks:
        yield f"{len(grid)} row{'s' * (len(grid) != 1)} for {ranks} pipeline ranks; each rank has one"
    for rank, row in enumerate(orders(grid)):
        if not row:
            yield f"{_where(rank)}: no action"


def _stages(grid: Grid, ranks: int) -> Iterator[str]:
    """Every stage from 0 on is there, on one rank."""
    owner: dict[int, int] = {}
    for rank, column, action in _cells(grid):
        if owner.setdefault(action.stage, rank) != rank:
            yield f"{_where(rank, column)}: {action}: stage {action.stage} is on rank {owner[action.stage]}"
    for rank, column, action in _cells(grid):
        if action.stage >= len(owner):
            missing = min(set(range(len(owner))) - owner.keys())
            yield f"{_where(rank, column)}: {action}: there is a stage {action.stage}, but no stage {missing}"


def _complete(grid: Grid, ranks: int) -> Iterator[str]:
    """Every stage runs every microbatch forward once and backward once, in one part or in two."""
    count = microbatches(grid)
    for rank, row in enumerate(orders(grid)):
        seen = Counter(row)
        for stage in sorted({action.stage for action in row}):
            for microbatch in range(count):
                times = {kind: seen[Action(stage, kind, microbatch)] for kind in "FBIW"}
                if problem := _times(stage, microbatch, times):
                    yield f"{_where(rank)}: {problem}"


def _times(stage: int, microbatch: int, times: dict[str, int]) -> str:
    """What is wrong with how often the actions of one stage and microbatch come."""
    names = {kind: str(Action(stage, kind, microbatch)) for kind in times}
    repeated = [names[kind] for kind, number in times.items() if number > 1]
    if repeated:
        return f"{repeated[0]} comes {max(times.values())} times"
    if not times["F"]:
        return f"the forward {names['F']} is missing"
    if times["B"] and (times["I"] or times["W"]):
        return f"{names['B']} is the whole backward, but {names['I'] if times['I'] else names['W']} comes too"
    if not times["B"]:
        missing = [names[kind] for kind in "IW" if not times[kind]]
        if len(missing) == 2:
            return f"the backward {names['B']} (or {names['I']} and {names['W']}) is missing"
        if missing:
            return f"the backward is in two parts, and {missing[0]} is missing"
    return ""


def _ordered(grid: Grid, ranks: int) -> Iterator[str]:
    """Within a rank: forward before backward, by input before by weight; losses come in the microbatches' order."""
    last = max(action.stage for _, _, action in _cells(grid))
    done: set[Action] = set()
    losses = 0
    for rank, column, action in _cells(grid):
        stage, kind, microbatch = action
        before = Action(stage, "I" if kind == "W" else "F", microbatch)
        if kind != "F" and before not in done:
            yield f"{_where(rank, column)}: {action} comes before {before}"
        if kind == "F" and stage == last:
            if microbatch != losses:
                yield (
                    f"{_where(rank, column)}: {action} comes before {Action(stage, 'F', losses)}; the last stage "
                    "takes the microbatches in their order"
                )
            losses += 1
        done.add(action)


def _ends(grid: Grid, ranks: int) -> Iterator[str]:
    """No rank waits for ever."""
    rows = orders(grid)
    try:
        simulate(rows, stages=1 + max(action.stage for row in rows for action in row))
    except Stuck as stuck:
        rank, (position, action, missing) = min(stuck.waiting.items())
        column = [column for other, column, _ in _cells(grid) if other == rank][position]
        other, there, needed = next(cell for cell in _cells(grid) if cell[2] in missing)
        yield (
            f"{_where(rank, column)}: deadlock: {action} waits for {needed} of {_where(other, there)}, which waits "
            "in turn"
        )
