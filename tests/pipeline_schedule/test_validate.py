"""A schedule in a file: what can be wrong with it, and where the message says it is."""

from __future__ import annotations

import pytest

from titanyaml.pipeline_schedule import actions
from titanyaml.pipeline_schedule.validate import first_violation

GOOD = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1"


def grid(text: str) -> actions.Grid:
    return actions.parse(row.split(",") for row in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0",
        "(0F0;0B0)OVERLAP_F_B\n1F0,1B0",
        "0F0,2F0,2B0,0B0\n1F0,,1B0",
        "0F0,1F0,1B0,0B0\n2F0,2I0,2W0",
    ],
)
def test_runnable_schedules(text: str) -> None:
    assert first_violation(grid(text), ranks=2) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # a missing action
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "row 2 (rank 1): the backward 1B1 (or 1I1 and 1W1) is missing"),
        ("0F0,0B0,0B1\n1F0,1B0,1F1,1B1", "row 1 (rank 0): the forward 0F1 is missing"),
        ("0F0,0I0\n1F0,1B0", "row 1 (rank 0): the backward is in two parts, and 0W0 is missing"),
        # one too many
        ("0F0,0F0,0B0\n1F0,1B0", "row 1 (rank 0): 0F0 comes 2 times"),
        ("0F0,0B0\n1F0,1B0,1W0", "row 2 (rank 1): 1B0 is the whole backward, but 1W0 comes too"),
        # a wrong order on one rank
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1", "row 2 (rank 1), column 3: 1B1 comes before 1F1"),
        ("0F0,0W0,0I0\n1F0,1B0", "row 1 (rank 0), column 2: 0W0 comes before 0I0"),
        (
            "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1",
            "row 2 (rank 1), column 1: 1F1 comes before 1F0; the last stage takes the microbatches in their order",
        ),
        # each rank's order is fine, both together are not
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "row 1 (rank 0), column 2: deadlock: 0B0 waits for 1B0 of row 2 (rank 1), column 3, which waits in turn",
        ),
        (
            "2F0,0F0,0B0,2B0\n1F0,1B0",
            "row 1 (rank 0), column 1: deadlock: 2F0 waits for 1F0 of row 2 (rank 1), column 1, which waits in turn",
        ),
        # rows and stages
        ("0F0,0B0", "1 row for 2 pipeline ranks; each rank has one"),
        ("0F0,0B0\n,", "row 2 (rank 1): no action"),
        ("0F0,1B0\n1F0,0B0", "row 2 (rank 1), column 1: 1F0: stage 1 is on rank 0"),
        ("0F0,0B0\n2F0,2B0", "row 2 (rank 1), column 1: 2F0: there is a stage 2, but no stage 1"),
    ],
)
def test_the_first_problem_is_named(text: str, problem: str) -> None:
    assert first_violation(grid(text), ranks=2) == problem


@pytest.mark.parametrize("cell", ["0X1", "F1", "0F", "0SEND_F1", "0UNSHARD", "(0F0;0B0)", "(0F0)OVERLAP_F_B"])
def test_a_cell_that_is_no_action(cell: str) -> None:
    with pytest.raises(ValueError, match=r"row 2 \(rank 1\), column 2: .* is no action; an action is a stage, one of"):
        grid(f"0F0\n1F0,{cell}")
