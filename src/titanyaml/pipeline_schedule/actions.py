"""What each pipeline rank computes in which order, and its file format, which is torch's CSV of computations.

A row is a rank; a cell is one action, empty where the rank waits. ``2F5``: stage 2 runs the forward of microbatch 5;
``2B5``: its whole backward; ``2I5``: the backward for the input only; ``2W5``: that for the weights;
``(0F4;3B1)OVERLAP_F_B``: a forward and a backward whose transfers overlap.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")  # as torch writes cells of DualPipeV


class Action(NamedTuple):
    """One computation. kind: F forward, B backward, I backward for the input, W backward for the weights."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


#: Actions of one cell: none, one, or a forward and a backward that overlap.
Cell = tuple[Action, ...]
#: The cells of each rank.
Grid = list[list[Cell]]


def parse_cell(text: str) -> Cell:
    text = text.strip()
    if not text:
        return ()
    pair = _PAIR.fullmatch(text)
    actions = []
    for part in pair.groups() if pair else (text,):
        match = _ACTION.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no action")
        actions.append(Action(int(match[1]), match[2], int(match[3])))
    return tuple(actions)


def parse(rows: Iterable[Sequence[str]]) -> Grid:
    """A grid of cells. ValueError: row, rank and column of the first cell that cannot be read."""
    grid: Grid = []
    for rank, row in enumerate(rows):
        grid.append([])
        for column, text in enumerate(row, 1):
            try:
                grid[rank].append(parse_cell(text))
            except ValueError as error:
                format_hint = "an action is a stage, one of F, B, I, W, and a microbatch, as in 2F5"
                message = f"row {rank + 1} (rank {rank}), column {column}: {error}; {format_hint}"
                raise ValueError(message) from None
    return grid


def read(path: str | Path) -> Grid:
    """The grid in a file. OSError: it cannot be read; ValueError: as ``parse``."""
    # utf-8-sig: spreadsheets write a byte-order mark, which would make the first cell unreadable
    with open(path, newline="", encoding="utf-8-sig") as file:
        return parse(csv.reader(file))


def orders(grid: Grid) -> list[list[Action]]:
    """The actions of each rank in order, without the cells in which it waits."""
    return [[action for cell in row for action in cell] for row in grid]


def max_in_flight(order: Iterable[Action]) -> int:
    """Most forwards of stages whose activations a rank keeps at one time, when it follows this order."""
    in_flight = peak = 0
    for action in order:
        # I frees nothing: the backward for the weights still reads the saved inputs
        in_flight += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, in_flight)
    return peak


def microbatches(grid: Grid) -> int:
    return 1 + max((action.microbatch for row in orders(grid) for action in row), default=-1)


def stage_owners(grid: Grid) -> tuple[int, ...]:
    """The rank of each stage of a valid grid."""
    owner = {action.stage: rank for rank, row in enumerate(orders(grid)) for action in row}
    return tuple(owner[stage] for stage in range(len(owner)))
