"""The house stands: imports go to the own folder or to a lower floor, and files and functions stay readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "titanyaml"

#: docs/architecture.md draws the same table. A room is a folder or a file of src/titanyaml.
FLOORS = {
    "__init__": 0,
    "errors": 0,
    "machine": 0,
    "pipeline_schedule": 0,
    "config": 1,
    "rundir": 1,
    "distributed": 2,
    "tokenizer": 3,
    "kernels": 3,
    "float8": 3,
    "data": 4,
    "models": 4,
    "optim": 4,
    "loss": 4,
    "hardware": 4,
    "pipeline": 5,
    "pipeline_parallel": 5,
    "ceilings": 6,
    "plugins": 6,
    "checkpoint": 6,
    "tracker": 6,
    "planner": 7,
    "runner": 8,
    "launch": 9,
    "sweep": 9,
    "cli": 10,
    "__main__": 11,
}
NO_TORCH = ("errors", "machine", "pipeline_schedule", "config", "rundir", "planner", "sweep", "cli", "__main__")


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, whether it runs when the module is imported)."""
    found = []

    def walk(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.extend((f"{child.module}.{alias.name}", at_import) for alias in child.names)
            walk(child, inner)

    walk(ast.parse(path.read_text()), True)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_down(path: Path) -> None:
    own = room(path)
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] != "titanyaml" or len(parts) == 1:
            continue
        other = parts[1] if parts[1] in FLOORS else "__init__"
        assert other == own or FLOORS[other] < FLOORS[own], f"{path.name} (floor {FLOORS[own]}) imports {name}"


@pytest.mark.parametrize("path", [p for p in modules() if room(p) in NO_TORCH], ids=lambda p: str(p.relative_to(SRC)))
def test_the_front_door_imports_no_torch(path: Path) -> None:
    assert not [name for name, at_import in imports(path) if at_import and name.split(".")[0] in ("torch", "torchao")]


@pytest.mark.parametrize("path", [p for p in modules() if room(p) == "plugins"], ids=lambda p: p.name)
def test_no_plugin_imports_another(path: Path) -> None:
    assert not [name for name, _ in imports(path) if name.startswith("titanyaml.plugins.")]


def test_files_and_functions_stay_small() -> None:
    for path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{path.name} wants splitting"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 75, f"{path.name}: {node.name} has {length} lines"


def test_every_folder_is_packaged() -> None:
    listed = (SRC.parents[1] / "setup.cfg").read_text().split("install_requires")[0].split()
    packages = {".".join(path.parent.relative_to(SRC.parent).parts) for path in SRC.rglob("__init__.py")}
    assert packages <= set(listed)
