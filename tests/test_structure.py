"""The structure of the source: floors, circles, sizes, names, and that every tool sees every file."""

from __future__ import annotations

import fnmatch
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"


def _load_facts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_facts", ROOT / "docs" / "make_facts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


facts = _load_facts()
MODULES = facts.modules()
IMPORTS = facts.import_graph(MODULES)
PACKAGE_OF = {module.name: module.package for module in MODULES}

#: A package imports from itself and from lower floors only. docs/architecture.md shows the same table.
FLOORS = {
    "titanyaml": 0, "errors": 0, "machine": 0, "pipeline_schedule": 0,
    "config": 1, "rundir": 1,
    "distributed": 2,
    "tokenizer": 3, "kernels": 3, "float8": 3,
    "data": 4, "models": 4, "optim": 4, "loss": 4, "hardware": 4,
    "pipeline": 5, "pipeline_parallel": 5,
    "ceilings": 6, "plugins": 6, "checkpoint": 6, "tracker": 6,
    "planner": 7,
    "runner": 8,
    "launch": 9, "sweep": 9, "hydra_plugins": 9,
    "cli": 10,
    "__main__": 11,
}  # fmt: skip
NO_TORCH = {"errors", "machine", "pipeline_schedule", "config", "rundir", "planner", "sweep", "cli", "__main__"}

#: Files that may use private API of other libraries, beside ``distributed/compat*.py``.
PRIVATE_API_FILES = {"titanyaml.config.hydra.compose_hook"}

#: The only file that imports each of these libraries.
SOLE_IMPORTERS = {"triton": "titanyaml.kernels.triton_support", "torchao": "titanyaml.float8"}


def by_name(module) -> str:
    return module.name


@pytest.mark.parametrize("module", MODULES, ids=by_name)
def test_imports_go_to_lower_floors(module) -> None:
    for imported in IMPORTS[module.name]:
        package = PACKAGE_OF[imported]
        is_below = FLOORS[package] < FLOORS[module.package]
        assert package == module.package or is_below, (
            f"{module.name} (floor {FLOORS[module.package]}) imports {imported}"
        )


@pytest.mark.parametrize("module", [module for module in MODULES if module.package in NO_TORCH], ids=by_name)
def test_the_front_door_imports_no_torch(module) -> None:
    at_import = {name.split(".")[0] for name, at_import in facts.imports(module.tree) if at_import}
    assert not at_import & {"torch", "torchao"}


@pytest.mark.parametrize("module", [module for module in MODULES if module.package == "plugins"], ids=by_name)
def test_no_plugin_imports_another(module) -> None:
    assert not [name for name, _ in facts.imports(module.tree) if name.startswith("titanyaml.plugins.")]


def test_no_import_circles() -> None:
    assert facts.circles(IMPORTS) == []
    assert facts.two_way_pairs(MODULES) == []


def test_a_circle_would_be_found() -> None:
    assert facts.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_files_and_functions_stay_small() -> None:
    everything = facts.Facts(MODULES)
    assert everything.long_files == []
    assert {name: length for name, length in everything.function_lengths.items() if length > 60} == {}
    assert everything.num_lines <= 27_000


def test_names_and_comments() -> None:
    everything = facts.Facts(MODULES)
    assert everything.vague_percent <= 0.5
    assert everything.comments_per_100 >= 5


def test_class_names_are_unique() -> None:
    assert facts.repeated_classes(MODULES) == {}


@pytest.mark.parametrize("module", [module for module in MODULES if facts.private_names(module)], ids=by_name)
def test_private_api_stays_in_its_files_with_the_versions_it_was_tried_with(module) -> None:
    is_compat = module.name.startswith("titanyaml.distributed.compat")
    assert is_compat or module.name in PRIVATE_API_FILES, facts.private_names(module)
    assert facts.tried_versions(module)


@pytest.mark.parametrize(("library", "importer"), SOLE_IMPORTERS.items())
def test_a_library_is_imported_by_one_file(library: str, importer: str) -> None:
    def imports_it(module) -> bool:
        by_statement = {name.split(".")[0] for name, _ in facts.imports(module.tree)}
        return library in by_statement or f'_import("{library}.' in module.text  # float8.py imports late, by name

    assert [module.name for module in MODULES if imports_it(module)] == [importer]


def test_the_page_of_facts_is_fresh() -> None:
    text = facts.PAGE.read_text(encoding="utf-8")
    assert text == facts.page(text), "stale: run make facts"


def test_every_folder_is_packaged() -> None:
    packages = (ROOT / "setup.cfg").read_text().split("install_requires")[0].split()
    folders = {".".join(path.parent.relative_to(SRC).parts) for path in SRC.rglob("__init__.py")}
    assert folders <= set(packages)


def _tracked(*folders: str) -> set[Path]:
    return {path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts}


def test_every_source_file_is_linted() -> None:
    ruff = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    shown = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert _tracked("src", "tests", "benchmarks", "docs") <= {Path(line) for line in shown if line}


def test_every_source_file_is_type_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy.main import process_options

    monkeypatch.chdir(ROOT)
    sources, options = process_options([])
    assert _tracked("src") <= {Path(source.path).resolve() for source in sources}
    assert not options.exclude


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    config, test_files = request.config, set((ROOT / "tests").rglob("test_*.py"))
    for path in test_files:
        for folder in path.relative_to(ROOT).parts[:-1]:
            patterns = config.getini("norecursedirs")
            assert not any(fnmatch.fnmatch(folder, pattern) for pattern in patterns), f"{path}: {folder} is left out"
    selects = config.option.keyword or config.option.markexpr or config.option.deselect
    if config.args == [str(ROOT / "tests")] and not selects:  # a whole run knows what it collected
        assert test_files == {item.path for item in request.session.items}
