"""What went wrong on a rank, written by the rank, read by whoever started it.

Each failing rank leaves ``errors/rank-<r>.json``. The launcher tells the one that came first: the others are mostly
ranks that lost the peer they were talking to.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from titanyaml.errors import EXIT_FAILED, ProblemsError, TitanError
from titanyaml.rundir import atomic_write

_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER_TEXT = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    Args:
        rank: which. time: when (seconds since the epoch).
        type: name of the exception, ``signal`` or ``exit``. message: its text. summary: the same in one line.
        traceback: empty for errors that explain themselves to the user.
        exit_code: what the process exits with. lost_peer: the consequence of another rank's end.
    """

    rank: int
    time: float
    type: str
    message: str
    summary: str
    traceback: str
    exit_code: int
    lost_peer: bool = False

    def text(self) -> str:
        """The block that the user reads."""
        head = f"rank {self.rank} failed: "
        if not self.traceback:
            return f"{head}{self.message}"
        return f"{head}{self.type}: {self.message}\n{self.traceback.rstrip()}"


def of_exception(error: BaseException, *, rank: int) -> Failure:
    """The failure that ``error`` is."""
    known = isinstance(error, TitanError)
    code = error.exit_code if known else error.code if isinstance(error, SystemExit) else EXIT_FAILED
    name, message = type(error).__name__, str(error)
    return Failure(
        rank=rank,
        time=time.time(),
        type=name,
        message=message,
        summary=_summary(error),
        traceback="" if known else "".join(traceback.format_exception(error)),
        exit_code=code if isinstance(code, int) and code else EXIT_FAILED,
        lost_peer=name in _LOST_PEER_TYPES or any(text in message for text in _LOST_PEER_TEXT),
    )


def _summary(error: BaseException) -> str:
    if isinstance(error, ProblemsError):
        return "; ".join(f"{problem.key}: {problem.message}".removeprefix(": ") for problem in error.problems)
    return (str(error).splitlines() or [""])[0]


def write(failure: Failure, run_dir: Path) -> None:
    """Leave ``failure`` for the launcher."""
    atomic_write(run_dir / "errors" / f"rank-{failure.rank}.json", json.dumps(asdict(failure), indent=2) + "\n")


def collect(run_dir: Path) -> list[Failure]:
    """What the ranks left."""
    return [Failure(**json.loads(path.read_text())) for path in sorted((run_dir / "errors").glob("rank-*.json"))]


def clear(run_dir: Path) -> None:
    """Forget the errors of earlier attempts."""
    for path in (run_dir / "errors").glob("rank-*.json"):
        path.unlink()


def earliest(failures: list[Failure]) -> Failure:
    """The cause: the first in time that is not itself the loss of a peer."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.time))
