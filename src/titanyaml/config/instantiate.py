"""From a node with ``_target_`` to an object: the one place that calls ``hydra.utils.instantiate``.

Hydra refuses targets that start processes, read pickles or set attributes; that policy is left as it is.
"""

from __future__ import annotations

import importlib
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate as hydra_instantiate

from titanyaml.errors import ConfigError, TitanError

#: Keys of a plugin node that order it; they are no constructor arguments.
RESERVED = ("_stage_", "_after_", "_before_", "_requires_", "_conflicts_")


def locate(target: str) -> Any:
    """The object at a dotted path; its module is imported.

    Raises:
        ConfigError: no such module, or the module has no such name. An import that fails by itself raises as it is.
    """
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                continue  # this part of the path is no module: a class, perhaps
            raise
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                raise ConfigError(f"{name} has no {attribute!r}", key="_target_")
            found, name = getattr(found, attribute), f"{name}.{attribute}"
        return found
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
    arguments = {name: value for name, value in node.items() if name not in RESERVED}
    try:
        return hydra_instantiate(arguments, _convert_="all", **kwargs)
    except InstantiationException as error:
        if isinstance(error.__cause__, TitanError):
            raise error.__cause__ from error
        reason = error.__cause__ or error
        raise ConfigError(f"{node.get('_target_')}: {type(reason).__name__}: {reason}", key="_target_") from error
