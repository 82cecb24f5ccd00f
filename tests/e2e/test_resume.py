"""A run that was stopped, killed or run again ends as the one that nothing disturbed: to the bit."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.helpers import (
    TRAINING,
    Cli,
    checkpoints,
    events,
    kill_all,
    last_bits,
    metrics,
    records,
    status,
    wait_for,
)
from titanyaml.errors import EXIT_DONE, EXIT_PREEMPTED
from titanyaml.rundir import RunDir

STEPS = list(range(1, 21))
SEED = 20


def assert_equal(run: Path, straight: Path) -> None:
    """Both runs ended with the same weights and moments, by the same way."""
    assert [record["step"] for record in records(run)] == STEPS
    assert metrics(run) == metrics(straight)
    assert last_bits(run) == last_bits(straight)
    assert status(run)["state"] == "done" and status(run)["metric"] == status(straight)["metric"]


def test_seven_steps_and_thirteen_are_twenty(cli: Cli, straight: Path) -> None:
    first = cli(*TRAINING, "train.steps=7", "run.id=a")
    assert first.returncode == EXIT_DONE, first.stderr
    run = cli.run("a")
    assert [record["step"] for record in records(run)] == STEPS[:7]
    assert [path.name for path in checkpoints(run)] == ["step-00000007"]
    resumed = cli(*TRAINING, "run.id=a")
    assert resumed.returncode == EXIT_DONE, resumed.stderr
    assert "steps 8 to 20" in resumed.stderr
    assert_equal(run, straight)
    names = last_bits(run)
    assert {name.split("/")[0] for name in names} == {"model", "optim"}
    assert any(name.endswith("/exp_avg_sq") for name in names)


def test_sigterm_is_preemption_and_a_finished_run_is_left_alone(cli: Cli, straight: Path) -> None:
    process = cli.start(*TRAINING, "run.id=a")
    run = cli.run("a")
    wait_for(lambda: len(records(run)) >= 2, process=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == EXIT_PREEMPTED
    stopped = status(run)
    assert (stopped["state"], stopped["exit_code"]) == ("preempted", EXIT_PREEMPTED)
    assert 2 <= stopped["step"] < 20 and checkpoints(run)[-1].name == f"step-{stopped['step']:08}"
    assert "the same command with run.id=a goes on" in (cli.folder / "output.txt").read_text()
    assert cli(*TRAINING, "run.id=a").returncode == EXIT_DONE
    assert_equal(run, straight)

    # killed after the last checkpoint, before it could be said: nothing is trained or recorded a second time
    RunDir(run).write_status(state="running", metric=None, step=19)
    assert cli(*TRAINING, "run.id=a").returncode == EXIT_DONE
    assert_equal(run, straight)

    before = (run / "status.json").read_bytes(), (run / "metrics.jsonl").read_bytes()
    repeated = cli(*TRAINING, "run.id=a")
    assert repeated.returncode == EXIT_DONE and "is finished; nothing to do" in repeated.stderr
    assert before == ((run / "status.json").read_bytes(), (run / "metrics.jsonl").read_bytes())


def killed_again_and_again(cli: Cli, run_id: str, overrides: tuple[str, ...], instants: list[tuple[str, float]]) -> int:
    """Start the run once for each instant and kill it then; finish it at last. How many were killed before the end.

    An instant is so many seconds after the start of the command ("start"), or after the first step of this attempt
    ("step").
    """
    run, kills = cli.run(run_id), 0
    for after, seconds in instants:
        trained = len(events(run, "checkpoint"))
        process = cli.start(*overrides, f"run.id={run_id}")
        if after == "step":
            wait_for(lambda seen=trained: len(events(run, "checkpoint")) > seen, process=process)
        time.sleep(seconds)
        kills += process.poll() is None
        kill_all(process)
        print(f"{run_id}: killed {seconds:.3f} s after the first {after}; {len(records(run))} records")
    result = cli(*overrides, f"run.id={run_id}")
    assert result.returncode == EXIT_DONE, result.stderr
    return kills


def test_killed_at_any_instant_it_goes_on(cli: Cli, straight: Path) -> None:
    draw = random.Random(SEED)
    # a step with its checkpoint takes 0.03 to 0.1 s: five attempts stay below twenty; those
    # after "start" hit anything between the composition and the first steps
    instants = [("step", draw.uniform(0, 0.12)) for _ in range(8)] + [("start", draw.uniform(0.5, 4)) for _ in range(2)]
    draw.shuffle(instants)
    print(f"seed {SEED}: {instants}")
    overrides = (*TRAINING, "checkpoint.interval=1")
    with ThreadPoolExecutor(2) as pool:
        kills = list(
            pool.map(
                lambda half: killed_again_and_again(cli, half[0], overrides, half[1]),
                [("a", instants[:5]), ("b", instants[5:])],
            )
        )
    assert sum(kills) == 10
    for run_id in "ab":
        assert_equal(cli.run(run_id), straight)
        assert not list((cli.run(run_id) / "checkpoints").glob(".*")), "an interrupted save was left behind"
