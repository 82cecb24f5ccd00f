"""Saving, finding and loading in one process."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from tests.checkpoint.conftest import equal, flip, make, make_state
from titanyaml.errors import CheckpointError, LaunchError, NonFiniteError
from titanyaml.rundir import RunDir


def events(path: Path, kind: str) -> list[dict]:
    lines = (path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def names(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "checkpoints").iterdir())


def save(path: Path, *steps: int, keep: int = 9) -> None:
    checkpointer = make(path, keep=keep)
    for step in steps:
        checkpointer.save(step, make_state(step), {"position": step * 4})


def test_round_trip_is_exact_and_in_place(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    saved = checkpointer.save(3, make_state(3), {"position": 12, "mesh": {"dp_shard": 1}, "rng": [1, 2]})
    assert saved == tmp_path / "checkpoints/step-00000003"
    state = make_state(4)
    weight = state["model"]["norm.weight"]
    meta = make(tmp_path).load(saved, state)
    assert equal(state, make_state(3)) and state["model"]["norm.weight"] is weight
    assert {k: meta[k] for k in ("step", "position", "mesh", "rng", "config_hash")} == {
        "step": 3,
        "position": 12,
        "mesh": {"dp_shard": 1},
        "rng": [1, 2],
        "config_hash": "c0ffee",
    }


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = tmp_path / "checkpoints/step-00000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    on_disk = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json"}
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == on_disk and ".metadata" in on_disk
    assert len(manifest["save_id"]) == 32 and manifest["versions"]["torch"] == torch.__version__
    (event,) = events(tmp_path, "checkpoint")
    assert event["step"] == 3 and event["bytes"] == sum(on_disk.values()) and event["seconds"] >= 0


def test_parameters_that_require_gradients_and_ties(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    make(tmp_path).save(1, {"model": {"tok.weight": weight, "output.weight": weight}}, {})
    fresh = torch.nn.Parameter(torch.zeros(2, 3))
    make(tmp_path).load(tmp_path, {"model": {"tok.weight": fresh, "output.weight": fresh}})
    assert torch.equal(fresh, weight) and fresh.grad_fn is None


def test_no_checkpoint(tmp_path: Path) -> None:
    assert make(tmp_path).latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        make(tmp_path).find(tmp_path / "elsewhere")


def damage_flip(folder: Path) -> None:
    flip(folder / "__0_0.distcp")


def damage_truncate(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 100)


def damage_metadata(folder: Path) -> None:
    flip(folder / ".metadata")


def damage_remove(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def damage_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def damage_manifest_digit(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"position": 8', '"position": 9'))


def damage_manifest_cut(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 50)


DAMAGES = [
    damage_flip,
    damage_truncate,
    damage_metadata,
    damage_remove,
    damage_no_manifest,
    damage_manifest_digit,
    damage_manifest_cut,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damage_is_reported_and_an_older_one_is_used(tmp_path: Path, damage, caplog) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints/step-00000002")
    checkpointer, state = make(tmp_path), make_state(0)
    with caplog.at_level(logging.WARNING, "titanyaml"):
        assert checkpointer.latest() == tmp_path / "checkpoints/step-00000001"
    assert "step-00000002" in caplog.text
    (event,) = events(tmp_path, "checkpoint_damaged")
    assert "step-00000002" in event["message"]
    assert checkpointer.load(tmp_path, state)["step"] == 1 and equal(state, make_state(1))
    with pytest.raises(CheckpointError, match="step-00000002"):
        checkpointer.load(tmp_path / "checkpoints/step-00000002", state)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_all_damaged_stops(tmp_path: Path, damage) -> None:
    save(tmp_path, 2)
    damage(tmp_path / "checkpoints/step-00000002")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints") as error:
        make(tmp_path).latest()
    assert error.value.exit_code == 3


def test_training_on_behind_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Steps written after falling back are the newest, also where a damaged one has a higher or the same number."""
    save(tmp_path, 10, 20, 30)
    for step in (20, 30):
        damage_flip(tmp_path / f"checkpoints/step-000000{step}")
    checkpointer = make(tmp_path, keep=2)
    assert checkpointer.load(checkpointer.latest(), make_state(0))["step"] == 10
    assert checkpointer.is_saved(10) and not checkpointer.is_saved(20)
    checkpointer.save(20, make_state(21), {})
    assert checkpointer.is_saved(20) and names(tmp_path) == ["step-00000010", "step-00000020"]
    state = make_state(0)
    assert make(tmp_path).load(tmp_path, state)["step"] == 20 and equal(state, make_state(21))


def test_resuming_an_older_step_makes_its_future_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    checkpointer = make(tmp_path)
    checkpointer.load(tmp_path / "checkpoints/step-00000010", make_state(0))
    checkpointer.save(15, make_state(15), {})
    assert make(tmp_path).latest() == tmp_path / "checkpoints/step-00000015"


@pytest.mark.parametrize("keep, left", [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_keeps_the_newest(tmp_path: Path, keep: int, left: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_keys_shapes_and_dtypes_must_match(tmp_path: Path) -> None:
    save(tmp_path, 1)
    state = make_state(1)
    state["model"]["new.weight"] = torch.zeros(2)
    del state["model"]["half"]
    state["model"]["norm.weight"] = torch.zeros(8)
    state["model"]["layers.0.w"] = torch.zeros(6, 5, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in state["model"].items()}
    with pytest.raises(CheckpointError) as error:
        make(tmp_path).load(tmp_path, state)
    text = str(error.value)
    assert "1 of the model's tensors are not in it: model/new.weight" in text
    assert "1 of its tensors are unknown to the model: model/half" in text
    assert "2 tensors differ" in text and "model/norm.weight [7] float32 in the file, [8] float32 here" in text
    assert "model/layers.0.w [6, 5] float32 in the file, [6, 5] float64 here" in text
    assert equal(before, state["model"]), "nothing is loaded before the comparison"


def test_long_lists_of_names_are_counted(tmp_path: Path) -> None:
    make(tmp_path).save(1, {"model": {f"w{i:02d}": torch.zeros(1) for i in range(30)}}, {})
    with pytest.raises(CheckpointError, match="30 of its tensors are unknown.*w07 and 22 more"):
        make(tmp_path).load(tmp_path, {"model": {}})


def test_only_a_part_is_read_when_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    weights = make_state(2)["model"]
    checkpointer = make(tmp_path)
    checkpointer.load(tmp_path, {"model": weights}, only=("model",))
    assert equal(weights, make_state(1)["model"])
    with pytest.raises(CheckpointError, match="8 of its tensors are unknown"):
        checkpointer.load(tmp_path, {"model": weights})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_state_is_refused(tmp_path: Path, value: float) -> None:
    checkpointer, state = make(tmp_path, keep=1), make_state(2)
    checkpointer.save(1, make_state(1), {})
    state["optim"]["half"]["exp_avg"][1, 2] = value
    with pytest.raises(NonFiniteError, match="optim/half/exp_avg") as error:
        checkpointer.save(2, state, {})
    assert error.value.exit_code == 4 and names(tmp_path) == ["step-00000001"] and checkpointer.is_saved(1)


def test_too_little_space_is_told_before_writing(tmp_path: Path, monkeypatch) -> None:
    checkpointer = make(tmp_path)
    checkpointer.save(1, make_state(1), {})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**20, 2**20))
    big = {"model": {"w": torch.empty(2**18, 2**10, device="meta")}}  # 1 GiB that is never touched
    monkeypatch.setattr("titanyaml.checkpoint.state.non_finite", lambda flat: [])
    with pytest.raises(CheckpointError, match=r"1\.06 GiB needed, 0\.00 GiB free.*step-00000001 is untouched"):
        checkpointer.save(2, big, {})
    assert names(tmp_path) == ["step-00000001"]


def test_a_write_that_cannot_finish_is_translated(tmp_path: Path) -> None:
    checkpointer, state = make(tmp_path), {"model": {"w": torch.ones(500_000)}}
    checkpointer.save(1, state, {})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, old[1]))
    try:
        with pytest.raises(CheckpointError, match="step 2 was not saved: writing failed on rank 0") as error:
            checkpointer.save(2, state, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert "step-00000001 is untouched" in str(error.value) and "free space" in str(error.value)
    assert names(tmp_path) == ["step-00000001"] and make(tmp_path).latest().name == "step-00000001"
    checkpointer.save(2, state, {})
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_leftovers_of_a_dead_save_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    root = tmp_path / "checkpoints"
    (root / ".tmp-2-abc").mkdir()
    (root / ".tmp-2-abc/__0_0.distcp").write_bytes(b"x")
    os.rename(root / "step-00000001", root / ".old-step-00000001")
    assert make(tmp_path).latest() == root / "step-00000001"
    assert names(tmp_path) == ["step-00000001"]
    (event,) = events(tmp_path, "checkpoint_leftovers")
    assert ".tmp-2-abc" in event["message"]


def test_a_superseded_owner_commits_nothing(tmp_path: Path, monkeypatch) -> None:
    run = RunDir(tmp_path)
    run.claim()
    try:
        checkpointer = make(tmp_path, run=run)
        checkpointer.save(1, make_state(1), {})
        write = checkpointer.run.check_generation
        calls = []

        def take_over_during_the_save() -> None:
            calls.append(None)
            if len(calls) == 2:
                lease = json.loads((tmp_path / "lease.json").read_text())
                (tmp_path / "lease.json").write_text(json.dumps({**lease, "generation": lease["generation"] + 1}))
            write()

        monkeypatch.setattr(checkpointer.run, "check_generation", take_over_during_the_save)
        with pytest.raises(LaunchError, match="taken over"):
            checkpointer.save(2, make_state(2), {})
        assert names(tmp_path) == ["step-00000001"]
        with pytest.raises(LaunchError, match="taken over"):
            make(tmp_path, run=run)
    finally:
        run.release()


def test_only_tensors_are_state(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model/n is a int"):
        make(tmp_path).save(1, {"model": {"n": 3}}, {})
