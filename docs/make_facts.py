"""Measure the source and write the result into docs/architecture.md, between its two ``facts`` marks.

    python docs/make_facts.py           print the facts and write them (``make facts``)
    python docs/make_facts.py --check   exit 1 where the page is stale

``tests/test_structure.py`` holds the limits.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"
MARKS = "<!-- facts -->", "<!-- /facts -->"

#: Names that say what happened to a value, or that it exists, but not what it is.
VAGUE_NAMES = frozenset(
    """one ones found made told here there kept near way ways place places rest what who how where other others whole
    known mine theirs given held left taken gone said asked seen thing things wanted needed done now again most every
    same
    """.split()  # noqa: SIM905 - a paragraph of words is easier to keep than a list of strings
)


@dataclass(frozen=True)
class Module:
    """One source file. ``name`` is dotted, without ``__init__``."""

    path: Path

    @cached_property
    def name(self) -> str:
        return ".".join(self.path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """First-level folder or file below ``titanyaml``; ``hydra_plugins`` is one package."""
        top, *below = self.name.split(".")
        return below[0] if top == "titanyaml" and below else top

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def num_comments(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)

    @property
    def num_docstring_lines(self) -> int:
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        bodies = [
            node.body[0] for node in ast.walk(self.tree) if isinstance(node, documented) and ast.get_docstring(node)
        ]
        return sum(string.end_lineno - string.lineno + 1 for string in bodies)

    @property
    def function_lengths(self) -> dict[str, int]:
        functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {f"{self.name}.{node.name}": node.end_lineno - node.lineno + 1 for node in functions}

    @property
    def assigned_names(self) -> list[str]:
        return [name for node in ast.walk(self.tree) for target in _targets(node) for name in _names(target)]


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.comprehension | ast.NamedExpr):
        return [node.target]
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return [node.optional_vars]
    return []


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _names(element)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)


def modules() -> list[Module]:
    return [Module(path) for path in sorted(SRC.rglob("*.py"))]


# Imports -------------------------------------------------------------------------------------------------------------


def imports(tree: ast.AST, *, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether the import runs when the module is imported); what only type checkers read is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", at_import) for alias in node.names)
        yield from imports(node, at_import=at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def import_graph(all_modules: Sequence[Module]) -> dict[str, set[str]]:
    """Module to the modules of this project that it imports, inside functions too."""
    known_names = {module.name for module in all_modules}
    graph: dict[str, set[str]] = {module.name: set() for module in all_modules}
    for module in all_modules:
        for name, _ in imports(module.tree):
            target = name if name in known_names else name.rpartition(".")[0]
            if target in known_names and target != module.name:
                graph[module.name].add(target)
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other around a circle (strongly connected components, Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            start = stack.index(module)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                components.append(component)

    for module in graph:
        if module not in index:
            visit(module)
    return components


def two_way_pairs(all_modules: Sequence[Module]) -> list[tuple[str, str]]:
    """Packages that import each other."""
    package_of = {module.name: module.package for module in all_modules}
    edges = {
        (package_of[module], package_of[imported])
        for module, imported_modules in import_graph(all_modules).items()
        for imported in imported_modules
    }
    return sorted(pair for pair in edges if pair[0] < pair[1] and pair[::-1] in edges)


def repeated_classes(all_modules: Sequence[Module]) -> dict[str, list[str]]:
    """Public class names that stand in several modules, with the modules."""
    homes = defaultdict(list)
    for module in all_modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module.name)
    return {name: homes[name] for name in sorted(homes) if len(homes[name]) > 1}


# Private API ---------------------------------------------------------------------------------------------------------

LIBRARIES = ("torch", "torchao", "hydra", "omegaconf", "triton", "aim")


def private_names(module: Module) -> list[str]:
    """Private modules and names of other libraries that the file imports or reaches for."""
    foreign = _foreign_names(module)
    names = {name for name, _ in imports(module.tree)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, foreign)):
            names.add(name)
    private = {name for name in names if name.split(".")[0] in LIBRARIES and _is_private(name)}
    return sorted(name for name in private if not any(name.startswith(f"{prefix}.") for prefix in private))


def _is_private(name: str) -> bool:
    """Whether the last part is private, or a private module is on the way to it."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def monkeypatches(module: Module) -> list[str]:
    """Attributes of other libraries' modules and classes that the file assigns."""
    foreign = _foreign_names(module)
    assigned = [target for node in ast.walk(module.tree) if isinstance(node, ast.Assign) for target in node.targets]
    patched = {_dotted(target, foreign) for target in assigned if isinstance(target, ast.Attribute)}
    return sorted(patched - {""})


def _foreign_names(module: Module) -> dict[str, str]:
    """Names that stand for other libraries' modules and objects in a file, with what they stand for."""
    foreign = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                foreign[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module:
            foreign.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {bound: name for bound, name in foreign.items() if name.split(".")[0] in LIBRARIES}


def _dotted(node: ast.Attribute, foreign: dict[str, str]) -> str:
    """``torch.nn.functional.rms_norm`` for ``F.rms_norm``; "" for an attribute of anything else."""
    parts = [node.attr]
    base = node.value
    while isinstance(base, ast.Attribute):
        parts.append(base.attr)
        base = base.value
    if not isinstance(base, ast.Name) or base.id not in foreign:
        return ""
    return ".".join([foreign[base.id], *reversed(parts)])


def tried_versions(module: Module) -> str:
    """What the file's ``TRIED_...`` constants say: releases of a library that its private API was tried with."""
    tried = []
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("TRIED_"):
            library = ast.unparse(node.targets[0]).removeprefix("TRIED_").lower()
            tried.append(f"{library} {', '.join(ast.literal_eval(node.value))}")
    return "; ".join(tried)


# The page ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Figures of some modules."""

    modules: Sequence[Module]

    @property
    def num_lines(self) -> int:
        return sum(module.num_lines for module in self.modules)

    @property
    def comments_per_100(self) -> float:
        return 100 * sum(module.num_comments for module in self.modules) / max(self.num_lines, 1)

    @property
    def docstrings_per_100(self) -> float:
        return 100 * sum(module.num_docstring_lines for module in self.modules) / max(self.num_lines, 1)

    @property
    def vague_percent(self) -> float:
        names = [name for module in self.modules for name in module.assigned_names]
        return 100 * sum(name in VAGUE_NAMES for name in names) / max(len(names), 1)

    @property
    def function_lengths(self) -> dict[str, int]:
        return {name: length for module in self.modules for name, length in module.function_lengths.items()}

    @property
    def long_files(self) -> list[str]:
        return [module.name for module in self.modules if module.num_lines > 400]


def facts_table(all_modules: Sequence[Module]) -> str:
    """The facts as Markdown."""
    facts = Facts(all_modules)
    lengths = sorted(facts.function_lengths.values())
    longest = max(facts.function_lengths, key=facts.function_lengths.__getitem__)
    rows = [
        ("lines of source", f"{facts.num_lines:,} in {len(all_modules)} files"),
        ("import circles between files", str(len(circles(import_graph(all_modules))))),
        ("pairs of packages that import each other", str(len(two_way_pairs(all_modules)))),
        ("files over 400 lines", str(len(facts.long_files))),
        (
            "function lines: median, 90th percentile",
            f"{statistics.median(lengths):.0f}, {lengths[len(lengths) * 9 // 10]}",
        ),
        ("longest function", f"{lengths[-1]} lines, `{longest}`"),
        ("comments, docstring lines a 100 lines", f"{facts.comments_per_100:.1f}, {facts.docstrings_per_100:.1f}"),
        ("vague names among assigned names", f"{facts.vague_percent:.2f} %"),
    ]
    text = "| fact | value |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)
    by_package = defaultdict(list)
    for module in all_modules:
        by_package[module.package].append(module)
    text += "\n| package | lines | files | comments a 100 lines |\n|---|---|---|---|\n"
    for package, members in sorted(by_package.items(), key=lambda item: -Facts(item[1]).num_lines):
        part = Facts(members)
        text += f"| `{package}` | {part.num_lines:,} | {len(members)} | {part.comments_per_100:.1f} |\n"
    text += "\n| file with private API | names | tried with |\n|---|---|---|\n"
    for module in all_modules:
        if private := private_names(module):
            text += f"| `{module.path.relative_to(SRC)}` | {_code(private)} | {tried_versions(module)} |\n"
    text += "\n| file that changes other libraries | what it replaces or sets |\n|---|---|\n"
    for module in all_modules:
        if patched := monkeypatches(module):
            text += f"| `{module.path.relative_to(SRC)}` | {_code(patched)} |\n"
    return text


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page(text: str) -> str:
    """docs/architecture.md with fresh facts."""
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n{facts_table(modules())}{MARKS[1]}{after}"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    fresh = page(text)
    if "--check" in sys.argv:
        return int(text != fresh)
    PAGE.write_text(fresh, encoding="utf-8")
    print(facts_table(modules()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
