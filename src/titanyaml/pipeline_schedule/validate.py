"""Whether ranks can follow a schedule to its end; if not, the first place where it breaks."""

from collections import Counter
from collections.abc import Iterator

from titanyaml.pipeline_schedule.actions import Action, Grid, microbatches, orders
from titanyaml.pipeline_schedule.simulate import ScheduleDeadlock, simulate


def first_violation(grid: Grid, *, ranks: int) -> str:
    """The first problem, with its row, rank and (where it has one) column; empty where there is none."""
    # each check relies on the ones before it: an order makes sense only where every stage has all its actions
    checks = (_check_rows, _check_stages, _check_counts, _check_orders, _check_deadlock)
    return next((problem for check in checks for problem in check(grid, ranks)), "")


def _place(rank: int, column: int | None = None) -> str:
    return f"row {rank + 1} (rank {rank}){'' if column is None else f', column {column + 1}'}"


def _cells(grid: Grid) -> Iterator[tuple[int, int, Action]]:
    """(rank, column, action), row by row."""
    for rank, row in enumerate(grid):
        for column, cell in enumerate(row):
            for action in cell:
                yield rank, column, action


def _check_rows(grid: Grid, ranks: int) -> Iterator[str]:
    if len(grid) != ranks:
        rows = "1 row" if len(grid) == 1 else f"{len(grid)} rows"
        yield f"{rows} for {ranks} pipeline ranks; each rank has one"
    for rank, row in enumerate(orders(grid)):
        if not row:
            yield f"{_place(rank)}: no action"


def _check_stages(grid: Grid, ranks: int) -> Iterator[str]:
    """Stages are numbered from 0 without gaps, each on one rank."""
    owner: dict[int, int] = {}
    for rank, column, action in _cells(grid):
        if owner.setdefault(action.stage, rank) != rank:
            yield f"{_place(rank, column)}: {action}: stage {action.stage} is on rank {owner[action.stage]}"
    for rank, column, action in _cells(grid):
        if action.stage >= len(owner):
            missing = min(set(range(len(owner))) - owner.keys())
            yield f"{_place(rank, column)}: {action}: there is a stage {action.stage}, but no stage {missing}"


def _check_counts(grid: Grid, ranks: int) -> Iterator[str]:
    """Every stage runs every microbatch forward once and backward once, in one part or in two."""
    count = microbatches(grid)
    for rank, row in enumerate(orders(grid)):
        num_runs = Counter(row)
        for stage in sorted({action.stage for action in row}):
            for microbatch in range(count):
                times = {kind: num_runs[Action(stage, kind, microbatch)] for kind in "FBIW"}
                if problem := _count_problem(stage, microbatch, times):
                    yield f"{_place(rank)}: {problem}"


def _count_problem(stage: int, microbatch: int, times: dict[str, int]) -> str:
    """What is wrong with how often each kind of action comes for one stage and microbatch."""
    names = {kind: str(Action(stage, kind, microbatch)) for kind in times}
    repeated = [names[kind] for kind, number in times.items() if number > 1]
    if repeated:
        return f"{repeated[0]} comes {max(times.values())} times"
    if not times["F"]:
        return f"the forward {names['F']} is missing"
    parts = [names[kind] for kind in "IW" if times[kind]]
    if times["B"]:
        return f"{names['B']} is the whole backward, but {parts[0]} comes too" if parts else ""
    if not parts:
        return f"the backward {names['B']} (or {names['I']} and {names['W']}) is missing"
    missing = [names[kind] for kind in "IW" if not times[kind]]
    return f"the backward is in two parts, and {missing[0]} is missing" if missing else ""


def _check_orders(grid: Grid, ranks: int) -> Iterator[str]:
    """Forward before backward, I before W, and losses in the order of the microbatches."""
    last = max(action.stage for _, _, action in _cells(grid))
    earlier: set[Action] = set()
    next_loss = 0
    for rank, column, action in _cells(grid):
        stage, kind, microbatch = action
        before = Action(stage, "I" if kind == "W" else "F", microbatch)
        if kind != "F" and before not in earlier:
            yield f"{_place(rank, column)}: {action} comes before {before}"
        if kind == "F" and stage == last:
            if microbatch != next_loss:
                # torch appends losses as they come, and reads them by the number of the microbatch
                rule = "the last stage takes the microbatches in their order"
                yield f"{_place(rank, column)}: {action} comes before {Action(stage, 'F', next_loss)}; {rule}"
            next_loss += 1
        earlier.add(action)


def _check_deadlock(grid: Grid, ranks: int) -> Iterator[str]:
    rows = orders(grid)
    try:
        simulate(rows, stages=1 + max(action.stage for row in rows for action in row))
    except ScheduleDeadlock as deadlock:
        rank, (position, action, missing) = min(deadlock.waiting.items())
        column = [cell_column for cell_rank, cell_column, _ in _cells(grid) if cell_rank == rank][position]
        peer, peer_column, awaited = next(cell for cell in _cells(grid) if cell[2] in missing)
        peer_place = _place(peer, peer_column)
        yield f"{_place(rank, column)}: deadlock: {action} waits for {awaited} of {peer_place}, which waits in turn"
