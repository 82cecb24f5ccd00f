"""The hook in Hydra's own loader: runs, sweeps, completion."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig

from titanyaml.config.hydra import compose_hook
from titanyaml.errors import ConfigError


@pytest.fixture
def hydra(hooked, tmp_path, monkeypatch) -> Hydra:
    monkeypatch.chdir(tmp_path)
    return Hydra.create_main_hydra2("titanyaml", create_config_search_path("pkg://titanyaml.conf"))


def test_compose_refuses_with_all_problems(hooked) -> None:
    with initialize_config_module("titanyaml.conf", version_base="1.3"):
        with pytest.raises(ConfigError) as caught:
            hydra_compose("config", ["+optim.lrr=1", "train.steps=x"])
        assert hydra_compose("config", ["train.steps=1e1"]).train.steps == 10
    assert [problem.key for problem in caught.value.problems] == ["optim.lrr", "train.steps"]


def test_installing_twice_and_giving_back() -> None:
    original = ConfigLoaderImpl.load_configuration
    compose_hook.install()
    compose_hook.install()
    assert ConfigLoaderImpl.load_configuration is not original
    compose_hook.uninstall()
    assert ConfigLoaderImpl.load_configuration is original


def test_another_line_of_hydra_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(compose_hook.hydra, "__version__", "1.4.0")
    with pytest.raises(AssertionError, match="not 1.4.0"):
        compose_hook.install()


def test_the_first_look_at_the_mode_is_lenient(hydra) -> None:
    """A wrong key must not turn a sweep into a run."""
    assert hydra.get_mode("config", ["experiment=lr_sweep", "optim.lrr=1"]) == RunMode.MULTIRUN
    assert hydra.get_mode("config", ["experiment=lr_sweep", "train.steps=1e1"]) == RunMode.MULTIRUN


def test_a_refused_run_leaves_no_folder(hydra, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        hydra.run("config", lambda cfg: None, ["optim.lrr=1"])
    assert list(tmp_path.iterdir()) == []


def sweep(hydra: Hydra, *overrides: str) -> dict[str, list[str] | None]:
    """Run a sweep; job overrides to the keys of its problems."""
    problem_keys = {}

    def task(cfg: DictConfig) -> None:
        node = HydraConfig.get()
        problems = compose_hook.problems_for(node.overrides.task)
        problem_keys[" ".join(node.overrides.task)] = problems and [problem.key for problem in problems]
        assert Path(node.runtime.output_dir).is_dir()

    hydra.multirun("config", task, ["hydra.mode=MULTIRUN", *overrides])
    return problem_keys


def test_a_refused_job_of_a_sweep_fails_alone(hydra) -> None:
    assert sweep(hydra, "optim.lr=1e-3,abc", "model=llama3_debug,llama3_9b", "tokenizer=bytes") == {
        "optim.lr=0.001 model=llama3_debug tokenizer=bytes": None,
        "optim.lr=0.001 model=llama3_9b tokenizer=bytes": ["model"],
        "optim.lr=abc model=llama3_debug tokenizer=bytes": ["optim.lr"],
        "optim.lr=abc model=llama3_9b tokenizer=bytes": ["model", "optim.lr"],
    }


def test_every_job_has_a_folder_of_its_own_refused_or_not(hydra, tmp_path: Path) -> None:
    sweep(hydra, "optim.lr=1e-3,abc", "tokenizer=bytes", "hydra.sweep.dir=s")
    assert len([path for path in (tmp_path / "s").iterdir() if path.is_dir()]) == 2
    sweep(hydra, "tokenizer=bytes", "optim.lr=abc,1e-3", "launch.nproc=1", "hydra.sweep.dir=s")
    assert len([path for path in (tmp_path / "s").iterdir() if path.is_dir()]) == 2, "order and launch.* do not matter"


def test_a_sweep_that_cannot_have_a_good_job_is_refused_at_once(hydra, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        sweep(hydra, "optim.lr=1,2", "optim.lrr=1")
    assert list(tmp_path.iterdir()) == []


def test_problems_are_forgotten_when_the_job_is_right_the_next_time(hydra) -> None:
    loader = hydra.config_loader
    master = loader.load_configuration("config", ["optim.lr=1,2", "tokenizer=bytes"], RunMode.MULTIRUN)
    job = ["tokenizer=bytes", "data=files", "data.paths=[]"]
    loader.load_sweep_config(master, job)
    assert compose_hook.problems_for(list(reversed(job)))[0].key == "data.paths"
    compose_hook._refused[tuple(sorted(["tokenizer=bytes"]))] = []
    loader.load_sweep_config(master, ["tokenizer=bytes"])
    assert compose_hook.problems_for(["tokenizer=bytes"]) is None


def test_completion_is_left_to_hydra(hydra, monkeypatch) -> None:
    monkeypatch.setenv("COMP_LINE", "titanyaml optim.")
    with pytest.raises(ConfigCompositionException):
        hydra.config_loader.load_configuration("config", ["optim.lrr=1"], RunMode.RUN)


def test_the_hook_keeps_hydras_own_jobs_working(hydra) -> None:
    result = hydra.run("config", lambda cfg: cfg.train.steps, ["train.steps=3", "tokenizer=bytes"])
    assert result.status == JobStatus.COMPLETED and result.return_value == 3
    assert isinstance(Callbacks(result.hydra_cfg), Callbacks)
