"""docs/configuration.md: its table is the schema's, and the groups it names are those that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from titanyaml.config import schema, schema_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Every page of the repository.
PAGES = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), ROOT / "experiments/README.md"]
#: Folders of the reader's own, in examples.
EXAMPLE_FOLDERS = ("my_conf/", "their_pkg/", "conf/local/", "checkpoints/")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", DOCS / "make_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_keys_is_fresh(maker: ModuleType) -> None:
    text = maker.PAGE.read_text(encoding="utf-8")
    assert text == maker.page(text), "stale: run python docs/make_configuration.py"


def test_every_key_has_a_row(maker: ModuleType) -> None:
    rows = set(re.findall(r"^\| `([\w.]+)` \|", maker.tables(), re.MULTILINE))
    sections = {key.name for key in schema_keys.keys_of(schema.Config).values() if key.is_section}
    assert set(schema_keys.all_keys()) - sections - {"user"} <= rows


def test_every_group_has_a_row() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", text.partition("<!-- keys")[0], re.MULTILINE))
    groups = {path.name for path in (DOCS.parent / "conf").iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    assert listed >= (groups - {"local"}) | {"experiment"}


def test_every_option_is_in_the_row_of_its_group() -> None:
    """Written whole, or without what it shares with the one before (`llama3_1b`, `3b`)."""
    text = (DOCS / "configuration.md").read_text(encoding="utf-8").partition("<!-- keys")[0]
    for group, listed in re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE):
        names = set(re.findall(r"`(\w+)`", listed))
        for option in (DOCS.parent / "conf" / group).glob("*.yaml"):
            assert any(option.stem == name or option.stem.endswith(f"_{name}") for name in names), option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_the_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_the_documents_exist(page: Path) -> None:
    """`kernels/adamw.py`, `conf/hardware/` and so on: below src/titanyaml, the repository or the page's own folder."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    folders = (ROOT, ROOT / "src" / "titanyaml", ROOT / "src", page.parent, ROOT / "benchmarks")
    for path in re.findall(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|yaml|csv|json))?|\w+\.py)`", text):
        is_example = path.startswith(EXAMPLE_FOLDERS)
        assert is_example or any((folder / path).exists() for folder in folders), f"{page.name} names {path}"


def documented_runs() -> list[str]:
    """Second column of the table of published runs."""
    text = (DOCS / "parallelism.md").read_text(encoding="utf-8").partition("## Published runs")[2].partition("\n## ")[0]
    return re.findall(r"^\| .+ \| `(.+)` \|$", text, re.MULTILINE)


@pytest.mark.parametrize("typed", documented_runs())
def test_published_runs_are_accepted(report, typed: str) -> None:
    assert report("runner=check", "tokenizer=bytes", "tracker=none", *typed.split()).problems == []


def test_there_are_published_runs() -> None:
    assert len(documented_runs()) >= 8
