"""What a rank does in which order, and the file format of it.

A file has a row a rank, in the order of the ranks; a cell is an action, empty where the rank waits. ``2F5``: stage 2
runs the forward of microbatch 5; ``2B5`` its whole backward; ``2I5`` the backward by input only, ``2W5`` the rest of
it, by weight; ``(0F4;3B1)OVERLAP_F_B``: a forward and a backward that belong together.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One computation. kind: F forward, B backward, I backward by input, W backward by weight."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


#: Actions of one cell: none, one, or a forward and a backward that belong together.
Cell = tuple[Action, ...]
#: The cells of each rank.
Grid = list[list[Cell]]


def parse_cell(text: str) -> Cell:
    """The actions of a cell.

    Raises:
        ValueError: it is no cell.
    """
    text = text.strip()
    pair = _PAIR.fullmatch(text)
    actions = []
    for part in pair.groups() if pair else [text] * bool(text):
        match = _ACTION.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no action")
        actions.append(Action(int(match[1]), match[2], int(match[3])))
    return tuple(actions)


def parse(rows: Iterable[Sequence[str]]) -> Grid:
    """A grid of cells.

    Raises:
        ValueError: names the row, the rank and the column of the first cell that is none.
    """
    grid: Grid = []
    for rank, row in enumerate(rows):
        grid.append([])
        for column, text in enumerate(row, 1):
            try:
                grid[rank].append(parse_cell(text))
            except ValueError as error:
                raise ValueError(
                    f"row {rank + 1} (rank {rank}), column {column}: {error}; an action is a stage, one "
                    "of F, B, I, W, and a microbatch, as in 2F5"
                ) from None
    return grid


def read(path: str | Path) -> Grid:
    """The grid in a file.

    Raises:
        ValueError: as ``parse``. OSError: it cannot be read.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        return parse(csv.reader(file))


def orders(grid: Grid) -> list[list[Action]]:
    """The actions of each rank, one after the other."""
    return [[action for cell in row for action in cell] for row in grid]


def most_held(order: Iterable[Action]) -> int:
    """Forwards of stages without their whole backward at one time, on the rank that follows this order."""
    held = most = 0
    for action in order:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, held)
    return most


def microbatches(grid: Grid) -> int:
    """How many there are."""
    return 1 + max((action.microbatch for row in orders(grid) for action in row), default=-1)


def placement(grid: Grid) -> tuple[int, ...]:
    """The rank of each stage; of a grid that is valid."""
    owner = {action.stage: rank for rank, row in enumerate(orders(grid)) for action in row}
    return tuple(owner[stage] for stage in range(len(owner)))
