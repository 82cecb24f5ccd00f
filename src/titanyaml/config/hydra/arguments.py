"""The command line before Hydra reads it: flags anywhere, relative --config-path, errors in words."""

from pathlib import Path
from typing import NoReturn

from titanyaml.config.hydra.compose_hook import flag_parser
from titanyaml.errors import ConfigError

_CONFIG_PATH = ("--config-path", "-cp")


def prepare(arguments: list[str]) -> tuple[list[str], bool]:
    """Reorder the command line for Hydra: (flags first, then overrides, with ``--config-path`` absolute; is it help).

    Hydra 1.3 stops reading overrides at the first flag after one, and takes a relative path as inside the package.
    Raises ConfigError for an unknown flag, or a flag without its value.
    """
    parser = flag_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message, key="command line", hint=_hint(arguments))

    parser.error = refuse  # type: ignore[method-assign]  # argparse would print and exit
    parsed = parser.parse_intermixed_args(arguments)
    overrides = parsed.overrides
    flags = arguments[::-1]
    for override in reversed(overrides):
        flags.remove(override)  # the last one in the command line: an earlier equal text may be the value of a flag
    flags.reverse()
    return [*_absolute(flags), *overrides], parsed.help or parsed.hydra_help


def _hint(arguments: list[str]) -> str:
    dashed = [argument.lstrip("-") for argument in arguments if argument.startswith("--") and "=" in argument]
    # --config-dir=D and its like are the flags that take "="
    if keys := [argument for argument in dashed if not argument.startswith("config-")]:
        return f"keys have no dashes: {' '.join(keys)}"
    return "--hydra-help lists the flags; keys are given as key=value"


def _absolute(flags: list[str]) -> list[str]:
    result = list(flags)
    for i, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in _CONFIG_PATH and equals:
            result[i] = f"{name}={_absolute_path(value)}"
        elif i and flags[i - 1] in _CONFIG_PATH:
            result[i] = _absolute_path(flag)
    return result


def _absolute_path(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())
