"""Every failure a user can meet: one class for each kind, with its exit code.

A message says what is wrong and what the value is; ``key`` names the configuration key, ``hint`` what to type instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Scripts and schedulers read these: a number never changes its meaning. docs/configuration.md lists them.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_NON_FINITE = 4
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command again may succeed


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    key: dotted, as ``optim.lr``. message: with the wrong value. allowed: the legal values in words. hint: what to type
    instead. origin: the file or override that holds the value. is_unread: the key was set where nothing reads it.
    """

    key: str
    message: str
    allowed: str = ""
    hint: str = ""
    origin: str = ""
    is_unread: bool = False

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.message}" if self.key else self.message]
        for label, text in (("allowed", self.allowed), ("try", self.hint), ("from", self.origin)):
            if text:
                lines.append(f"    {label}: {text}")
        return "\n".join(lines)


class TitanError(Exception):
    """Base of all errors told to the user without a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.key, self.hint = message, key, hint

    def __str__(self) -> str:
        head = f"{self.key}: {self.message}" if self.key else self.message
        return f"{head}\n    try: {self.hint}" if self.hint else head

    def __reduce__(self) -> tuple[Any, ...]:
        # default pickling loses keyword-only arguments, and errors travel between ranks
        return _rebuild, (type(self), self.__dict__.copy(), self.args)


def _rebuild(cls: type[TitanError], state: dict[str, Any], args: tuple[Any, ...]) -> TitanError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ProblemsError(TitanError):
    """An error that reports all problems at once."""

    title = "problem"

    def __init__(self, problems: Sequence[Problem] | str, *, key: str = "", hint: str = "") -> None:
        if isinstance(problems, str):  # most callers find one problem
            problems = [Problem(key, problems, hint=hint)]
        self.problems = list(problems)
        plural = "" if len(self.problems) == 1 else "s"
        body = "\n".join(f"  {i}. " + str(p).replace("\n", "\n  ") for i, p in enumerate(self.problems, 1))
        super().__init__(f"{len(self.problems)} {self.title}{plural}:\n{body}")


class ConfigError(ProblemsError):
    """The configuration cannot be run as written."""

    exit_code = EXIT_CONFIG
    title = "configuration problem"


class PipelineError(ProblemsError):
    """The plugins cannot be ordered or applied as configured."""

    exit_code = EXIT_CONFIG
    title = "pipeline problem"


class LaunchError(TitanError):
    """Ranks cannot be started as configured (exit 2), or a rank failed (its own exit code)."""

    def __init__(self, message: str, *, key: str = "", hint: str = "", exit_code: int = EXIT_CONFIG) -> None:
        super().__init__(message, key=key, hint=hint)
        self.exit_code = exit_code


class DataError(TitanError):
    """A corpus or tokenizer is missing, unreadable or does not fit the model."""

    exit_code = EXIT_DATA


class CheckpointError(TitanError):
    """A checkpoint cannot be written, or exists and cannot be read."""

    exit_code = EXIT_DATA


class NonFiniteError(TitanError):
    """Loss or gradient norm is NaN or infinite; the update was not applied."""

    exit_code = EXIT_NON_FINITE


class Preempted(TitanError):
    """The run was asked to stop, has saved its state and can be resumed."""

    exit_code = EXIT_PREEMPTED
