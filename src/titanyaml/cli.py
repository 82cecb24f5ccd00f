"""The command line. Hydra composes here, in a process that is no rank; torch is not imported.

    main -> hydra.main -> task, once per job -> ranks of its own (launch/local.py), or, under torchrun, this very
    process as one of the ranks (launch/external.py)

Workers of other Hydra launchers (joblib, submitit) import this module to find ``task``, and compose in it: that is why
everything Hydra must know is registered on import.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from titanyaml import sweep
from titanyaml.config import dump
from titanyaml.config.hydra import arguments, compose_hook, store
from titanyaml.config.ranks import world_size as count_ranks
from titanyaml.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ConfigError, TitanError
from titanyaml.launch import external, job
from titanyaml.launch.job import Typed
from titanyaml.rundir import InUse

if TYPE_CHECKING:
    from titanyaml.distributed.env import Env

#: Runners that need no ranks: called in this process. Those of NO_TORCH are handed no environment, and leave a folder.
IN_PROCESS = ("check", "plan")
NO_TORCH = ("plan",)
_FULL_ERROR = "HYDRA_FULL_ERROR"

store.register()
compose_hook.install()


class JobFailed(Exception):
    """A job of a sweep has failed and the user has been told; only the exit code is left to be passed on."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class End(SystemExit):
    """Ends the command at once: after any other exception Hydra would go on to a sweep's next job."""


def main() -> NoReturn:
    """Run the command line and exit with the code that design and docs promise."""
    code = EXIT_FAILED
    try:
        code = _guarded()
    finally:
        if sweep.directory() is not None:
            sweep.report(sweep.directory(), Console(width=None if sys.stdout.isatty() else 200))
    sys.exit(code)


def _guarded() -> int:
    """The exit code of the whole command; every error is told here or was told before."""
    signal.signal(signal.SIGTERM, _terminated)
    asked_for = os.environ.get(_FULL_ERROR)
    try:
        typed, is_help = arguments.prepare(sys.argv[1:])
        if is_help:
            compose_hook.uninstall()  # help works whatever is wrong with the configuration
        sys.argv[1:] = external.hydra_arguments(typed) if external.inside_torchrun() else typed
        os.environ[_FULL_ERROR] = "1"  # Hydra raises its errors instead of printing them and exiting with 1
        hydra.main(version_base="1.3", config_path="pkg://titanyaml.conf", config_name="config")(task)()
    except JobFailed as error:
        return error.exit_code
    except TitanError as error:
        return _tell(error, code=error.exit_code, full=asked_for == "1")
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        return _tell(error, code=EXIT_CONFIG, full=asked_for == "1")
    except OSError as error:  # Hydra makes the folder of a run or sweep before it calls ``task``
        if error.filename is None:
            raise  # a closed pipe
        where = "hydra.sweep.dir" if "-m" in sys.argv or "--multirun" in sys.argv else "run.dir"
        refused = ConfigError(f"the folder cannot be made: {error}", key=where, hint=f"{where}=<a folder to write in>")
        return _tell(refused, code=EXIT_CONFIG, full=asked_for == "1")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_DONE if end.code is None else EXIT_FAILED
    finally:
        _restore(asked_for)
    return EXIT_DONE


def _terminated(number: int, frame: object) -> NoReturn:
    # while ranks run, launch/local.py catches the signal instead
    raise SystemExit(128 + number)


def _tell(error: Exception, *, code: int, full: bool = False) -> int:
    if os.environ.get("RANK", "0") == "0":  # under torchrun all ranks find the same error
        text = "".join(traceback.format_exception(error)) if full else str(error)
        print(text, file=sys.stderr, flush=True)
    return code


def _restore(value: str | None) -> None:
    os.environ.pop(_FULL_ERROR, None)
    if value is not None:
        os.environ[_FULL_ERROR] = value


@contextmanager
def _own_errors(*, is_sweep: bool) -> Iterator[None]:
    """Within a job ``HYDRA_FULL_ERROR`` is not set (it must not reach the ranks), and a surprise of ours is told with
    its traceback rather than taken for a mistake in the configuration."""
    os.environ.pop(_FULL_ERROR, None)
    try:
        yield
    except JobFailed:
        raise
    except Exception as error:
        traceback.print_exc()
        raise (JobFailed if is_sweep else End)(EXIT_FAILED) from error
    finally:
        os.environ[_FULL_ERROR] = "1"


def task(cfg: DictConfig) -> float | None:
    """One job: a single run, or one of a sweep.

    Returns:
        The metric, for Hydra's optimising sweepers.
    """
    node = HydraConfig.get()
    is_sweep = not OmegaConf.is_missing(node.job, "num")
    choices = {group: option for group, option in node.runtime.choices.items() if not group.startswith("hydra/")}
    typed = Typed(list(node.overrides.task), OmegaConf.to_container(OmegaConf.create(choices)), sweep=is_sweep)
    with _own_errors(is_sweep=is_sweep):
        return _job(cfg, Path(node.runtime.output_dir), typed)


def _job(cfg: DictConfig, folder: Path, typed: Typed) -> float | None:
    joins, alone = external.inside_torchrun(), cfg.runner.name in IN_PROCESS
    if joins and typed.sweep:  # by hydra.mode in a file
        refused = external.sweep_refusal()
        raise End(_tell(refused, code=refused.exit_code))
    if joins and not alone:
        return external.run(cfg, folder, typed)
    if joins and os.environ["RANK"] != "0":
        return None
    try:
        if typed.sweep and (problems := compose_hook.problems_for(typed.overrides)):
            raise ConfigError(problems)
        if alone:
            return _in_process(cfg, folder, typed)
        external.refuse_without_torchrun(cfg.launch.kind)
        return _on_ranks(cfg, folder, typed)
    except InUse as busy:
        if not typed.sweep:
            raise End(_tell(busy, code=busy.exit_code)) from busy
        print(f"{busy.message}: left to it", file=sys.stderr, flush=True)
        return None
    except TitanError as error:
        if typed.sweep:
            print(f"{folder.name} ({' '.join(typed.overrides)}):", file=sys.stderr)
            job.record_refusal(folder, error, typed)
        _give_up(cfg, typed, exit_code=_tell(error, code=error.exit_code))


def _on_ranks(cfg: DictConfig, folder: Path, typed: Typed) -> float | None:
    done, outcome = job.run_local(cfg, folder, typed)
    if outcome is None:
        print(f"{folder} is finished; nothing to do", file=sys.stderr, flush=True)
    elif outcome.exit_code != EXIT_DONE:
        if outcome.failure is not None:
            print(outcome.failure.text(), file=sys.stderr)
        print(f"{outcome.state}: {folder}", file=sys.stderr, flush=True)
        if outcome.exit_code == EXIT_PREEMPTED and not typed.sweep:
            ahead = "goes on" if cfg.checkpoint.enabled else "begins anew: checkpoint.enabled=false, nothing was saved"
            print(f"the same command with run.id={done.run_id} {ahead}", file=sys.stderr, flush=True)
        _give_up(cfg, typed, exit_code=outcome.exit_code, interrupted=outcome.signal is not None)
    return done.run.status().get("metric")


def _give_up(cfg: DictConfig, typed: Typed, *, exit_code: int, interrupted: bool = False) -> NoReturn:
    if typed.sweep and not interrupted and cfg.sweep.on_failure == "continue":
        raise JobFailed(exit_code)
    raise End(exit_code)


def _in_process(cfg: DictConfig, folder: Path, typed: Typed) -> float | None:
    """Call a runner that needs no ranks. One that writes nothing leaves no folder, unless it is a job of a sweep."""
    from titanyaml.config import instantiate

    runner, plain = instantiate.locate(cfg.runner._target_), cfg.runner.name in NO_TORCH
    if not plain and not typed.sweep:
        _remove_empty(folder)
        runner(dump.to_dataclass(cfg), None, _environment())
        return None
    opened = job.open_job(cfg, folder, ranks=count_ranks(dump.to_dataclass(cfg)), typed=typed)
    try:
        if not opened.finished:
            result = runner(opened.config, opened.run, None if plain else _environment())
            opened.run.write_status(state="done", exit_code=EXIT_DONE, **(result or {}))
        elif not typed.sweep:
            print(f"{folder} is finished; nothing to do (another run.dir starts anew)", file=sys.stderr, flush=True)
    finally:
        opened.run.release()
    return opened.run.status().get("metric")


def _environment() -> Env:
    from titanyaml.distributed.env import Env  # torch, at last

    return Env.from_environ()


def _remove_empty(folder: Path) -> None:
    """Take back the folders that Hydra made for a run that writes nothing: outputs/<run.name>/<run.id>."""
    for path in (folder, *folder.parents[:2]):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
