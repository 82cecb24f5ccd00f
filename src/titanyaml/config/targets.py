"""A ``_target_`` and its arguments, checked from the source file: nothing is imported, torch least of all.

A wrong argument is then refused in the report of all problems, before ranks start. Nothing is reported if the source is
no proof: compiled modules, re-exports, decorated or inherited constructors. Those are checked when the object is built.
"""

import ast
import symtable
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from titanyaml.config.schema_keys import nearest
from titanyaml.errors import Problem


class _Source(NamedTuple):
    """Top-level classes and functions of a module, and all names that it binds."""

    definitions: dict[str, ast.ClassDef | ast.FunctionDef]
    bound: set[str]

    def may_have(self, name: str) -> bool:
        """Whether the module may have the name: a star import and __getattr__ can bind any."""
        return bool(self.bound & {name, "*", "__getattr__"})


def check_target(target: str, *, key: str, arguments: Iterable[str] | None = None) -> list[Problem]:
    """Problems of a target, a dotted path of a class or function, and of the names of its arguments.

    Args:
        key: the node's key, e.g. ``pipeline.plugins.noise``.
        arguments: names; empty means "called without any", None that they are not known.
    """
    module, names = _find_module(target)
    if module is None:
        top = target.partition(".")[0]
        message = f"{target!r}: there is no module {target.rpartition('.')[0] or top!r}"
        hint = f"check the spelling, or install {top}"
        return [Problem(f"{key}._target_", message, allowed="the dotted path of a class", hint=hint)]
    source = _read_source(module.origin)
    if source is None or not names:
        return []
    definition = source.definitions.get(names[0])
    if definition is None and not source.may_have(names[0]):
        similar = nearest(names[0], source.definitions)
        message = f"{target!r}: {Path(str(module.origin)).name} has no {names[0]!r}"
        allowed = ", ".join(name for name in source.definitions if not name.startswith("_"))
        hint = f"{key}._target_={module.name}.{similar[0]}" if similar else ""
        return [Problem(f"{key}._target_", message, allowed=allowed, hint=hint)]
    parameters = None if definition is None else _parameters(definition)
    if arguments is None or len(names) > 1 or parameters is None:
        return []
    return check_arguments(parameters, list(arguments), name=names[0], key=key)


def _find_module(target: str) -> tuple[ModuleSpec | None, list[str]]:
    """The spec of the longest prefix that is a module, and the names behind it."""
    parts = target.split(".")
    try:
        spec = find_spec(parts[0])
    except (ValueError, ImportError):
        spec = None
    used = 1
    # find_spec of a dotted name would import the packages on the way
    while spec is not None and spec.submodule_search_locations is not None and used < len(parts):
        inner = PathFinder.find_spec(".".join(parts[: used + 1]), list(spec.submodule_search_locations))
        if inner is None:
            break
        spec, used = inner, used + 1
    if spec is not None and spec.submodule_search_locations is not None and used < len(parts) - 1:
        source = _read_source(spec.origin)
        if source is not None and not source.may_have(parts[used]):
            return None, []  # pkg.missing.Class: neither a submodule nor a name in the package's own source
    return spec, parts[used:]


@cache
def _read_source(path: str | None) -> _Source | None:
    """None if there is no Python source that could be read."""
    if path is None or not path.endswith(".py"):
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
        statements = list(_statements(ast.parse(text)))
    except (OSError, SyntaxError, ValueError):
        return None
    definitions = {node.name: node for node in statements if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    symbols = symtable.symtable(text, path, "exec").get_symbols()
    bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    imports = (node for node in statements if isinstance(node, ast.ImportFrom))  # the symbol table leaves out "*"
    return _Source(definitions, bound | {alias.name for node in imports for alias in node.names if alias.name == "*"})


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run on import, those inside if and try included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)


def _parameters(definition: ast.ClassDef | ast.FunctionDef) -> dict[str, bool] | None:
    """Parameter name to whether it must be given; None if the source is no proof, or any name is taken."""
    if definition.decorator_list:  # it may change the signature
        return None
    if isinstance(definition, ast.FunctionDef):
        function, num_bound = definition, 0
    else:
        methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
        if "__init__" not in methods:
            # a base's constructor may be anywhere; a metaclass is a keyword
            inherits = definition.keywords or any(ast.unparse(base) != "object" for base in definition.bases)
            return None if inherits or "__new__" in methods else {}
        function, num_bound = methods["__init__"], 1  # self
        if "__new__" in methods or function.decorator_list or function.args.posonlyargs:
            return None
    arguments = function.args
    if arguments.kwarg is not None:  # **kwargs: what it takes is decided inside
        return None
    positional = arguments.args[num_bound:]
    first_default = len(positional) - len(arguments.defaults)
    parameters = {argument.arg: index < first_default for index, argument in enumerate(positional)}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters[argument.arg] = default is None
    return parameters


def check_arguments(
    parameters: Mapping[str, bool], arguments: Collection[str], *, name: str, key: str, takes_any: bool = False
) -> list[Problem]:
    """Unknown and missing arguments of the class or function ``name``; parameters: by name, whether it is required."""
    problems = []
    for argument in arguments:
        if argument not in parameters and not takes_any:
            similar = nearest(argument, parameters)
            allowed = ", ".join(parameters) or "no arguments"
            hint = f"{key}.{similar[0]}=..." if similar else ""
            problems.append(Problem(f"{key}.{argument}", f"{name} has no argument {argument!r}", allowed, hint))
    for parameter, is_required in parameters.items():
        if is_required and parameter not in arguments:
            message = f"{name} needs the argument {parameter!r}"
            problems.append(Problem(f"{key}.{parameter}", message, hint=f"+{key}.{parameter}=..."))
    return problems
