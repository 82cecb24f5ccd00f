from __future__ import annotations

from fractions import Fraction

import pytest

from titanyaml.config import instantiate
from titanyaml.errors import ConfigError, DataError


class Picky:
    def __init__(self, size: int) -> None:
        if size < 0:
            raise DataError("negative", key="size")
        self.size = size


HERE = f"{__name__}.Picky"


def test_reserved_keys_are_no_arguments() -> None:
    node = {
        "_target_": "fractions.Fraction",
        "numerator": 3,
        "denominator": 4,
        "_stage_": "model",
        "_after_": ["tp"],
        "_before_": [],
        "_requires_": [],
        "_conflicts_": [],
    }
    assert instantiate.instantiate(node) == Fraction(3, 4)
    assert len(node) == 8, "the node itself is not changed"


def test_call_arguments_keep_their_identity() -> None:
    shared = object()
    assert instantiate.instantiate({"_target_": "types.SimpleNamespace"}, thing=shared).thing is shared


@pytest.mark.parametrize(("target", "found"), [("fractions.Fraction", Fraction), ("datetime.datetime.now", None)])
def test_locate(target: str, found) -> None:
    assert found is None or instantiate.locate(target) is found
    assert callable(instantiate.locate(target))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("fractions.Frction", "fractions has no 'Frction'"),
        ("no_such.thing", "no module 'no_such'"),
        ("x", "no module 'x'"),
    ],
)
def test_locate_says_what_is_missing(target: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        instantiate.locate(target)


def test_a_module_that_fails_by_itself_is_not_called_missing(tmp_path, monkeypatch) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        instantiate.locate("needs_more.Thing")


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"_target_": "fractions.Fraction", "num": 3}, "unexpected keyword argument 'num'"),
        ({"_target_": "os.system", "command": "true"}, "blocklisted"),
        ({"_target_": "no_such.Thing"}, "no_such"),
    ],
)
def test_instantiate_explains(node: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        instantiate.instantiate(node)


def test_our_own_errors_pass_through() -> None:
    with pytest.raises(DataError, match="negative"):
        instantiate.instantiate({"_target_": HERE, "size": -1})
