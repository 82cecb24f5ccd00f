"""Flags anywhere, absolute paths, errors in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanyaml.config.hydra.arguments import prepare
from titanyaml.errors import ConfigError


def test_flags_may_stand_between_overrides() -> None:
    ordered, is_help = prepare(["a=1", "--multirun", "b=1,2", "--cfg", "job"])
    assert ordered == ["--multirun", "--cfg", "job", "a=1", "b=1,2"] and not is_help


def test_an_override_that_equals_a_flags_value_stays_an_override() -> None:
    assert prepare(["-cn", "x=1", "x=1"])[0] == ["-cn", "x=1", "x=1"]


@pytest.mark.parametrize("flag", [["--config-path", "runs/a"], ["-cp", "runs/a"], ["--config-path=runs/a"]])
def test_a_relative_config_path_means_the_working_directory(
    flag: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "=".join(prepare(flag)[0]).endswith(f"={tmp_path}/runs/a")


def test_other_config_paths_stay() -> None:
    assert prepare(["--config-path", "pkg://mine.conf"])[0] == ["--config-path", "pkg://mine.conf"]
    assert prepare(["--config-path", "/abs"])[0] == ["--config-path", "/abs"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h", "a=1"], ["--hydra-help"]])
def test_help_is_noticed(arguments: list[str]) -> None:
    assert prepare(arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seed=1"], "keys have no dashes: seed=1"),
        (["--sweep"], "--hydra-help"),
        (["a=1", "--cfg"], "expected one argument"),
    ],
)
def test_what_is_no_flag_is_explained(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(arguments)
    assert told in str(refused.value)
