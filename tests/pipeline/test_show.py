"""The table and the records show each step, its change, and why other nodes are off."""

from __future__ import annotations

import io
import json

from rich.console import Console

from tests.pipeline import fakes
from tests.pipeline.fakes import context, model, target
from titanyaml.pipeline.resolve import resolve, run
from titanyaml.pipeline.show import merge_numbered_names, module_table, records, table

NODES = {"idle": target(fakes.Idle), "late": target(fakes.Late), "mark": target(fakes.Mark, _stage_="ac")}


def test_records_are_json_in_order():
    resolved = resolve(NODES, context())
    _, changes = run(model(), resolved, context())
    rows = json.loads(json.dumps(records(resolved, changes)))
    assert rows[0] == {
        "order": 1,
        "stage": "ac",
        "node": "mark",
        "class": "tests.pipeline.fakes.Mark",
        "summary": "marked with mark",
        "modules": ["0"],
        "skipped": {"1": "not the first", "2": "not the first"},
        "off": None,
    }
    assert [(row["order"], row["node"], row["off"]) for row in rows] == [
        (1, "mark", None),
        (2, "late", None),
        (None, "idle", "nothing to do on cpu"),
    ]


def test_records_before_the_run_say_nothing_of_modules():
    assert [row["modules"] for row in records(resolve(NODES, context()))] == [None, None, None]


def test_the_table_shows_changes_and_reasons():
    resolved = resolve(NODES, context())
    _, changes = run(model(), resolved, context())
    stream = io.StringIO()
    Console(file=stream, width=120).print(table(resolved, changes))
    text = stream.getvalue()
    for words in ("marked with mark", "left alone: 1, 2: not the first", "idle", "off: nothing to do on cpu", "Late"):
        assert words in text
    assert text.index("mark ") < text.index("late ") < text.index("idle ")


def test_each_module_is_shown():
    resolved = resolve(NODES, context())
    _, changes = run(model(), resolved, context())
    stream = io.StringIO()
    Console(file=stream, width=120).print(module_table(resolved, changes))
    rows = [line.replace("\u2502", " ").split() for line in stream.getvalue().splitlines()]
    assert ["mark", "0"] in rows and ["mark", "{1-2}", "not", "the", "first"] in rows


def test_names_that_differ_in_a_number_share_a_line():
    names = ["layers.0.wq", "layers.1.wq", "layers.3.wq", "layers.2.norm", "output", "layers.0.experts.1", "*"]
    assert merge_numbered_names(names) == ["layers.{0-1,3}.wq", "layers.2.norm", "output", "layers.0.experts.1", "*"]
