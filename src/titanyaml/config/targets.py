"""A ``_target_`` checked without importing it: the source file is found and read, the signature is taken from there.

Silent where the source does not tell: compiled modules, re-exports, decorated or inherited constructors. Those are
checked when the object is built, in the ranks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from titanyaml.config.schema_keys import nearest
from titanyaml.errors import Problem


def check_target(target: str, *, key: str, arguments: Iterable[str] | None = None) -> list[Problem]:
    """Problems of a target and, where they are given, of the names of its arguments.

    Args:
        target: dotted path of a class or function.
        key: the node's key, e.g. ``pipeline.plugins.noise``; empty arguments mean "called without any".
    """
    module, names = _find_module(target)
    if module is None:
        top = target.partition(".")[0]
        message = f"{target!r}: there is no module {target.rpartition('.')[0] or top!r}"
        return [
            Problem(
                f"{key}._target_",
                message,
                allowed="the dotted path of a class",
                hint=f"check the spelling, or install {top}",
            )
        ]
    body = _parse(module)
    if body is None or not names:
        return []
    definition = next((node for node in _statements(body) if getattr(node, "name", None) == names[0]), None)
    if definition is None:
        defined = [node.name for node in _statements(body) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        if _binds(body, names[0]):
            return []
        near = nearest(names[0], defined)
        return [
            Problem(
                f"{key}._target_",
                f"{target!r}: {Path(module.origin).name} has no {names[0]!r}",
                allowed=", ".join(name for name in defined if not name.startswith("_")),
                hint=f"{key}._target_={module.name}.{near[0]}" if near else "",
            )
        ]
    if arguments is None or len(names) > 1:
        return []
    signature = _signature(definition)
    return [] if signature is None else _check_arguments(signature, names[0], key, list(arguments))


def _find_module(target: str) -> tuple[ModuleSpec | None, list[str]]:
    """The spec of the longest prefix that is a module, and the names behind it. No package is imported."""
    parts = target.split(".")
    try:
        spec = find_spec(parts[0])
    except (ValueError, ImportError):
        spec = None
    used = 1
    while spec is not None and spec.submodule_search_locations is not None and used < len(parts):
        inner = PathFinder.find_spec(".".join(parts[: used + 1]), list(spec.submodule_search_locations))
        if inner is None:
            break
        spec, used = inner, used + 1
    if spec is not None and spec.submodule_search_locations is not None and used < len(parts) - 1:
        body = _parse(spec)
        if body is not None and not _binds(body, parts[used]):
            return None, []  # pkg.missing.Class: neither a submodule nor a name in the package's own source
    return spec, parts[used:]


@cache
def _read(path: str) -> ast.Module | None:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _parse(spec: ModuleSpec) -> ast.Module | None:
    return _read(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module that run on import, those inside if and try included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)


def _binds(body: ast.Module, name: str) -> bool:
    """Whether a definition, an import or an assignment may bind the name: star imports and __getattr__ bind any."""
    for node in _statements(body):
        if getattr(node, "name", None) in (name, "__getattr__"):
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound = set()
        else:
            leaves = (leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name))
            bound = {leaf.id for leaf in leaves if isinstance(leaf.ctx, ast.Store)}
        if bound & {name, "*"}:
            return True
    return False


def _signature(definition: ast.stmt) -> ast.arguments | None:
    """Arguments of a function, or of a class's own ``__init__`` without ``self``; None where the source is no proof."""
    if definition.decorator_list:
        return None
    if isinstance(definition, ast.FunctionDef):
        return definition.args
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
    init = methods.get("__init__")
    if "__new__" in methods or (init is not None and (init.decorator_list or init.args.posonlyargs)):
        return None
    if init is None:
        inherits = definition.keywords or any(ast.unparse(base) != "object" for base in definition.bases)
        return None if inherits else ast.arguments([], [], None, [], [], None, [])
    own = init.args
    return ast.arguments([], own.args[1:], own.vararg, own.kwonlyargs, own.kw_defaults, own.kwarg, own.defaults)


def _check_arguments(signature: ast.arguments, name: str, key: str, given: list[str]) -> list[Problem]:
    positional = [argument.arg for argument in signature.args]
    allowed = positional + [argument.arg for argument in signature.kwonlyargs]
    keyword_only = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    required = positional[: len(positional) - len(signature.defaults)]
    required += [argument.arg for argument, default in keyword_only if default is None]
    problems = []
    for argument in given if signature.kwarg is None else ():
        if argument not in allowed:
            near = nearest(argument, allowed)
            problems.append(
                Problem(
                    f"{key}.{argument}",
                    f"{name} has no argument {argument!r}",
                    allowed=", ".join(allowed) or "no arguments",
                    hint=f"{key}.{near[0]}=..." if near else "",
                )
            )
    for argument in required:
        if argument not in given:
            message = f"{name} needs the argument {argument!r}"
            problems.append(Problem(f"{key}.{argument}", message, hint=f"+{key}.{argument}=..."))
    return problems
