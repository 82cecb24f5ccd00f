"""Resolution, order and application of plugins, on plugins that behave well or badly."""

from __future__ import annotations

import logging

import pytest

from tests.pipeline import fakes
from tests.pipeline.fakes import context, model, target
from titanyaml.errors import PipelineError
from titanyaml.pipeline.resolve import resolve, run, verify


def order(**nodes):
    return list(resolve(nodes, context()).active)


def refused(**nodes):
    with pytest.raises(PipelineError) as error:
        resolve(nodes, context())
    return error.value.problems


def refusal(**nodes):
    """The one problem of the nodes."""
    [problem] = refused(**nodes)
    return problem


def test_stages_give_the_order_and_the_configuration_breaks_ties():
    assert order(late=target(fakes.Late), b=target(fakes.Mark), early=target(fakes.Early), a=target(fakes.Mark)) == [
        "early",
        "b",
        "a",
        "late",
    ]


def test_after_and_before_override_stages_and_ignore_absent_nodes():
    assert order(after=target(fakes.After), late=target(fakes.Late), mark=target(fakes.Mark)) == [
        "mark",
        "late",
        "after",
    ]
    assert order(mark=target(fakes.Mark), before=target(fakes.Before)) == ["before", "mark"]
    assert order(after=target(fakes.After), mark=target(fakes.Mark)) == ["after", "mark"]


def test_reserved_keys_add_to_the_class():
    assert order(a=target(fakes.Mark, _after_=["b"]), b=target(fakes.Mark)) == ["b", "a"]
    assert order(a=target(fakes.Mark), b=target(fakes.Mark, _before_=["a"])) == ["b", "a"]
    assert order(a=target(fakes.Mark, _stage_="final"), b=target(fakes.Late)) == ["b", "a"]
    after = order(after=target(fakes.After, _after_=["mark"]), late=target(fakes.Late), mark=target(fakes.Late))
    assert after == ["late", "mark", "after"]
    assert "needs the node 'x'" in refusal(a=target(fakes.Mark, _requires_=["x"])).message
    assert "'b', and both are on" in refusal(a=target(fakes.Mark, _conflicts_=["b"]), b=target(fakes.Mark)).message


def test_a_cycle_of_after_and_before_is_named():
    problem = refusal(
        a=target(fakes.Mark, _after_=["c"]),
        b=target(fakes.Mark, _after_=["a"]),
        c=target(fakes.Mark, _after_=["b"]),
        d=target(fakes.Mark),
    )
    assert problem.key == "pipeline.plugins"
    assert sorted(problem.message.partition(": ")[2].split(" -> ")[1:]) == ["a", "b", "c"]


def test_nodes_that_are_off_are_dropped_with_their_reason():
    nodes = {"null": {"_target_": None, "mode": "x"}, "idle": target(fakes.Idle), "mark": target(fakes.Mark)}
    resolved = resolve(nodes, context())
    assert resolved.active == ("mark",)
    assert resolved.off == {"null": "switched off (_target_: null)", "idle": "nothing to do on cpu"}


def test_arguments_are_bound_and_check_sees_active_nodes():
    [(_, mark)] = resolve({"mark": target(fakes.Mark, tag="x", _stage_=None, _after_=[])}, context()).steps
    assert mark.tag == "x"
    assert resolve({"asks": target(fakes.Asks), "idle": target(fakes.Idle), "late": target(fakes.Late)}, context())


def test_requires_and_conflicts():
    friend, foe = target(fakes.Mark), target(fakes.Late)
    assert order(needy=target(fakes.Needy), friend=friend) == ["needy", "friend"]
    absent = refusal(needy=target(fakes.Needy), frend=friend)
    assert absent.message == "needs the node 'friend', which is not in pipeline.plugins"
    assert absent.hint == "did you mean 'frend'?"
    off = refusal(needy=target(fakes.Needy), friend=target(fakes.Idle))
    assert "is off: nothing to do on cpu" in off.message
    both = refusal(needy=target(fakes.Needy), friend=friend, foe=foe)
    assert both.key == "pipeline.plugins.needy" and "'foe'" in both.message


@pytest.mark.parametrize(
    ("node", "key", "words", "hint"),
    [
        (target(fakes.Mark, tagg="x"), "p.tagg", "Mark has no argument 'tagg'", "p.tag=..."),
        (target(fakes.Picky), "p.size", "Picky needs the argument 'size'", "p.size=..."),
        (target(fakes.Picky, size=0), "p", "ValueError: size is 0", ""),
        (target(fakes.Mark, _aftr_=["x"]), "p._aftr_", "unknown reserved key", "_after_="),
        (target(fakes.Mark, _after_="late"), "p._after_", "is 'late'", ""),
        (target(fakes.Mark, _stage_="modell"), "p._stage_", "no such stage: 'modell'", "'model'"),
        (target(fakes.NoStage), "p._target_", "names no stage", ""),
        (target(fakes.NoPlugin), "p._target_", "has no check and no apply", ""),
        (target(fakes.StringAfter), "p._target_", "StringAfter.after is 'late'", ""),
        ({"_target_": "tests.pipeline.fakes.Marc"}, "p._target_", "has no 'Marc'", "spelling"),
        ({"_target_": "no_such_package.Plugin"}, "p._target_", "no_such_package", "installed"),
        ({"mode": "full"}, "p", "not a plugin node", ""),
        ("Mark", "p", "not a plugin node: 'Mark'", ""),
    ],
)
def test_a_bad_node_is_refused(node, key, words, hint):
    problem = refusal(p=node)
    assert problem.key == f"pipeline.plugins.{key}"
    assert words in problem.message
    assert hint in problem.hint


def test_all_problems_come_at_once():
    problems = refused(
        mark=target(fakes.Mark, bad=True),
        wrong=target(fakes.Mark, tagg=1),
        missing={"_target_": "gone.Away"},
        needy=target(fakes.Needy, _requires_=["wrong"]),
        x=target(fakes.Mark, _after_=["mark"], _before_=["mark"]),
    )
    assert [problem.key.removeprefix("pipeline.plugins.") for problem in problems] == [
        "wrong.tagg",
        "missing._target_",
        "mark.bad",
        "needy",
        "pipeline.plugins",
    ], "a node that failed to bind counts as present for those that require it"


def test_run_applies_in_order_and_logs_each_change(caplog):
    resolved = resolve({"late": target(fakes.Late, tag="2"), "mark": target(fakes.Mark, tag="1")}, context())
    with caplog.at_level(logging.DEBUG, logger="titanyaml.pipeline"):
        transformed, changes = run(model(), resolved, context())
    assert transformed[0].tags == ["1", "2"]
    assert {name: change.summary for name, change in changes} == {"mark": "marked with 1", "late": "marked with 2"}
    assert caplog.messages == [
        "mark: marked with 1",
        "mark: left alone: 1, 2: not the first",
        "late: marked with 2",
        "late: left alone: 1, 2: not the first",
    ]


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (fakes.Nothing, "was asked for and changed nothing (found no layer; left alone: 0: too small)"),
        (fakes.Untie, "changed what is tied: 1.weight was 0.weight, is 1.weight"),
        (fakes.Rename, "lost 0.weight, 1.weight; added 0.0.weight, 0.1.weight"),
        (fakes.Forgetful, "apply() returned Sequential, not (model, Change)"),
    ],
)
def test_a_bad_change_is_refused(cls, words):
    resolved = resolve({"bad": target(cls)}, context())
    with pytest.raises(PipelineError) as error:
        run(model(), resolved, context())
    [problem] = error.value.problems
    assert problem.key == "pipeline.plugins.bad"
    assert words in problem.message


def test_an_exception_names_its_plugin():
    with pytest.raises(RuntimeError, match="boom") as error:
        run(model(), resolve({"bad": target(fakes.Crashes)}, context()), context())
    assert error.value.__notes__ == ["while applying the plugin 'bad' (Crashes)"]


def test_verify_calls_plugins_that_have_it_and_collects_their_errors():
    nodes = {"mark": target(fakes.Mark), "checked": target(fakes.Checked)}
    resolved = resolve(nodes, context())
    transformed, _ = run(model(), resolved, context())
    [(name, change)] = verify(transformed, resolved, context())
    assert (name, change.summary) == ("checked", "tags are ['mark', 'mark']")

    nodes |= {"a": target(fakes.Failing, tag="one"), "b": target(fakes.Failing, tag="two")}
    with pytest.raises(PipelineError) as error:
        verify(transformed, resolve(nodes, context()), context())
    assert [problem.key for problem in error.value.problems] == ["one", "two"]
