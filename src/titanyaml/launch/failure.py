"""The failure of a rank, written by the rank, read by the launcher.

Each failing rank leaves ``errors/rank-<r>.json``. The launcher reports the first in time: the others are mostly ranks
that lost the peer they were communicating with.
"""

import json
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from titanyaml.errors import EXIT_FAILED, ProblemsError, TitanError
from titanyaml.rundir import atomic_write

# How torch.distributed and gloo report that the other side of a connection is gone; there is no common exception class.
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER_TEXT = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    time: seconds since the epoch. type: name of the exception, ``signal`` or ``exit``. message: its text. summary: the
    same in one line. traceback: empty for errors that explain themselves. lost_peer: caused by another rank's end.
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
    """``error`` as a record."""
    code: object = EXIT_FAILED
    if isinstance(error, TitanError):
        code = error.exit_code
    elif isinstance(error, SystemExit):
        code = error.code  # a text or None too
    name, message = type(error).__name__, str(error)
    # an error that explains itself needs no traceback
    trace = "" if isinstance(error, TitanError) else "".join(traceback.format_exception(error))
    exit_code = code if isinstance(code, int) and code else EXIT_FAILED  # 0 would call a failed rank done
    lost_peer = name in _LOST_PEER_TYPES or any(text in message for text in _LOST_PEER_TEXT)
    return Failure(rank, time.time(), name, message, _summary(error), trace, exit_code, lost_peer)


def _summary(error: BaseException) -> str:
    if isinstance(error, ProblemsError):
        return "; ".join(f"{problem.key}: {problem.message}".removeprefix(": ") for problem in error.problems)
    return (str(error).splitlines() or [""])[0]


def write(failure: Failure, run_dir: Path) -> None:
    """Leave ``failure`` for the launcher."""
    atomic_write(run_dir / "errors" / f"rank-{failure.rank}.json", json.dumps(asdict(failure), indent=2) + "\n")


def collect(run_dir: Path) -> list[Failure]:
    """The failures that ranks wrote."""
    return [Failure(**json.loads(path.read_text())) for path in sorted((run_dir / "errors").glob("rank-*.json"))]


def clear(run_dir: Path) -> None:
    """Forget the errors of earlier attempts."""
    for path in (run_dir / "errors").glob("rank-*.json"):
        path.unlink()


def earliest(failures: list[Failure]) -> Failure:
    """The cause: the first in time that is not itself the loss of a peer."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.time))  # False is before True
