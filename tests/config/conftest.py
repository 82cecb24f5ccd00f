"""One loader for all tests of a session: making one costs as much as composing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titanyaml.config.hydra import compose_hook, store
from titanyaml.config.hydra.composition_report import CompositionReport, compose_report
from titanyaml.errors import Problem


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    store.register()


@pytest.fixture(scope="session")
def loader() -> compose_hook.Loader:
    return compose_hook.main_loader()


@pytest.fixture
def report(loader: compose_hook.Loader) -> Callable[..., CompositionReport]:
    """``report("optim.lrr=1")``: the shipped configuration with these overrides."""

    def compose_overrides(*overrides: str, multirun: bool = False) -> CompositionReport:
        return compose_report(list(overrides), loader=loader, multirun=multirun)

    return compose_overrides


@pytest.fixture
def refused(report: Callable[..., CompositionReport]) -> Callable[..., dict[str, Problem]]:
    """Problems by key; a key twice is an error of the test's."""

    def problems(*overrides: str, multirun: bool = False) -> dict[str, Problem]:
        found_problems = report(*overrides, multirun=multirun).problems
        by_key = {problem.key: problem for problem in found_problems}
        assert len(by_key) == len(found_problems), found_problems
        return by_key

    return problems


@pytest.fixture
def with_files(tmp_path: Path) -> Callable[..., CompositionReport]:
    """``with_files({"experiment/x.yaml": text}, "experiment=x")``: with a folder of the user's own."""

    def compose_overrides(files: dict[str, str], *overrides: str, multirun: bool = False) -> CompositionReport:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        loader = compose_hook.main_loader(config_dir=str(tmp_path))
        return compose_report(list(overrides), loader=loader, multirun=multirun)

    return compose_overrides


@pytest.fixture
def hooked() -> Iterator[None]:
    """Hydra composes through the report, as in the command line."""
    compose_hook.install()
    yield
    compose_hook.uninstall()
