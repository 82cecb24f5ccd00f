"""Targets and plugin nodes, from their source alone."""

from __future__ import annotations

import sys
import textwrap

import pytest

from titanyaml.config.plugin_nodes import check_plugins, check_runner
from titanyaml.config.targets import check_target


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that cannot be imported: what is checked must not need it."""
    folder = tmp_path / "theirs"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('theirs was imported')\n")
    (folder / "inner" / "__init__.py").write_text("raise ImportError\n")
    (folder / "inner" / "noise.py").write_text(
        textwrap.dedent("""
        import dataclasses
        from elsewhere import Other

        class Noise:
            def __init__(self, amount, *, seed=0, loud: bool): ...

        class Open:
            def __init__(self, amount=1, **rest): ...

        class Bare:
            stage = "model"

        class Child(Noise): ...

        @dataclasses.dataclass
        class Data:
            amount: int

        if True:
            def make(amount, steps=1): ...

        Alias = Noise
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "theirs.inner.noise"
    assert "theirs" not in sys.modules


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Noise", ["amount", "loud"]),
        ("Noise", ["amount", "seed", "loud"]),
        ("Open", ["anything"]),
        ("Bare", []),
        ("Child", ["whatever"]),
        ("Data", ["whatever"]),
        ("Alias", ["whatever"]),
        ("Other", ["whatever"]),
        ("make", ["amount"]),
        ("Noise.build", ["whatever"]),
    ],
)
def test_right_or_not_to_be_told_from_the_source(package: str, name: str, arguments: list[str]) -> None:
    assert check_target(f"{package}.{name}", key="node", arguments=arguments) == []


@pytest.mark.parametrize(
    ("name", "arguments", "key", "message", "hint"),
    [
        ("Noise", ["amount", "loud", "sed"], "node.sed", "Noise has no argument 'sed'", "node.seed=..."),
        ("Noise", ["amount"], "node.loud", "Noise needs the argument 'loud'", "+node.loud=..."),
        ("Noise", ["loud"], "node.amount", "Noise needs the argument 'amount'", "+node.amount=..."),
        ("Bare", ["x"], "node.x", "Bare has no argument 'x'", ""),
        ("make", [], "node.amount", "make needs the argument 'amount'", "+node.amount=..."),
        ("Nois", [], "node._target_", "noise.py has no 'Nois'", "node._target_=theirs.inner.noise.Noise"),
    ],
)
def test_wrong(package: str, name: str, arguments: list[str], key: str, message: str, hint: str) -> None:
    (problem,) = check_target(f"{package}.{name}", key="node", arguments=arguments)
    assert problem.key == key and message in problem.message and problem.hint == hint


@pytest.mark.parametrize(
    ("target", "module"),
    [
        ("no_such_package.Thing", "no_such_package"),
        ("theirs.outer.Thing", "theirs.outer"),
        ("theirs.inner.nois.Noise", "theirs.inner.nois"),
    ],
)
def test_no_such_module(package: str, target: str, module: str) -> None:
    (problem,) = check_target(target, key="node", arguments=[])
    assert f"there is no module '{module}'" in problem.message
    assert "install" in problem.hint


def test_compiled_and_foreign_modules_are_left_to_the_ranks() -> None:
    assert check_target("math.sqrt", key="node", arguments=["x"]) == []
    assert check_target("torch.nn.Linear", key="node", arguments=["in_features", "out_features"]) == []


def test_our_own_plugins() -> None:
    (problem,) = check_target("titanyaml.plugins.fsdp.FullyShard", key="node", arguments=["reshard"])
    assert problem.hint == "node.reshard_after_forward=..."


def plugins(nodes: dict, literal: dict | None = None, bad: set[str] = frozenset()) -> list:
    return check_plugins({"pipeline": {"plugins": nodes}}, {"pipeline": {"plugins": literal or nodes}}, bad)


def test_plugin_nodes_that_are_right(package: str) -> None:
    good = {"_target_": f"{package}.Bare", "_after_": ["tp"], "_stage_": None}
    assert plugins({"noise": good, "off": {"_target_": None}}) == []


@pytest.mark.parametrize(
    ("node", "key", "text", "hint"),
    [
        ({"amount": 1}, "pipeline.plugins.noise", "a plugin node without _target_", "=null"),
        (None, "pipeline.plugins.noise", "a plugin node without _target_", "=null"),
        ({"_target_": "Bare"}, "pipeline.plugins.noise._target_", "is 'Bare'", ""),
        ({"_target_": 3}, "pipeline.plugins.noise._target_", "is 3", ""),
        (
            {"_target_": None, "_aftr_": ["tp"]},
            "pipeline.plugins.noise._aftr_",
            "unknown reserved key",
            "noise._after_=",
        ),
        ({"_target_": None, "_after_": "tp"}, "pipeline.plugins.noise._after_", "is 'tp'", "noise._after_=[tp]"),
        ({"_target_": None, "_stage_": 3}, "pipeline.plugins.noise._stage_", "is 3", ""),
    ],
)
def test_plugin_nodes_that_are_wrong(node, key: str, text: str, hint: str) -> None:
    (problem,) = plugins({"noise": node})
    assert problem.key == key and text in problem.message and hint in problem.hint


def test_a_reference_that_was_replaced_names_the_group() -> None:
    """``++pipeline.plugins.ac.mode=full`` leaves ``{mode: full}`` of ``${ac}``."""
    (problem,) = plugins({"ac": {"mode": "full"}})
    assert problem.hint == "ac.mode=full"


def test_a_referenced_group_is_checked_under_its_own_name(package: str) -> None:
    node = {"_target_": f"{package}.Bare", "mode": "full"}
    (problem,) = plugins({"ac": node}, {"ac": "${ac}"})
    assert problem.key == "ac.mode"
    assert plugins({"ac": node}, {"ac": "${ac}"}, {"ac.mode"}) == []  # told before


def test_runner_target() -> None:
    assert check_runner({"runner": {"_target_": "titanyaml.runner.train.train"}}) == []
    (problem,) = check_runner({"runner": {"_target_": "titanyaml.runner.train.trian"}})
    assert problem.key == "runner._target_"
