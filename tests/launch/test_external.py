"""As ranks of torchrun: one run directory, one config, rank 0's word."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import STAND_IN, environment
from tests.cli.helpers import starts, status
from titanyaml.errors import EXIT_DATA, LaunchError
from titanyaml.launch import external

RANK_0 = {"RANK": "0", "WORLD_SIZE": "2"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}


def two_nodes(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """(exit code, output) of two torchrun agents with one rank each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{port}",
                "--rdzv-id",
                "j",
                "--local-addr",
                "127.0.0.1",
                "-m",
                "titanyaml",
                *arguments,
                *STAND_IN,
            ],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


def test_two_agents_share_one_run(tmp_path: Path) -> None:
    endings = two_nodes(tmp_path, "parallel=fsdp2", "train.steps=2")
    assert [code for code, _ in endings] == [0, 0], endings
    (run,) = (tmp_path / "outputs" / "llama3_debug").iterdir()
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert starts(run) == 2
    assert (status(run)["state"], status(run)["world_size"], status(run)["metric"]) == ("done", 2, 3e-4)
    assert not (run / ".hydra").exists()


def test_a_failing_rank_of_another_agent_is_recorded(tmp_path: Path) -> None:
    endings = two_nodes(tmp_path, "parallel=fsdp2", "run.id=a", "+user.fail=data", "+user.rank=1")
    assert [code for code, _ in endings] == [1, 1]  # torchrun's own
    recorded = status(tmp_path / "outputs" / "llama3_debug" / "a")
    assert (recorded["state"], recorded["exit_code"], recorded["error"]["rank"]) == ("failed", EXIT_DATA, 1)
    assert sum(output.count("rank 1 failed: data.paths: corpus.txt is missing") for _, output in endings) == 1


def test_torchrun_is_noticed() -> None:
    assert external.inside_torchrun(RANK_0)
    assert not external.inside_torchrun({"RANK": "0"})
    assert not external.inside_torchrun({})


def test_only_rank_0_lets_hydra_write() -> None:
    assert external.hydra_arguments(["a=1"], RANK_0) == ["a=1", "launch.kind=external"]
    silent = external.hydra_arguments(["a=1"], RANK_1)
    assert silent[:2] == ["a=1", "launch.kind=external"]
    assert "hydra.run.dir=." in silent and "hydra.output_subdir=null" in silent


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_inside_torchrun_is_refused(flag: str) -> None:
    with pytest.raises(LaunchError, match="without torchrun"):
        external.hydra_arguments([flag, "a=1,2"], RANK_1)


def test_an_elastic_restart_finds_its_run_again() -> None:
    elastic = RANK_0 | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "job7"}
    assert "run.id=job7" in external.hydra_arguments([], elastic)
    assert "run.id=job7" not in external.hydra_arguments(["run.id=mine"], elastic)
    assert "run.id=none" not in external.hydra_arguments([], elastic | {"TORCHELASTIC_RUN_ID": "none"})
    assert external.hydra_arguments([], elastic | {"TORCHELASTIC_MAX_RESTARTS": "0"}) == ["launch.kind=external"]


def test_external_waits_for_nobody() -> None:
    external.refuse_without_torchrun("local")
    with pytest.raises(LaunchError, match="torchrun --nproc-per-node"):
        external.refuse_without_torchrun("external")
