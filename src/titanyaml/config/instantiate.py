"""From a node with ``_target_`` to an object: the one place that calls ``hydra.utils.instantiate``.

Hydra refuses targets that start processes, read pickles or set attributes; that policy is left as it is.
"""

import importlib
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate as hydra_instantiate

from titanyaml.errors import ConfigError, TitanError

#: Keys of a plugin node that order it; they are no constructor arguments.
RESERVED = ("_stage_", "_after_", "_before_", "_requires_", "_conflicts_")


def locate(target: str) -> Any:
    """The object at a dotted path; its module is imported.

    Raises ConfigError if there is no such module or name in it. An import that fails by itself raises as it is.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):  # the longest path first: a submodule goes before its package's names
        path = ".".join(parts[:length])
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and (path == error.name or path.startswith(f"{error.name}.")):
                continue  # this part of the path is no module: a class, perhaps
            raise  # a module that it imports is missing
        for attribute in parts[length:]:
            if not hasattr(value, attribute):
                raise ConfigError(f"{path} has no {attribute!r}", key="_target_")
            value, path = getattr(value, attribute), f"{path}.{attribute}"
        return value
    raise ConfigError(
        f"no module {'.'.join(parts[:-1]) or target!r}",
        key="_target_",
        hint="a dotted path such as package.module.Class, installed in this environment",
    )


def instantiate(node: dict[str, Any], **kwargs: Any) -> Any:
    """Build the object that a node describes.

    Args:
        node: plain dict with ``_target_``; the reserved keys are dropped, the rest are arguments.
        **kwargs: further arguments; no dicts (Hydra would merge them into the node).

    Raises:
        ConfigError: the target cannot be found, is refused by Hydra's policy, or refuses its arguments.
        TitanError: what the constructor itself raised, as it is.
    """
    assert not any(isinstance(value, dict) for value in kwargs.values()), "dict arguments would be merged into the node"
    # _convert_: constructors get lists and dicts, not OmegaConf's containers
    arguments = {name: value for name, value in node.items() if name not in RESERVED}
    try:
        return hydra_instantiate(arguments, _convert_="all", **kwargs)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, TitanError):
            raise cause from error
        raise ConfigError(f"{node.get('_target_')}: {type(cause).__name__}: {cause}", key="_target_") from error
