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
from typing import TYPE_CHECKING, Any, NoReturn, cast

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from hydra_plugins.titan_search import TitanSearch
from titanyaml import sweep
from titanyaml.config import dump, instantiate
from titanyaml.config.hydra import arguments, compose_hook, store
from titanyaml.config.world import count_ranks
from titanyaml.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ConfigError, TitanError
from titanyaml.launch import external, job
from titanyaml.launch.job import RequestedRun, UserChoices
from titanyaml.rundir import InUse

if TYPE_CHECKING:
    from titanyaml.distributed.env import Env

#: Runners that need no ranks are called in this process. Those that need no torch either get no environment (``env``).
IN_PROCESS = ("check", "plan")
NO_TORCH = ("plan",)
_FULL_ERROR = "HYDRA_FULL_ERROR"

# Hydra's scan of hydra_plugins sees nothing in an editable install, whose namespace packages are no folders
store.register(TitanSearch)
compose_hook.install()


class JobFailed(Exception):
    """A job of a sweep has failed and the user has been told; only the exit code is left to be passed on."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class CommandEnd(SystemExit):
    """Ends the command at once: after any other exception Hydra would go on to a sweep's next job."""


def main() -> NoReturn:
    """Run the command line and exit with one of the codes of ``errors.py``."""
    code = EXIT_FAILED
    try:
        code = _run_command()
    finally:
        if (sweep_dir := sweep.directory()) is not None:
            # rich takes 80 columns for a pipe, too few for the table
            sweep.report(sweep_dir, Console(width=None if sys.stdout.isatty() else 200))
    sys.exit(code)


def _run_command() -> int:
    """The exit code of the whole command; every error is printed here or was printed before."""
    signal.signal(signal.SIGTERM, _terminate)
    user_setting = os.environ.get(_FULL_ERROR)
    full = user_setting == "1"
    try:
        hydra_arguments, is_help = arguments.prepare(sys.argv[1:])
        if is_help:
            compose_hook.uninstall()  # help works whatever is wrong with the configuration
        if external.inside_torchrun():
            hydra_arguments = external.hydra_arguments(hydra_arguments)
        sys.argv[1:] = hydra_arguments
        os.environ[_FULL_ERROR] = "1"  # Hydra raises its errors instead of printing them and exiting with 1
        hydra.main(version_base="1.3", config_path="pkg://titanyaml.conf", config_name="config")(task)()
    except JobFailed as error:
        return error.exit_code
    except TitanError as error:
        return _print_error(error, code=error.exit_code, full=full)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        return _print_error(error, code=EXIT_CONFIG, full=full)
    except OSError as error:  # Hydra makes the folder of a run or sweep before it calls ``task``
        if error.filename is None:
            raise  # a closed pipe
        key = "hydra.sweep.dir" if "-m" in sys.argv or "--multirun" in sys.argv else "run.dir"
        refusal = ConfigError(f"the folder cannot be made: {error}", key=key, hint=f"{key}=<a folder to write in>")
        return _print_error(refusal, code=EXIT_CONFIG, full=full)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the shell's convention
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_DONE if end.code is None else EXIT_FAILED
    finally:
        os.environ.pop(_FULL_ERROR, None)
        if user_setting is not None:
            os.environ[_FULL_ERROR] = user_setting
    return EXIT_DONE


def _terminate(number: int, frame: object) -> NoReturn:
    # while ranks run, launch/local.py catches the signal instead
    raise SystemExit(128 + number)


def _print_error(error: Exception, *, code: int, full: bool = False) -> int:
    if os.environ.get("RANK", "0") == "0":  # under torchrun all ranks find the same error
        text = "".join(traceback.format_exception(error)) if full else str(error)
        print(text, file=sys.stderr, flush=True)
    return code


@contextmanager
def _own_errors(*, is_sweep: bool) -> Iterator[None]:
    """A job without Hydra's error handling around it.

    ``HYDRA_FULL_ERROR`` is unset, because it must not reach the ranks. An unexpected exception is printed with its
    traceback, so that ``_run_command`` cannot take it for a mistake in the configuration.
    """
    os.environ.pop(_FULL_ERROR, None)
    try:
        yield
    except JobFailed:
        raise
    except Exception as error:
        traceback.print_exc()
        raise (JobFailed if is_sweep else CommandEnd)(EXIT_FAILED) from error
    finally:
        os.environ[_FULL_ERROR] = "1"


def task(cfg: DictConfig) -> float | None:
    """One job: a single run, or one of a sweep; the metric, for Hydra's optimising sweepers."""
    node = HydraConfig.get()
    is_sweep = not OmegaConf.is_missing(node.job, "num")  # Hydra numbers the jobs of a sweep only
    chosen = cast(dict[str, Any], OmegaConf.to_container(node.runtime.choices))
    options = {group: option for group, option in chosen.items() if not group.startswith("hydra/")}
    choices = UserChoices(list(node.overrides.task), options, is_sweep=is_sweep)
    with _own_errors(is_sweep=is_sweep):
        return _run_job(cfg, Path(node.runtime.output_dir), choices)


def _run_job(cfg: DictConfig, folder: Path, choices: UserChoices) -> float | None:
    is_rank, in_process = external.inside_torchrun(), cfg.runner.name in IN_PROCESS
    if is_rank and choices.is_sweep:  # by hydra.mode in a file
        refusal = external.sweep_refusal()
        raise CommandEnd(_print_error(refusal, code=refusal.exit_code))
    if is_rank and in_process and os.environ["RANK"] != "0":
        return None  # rank 0 shows it once
    stops_sweep = cfg.sweep.on_failure != "continue"
    try:
        if choices.is_sweep and (problems := compose_hook.problems_for(choices.overrides)):
            raise ConfigError(problems)  # first of all: ``cfg`` is only a stand-in then
        request = RequestedRun(dump.to_dataclass(cfg), dump.to_yaml(cfg), folder, choices)
        if in_process:
            return _run_in_process(request)
        if is_rank:
            return external.run(request)
        external.refuse_without_torchrun(request.config.launch.kind)
        return _run_on_ranks(request)
    except InUse as error:
        if not choices.is_sweep:
            raise CommandEnd(_print_error(error, code=error.exit_code)) from error
        # two commands may share the jobs of one sweep
        print(f"{error.message}: left to it", file=sys.stderr, flush=True)
        return None
    except TitanError as error:
        if choices.is_sweep:
            print(f"{folder.name} ({' '.join(choices.overrides)}):", file=sys.stderr)  # which job it was
            job.record_refusal(folder, error, choices)
        exit_code = _print_error(error, code=error.exit_code)
        raise (JobFailed if choices.is_sweep and not stops_sweep else CommandEnd)(exit_code) from error


def _run_on_ranks(request: RequestedRun) -> float | None:
    config, is_sweep = request.config, request.choices.is_sweep
    claimed, outcome = job.run_local(request)
    if outcome is None:
        print(f"{request.folder} is finished; nothing to do", file=sys.stderr, flush=True)
    elif outcome.exit_code != EXIT_DONE:
        if outcome.failure is not None:
            print(outcome.failure.text(), file=sys.stderr)
        print(f"{outcome.state}: {request.folder}", file=sys.stderr, flush=True)
        if outcome.exit_code == EXIT_PREEMPTED and not is_sweep:
            resumes = config.checkpoint.enabled
            next_run = "goes on" if resumes else "begins anew: checkpoint.enabled=false, nothing was saved"
            print(f"the same command with run.id={claimed.config.run.id} {next_run}", file=sys.stderr, flush=True)
        # a signal is meant for the whole sweep, not for this job
        continues = is_sweep and outcome.signal is None and config.sweep.on_failure == "continue"
        raise (JobFailed if continues else CommandEnd)(outcome.exit_code)
    return claimed.run.status().get("metric")


def _run_in_process(request: RequestedRun) -> float | None:
    """Call a runner that needs no ranks. ``check`` leaves no folder, unless it is a job of a sweep."""
    config, is_sweep = request.config, request.choices.is_sweep
    runner, needs_torch = instantiate.locate(config.runner._target_), config.runner.name not in NO_TORCH
    if needs_torch and not is_sweep:
        _remove_empty(request.folder)
        runner(config, None, _environment())  # prints; has nothing to record
        return None
    claimed = job.claim(request, ranks=count_ranks(config))
    try:
        if not claimed.is_finished:
            result = runner(claimed.config, claimed.run, _environment() if needs_torch else None)
            claimed.run.write_status(state="done", exit_code=EXIT_DONE, **(result or {}))
        elif not is_sweep:
            message = f"{request.folder} is finished; nothing to do (another run.dir starts anew)"
            print(message, file=sys.stderr, flush=True)
    finally:
        claimed.run.release()
    return claimed.run.status().get("metric")


def _environment() -> Env:
    from titanyaml.distributed.env import Env  # torch, at last

    return Env.from_environ()


def _remove_empty(folder: Path) -> None:
    """Take back the folders that Hydra made for a run that writes nothing: outputs/<run.name>/<run.id>."""
    for path in (folder, *folder.parents[:2]):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
