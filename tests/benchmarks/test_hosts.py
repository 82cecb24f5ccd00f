"""The script of one host's meshes: its rows are accepted configurations, and it does what its options say."""

from __future__ import annotations

import json

import pytest

from titanyaml import machine
from titanyaml.config.hydra import compose_hook, store
from titanyaml.config.hydra.composition_report import compose_report


@pytest.fixture
def hosts(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return script("hosts")


def test_rows_are_accepted_configurations(script, monkeypatch) -> None:
    """On a machine with eight H200; of the rows that differ in their number of ranks alone, those of two."""
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H200"] * 8)
    store.register()
    loader, rows = compose_hook.main_loader(), script("hosts_rows")
    for name, work in (rows.rows(2) | rows._two_axes(8)).items():
        report = compose_report(["runner=bench", *rows.MODEL, *work.ours], loader=loader)
        assert report.problems == [], (name, report.problems)
    assert all(work.ranks == 2 for work in rows.rows(2).values())


def test_a_dry_run_adds_to_what_was_there(hosts, script, monkeypatch, tmp_path) -> None:
    out = tmp_path / "results" / "here"
    out.parent.mkdir()
    out.with_suffix(".json").write_text(json.dumps({"rows": {"earlier": {"ok": True}}}))
    rows = script("hosts_rows")
    monkeypatch.setattr(rows, "DEBUG", [*rows.DEBUG, "train.seq_len=16"])
    assert hosts.main(["--debug", "--rows", "cp2-ulysses,tp2-async-auto", "--out", str(out)]) == 0
    content = json.loads(out.with_suffix(".json").read_text())
    assert list(content["rows"]) == ["earlier", "cp2-ulysses", "tp2-async-auto"]
    ours = content["rows"]["cp2-ulysses"]["ours"]
    assert ours["tps"] > 0 and len(ours["first_losses"]) == 3 and "by ulysses" in ours["plugins"]["cp"][0]
    assert content["rows"]["tp2-async-auto"]["left_out"].startswith("works in compiled graphs")
    assert "| cp2-ulysses | " in out.with_suffix(".md").read_text()


def test_a_rank_by_itself_does_what_it_does_among_others(hosts, tmp_path) -> None:
    losses = {}
    for name, alone in (("fsdp2", True), ("fsdp2", False), ("tp2-rowwise", True)):
        out = tmp_path / f"{name}{alone}"
        options = ["--debug", "--rows", name, "--out", str(out), *["--one-rank"] * alone]
        assert hosts.main(options) == 0, out.with_suffix(".json").read_text()
        ours = json.loads(out.with_suffix(".json").read_text())["rows"][name]["ours"]
        losses[name, alone] = ours["first_losses"][0]
        assert ours["mesh"]["dp_shard" if "fsdp" in name else "tp"] == 2, ours["mesh"]
    # the weights gathered are not those of two ranks, but as large
    assert losses["fsdp2", True] == pytest.approx(losses["fsdp2", False], rel=0.05)
    assert all(0 < loss < 10 for loss in losses.values())


def test_what_the_budget_has_no_room_for_is_left_out(hosts, tmp_path, capsys) -> None:
    assert hosts.main(["--rows", "cp2-ring,kill", "--budget-s", "5", "--out", str(tmp_path / "x")]) == 0
    assert "cp2-ring: left out, 55 s expected and" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        hosts.main(["--rows", "cp3-*", "--out", str(tmp_path / "x")])
    assert hosts.main(["--list", "--ranks", "4", "--rows", "fsdp2_*"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["fsdp2_tp2", "50", "s"]


@pytest.mark.parametrize(
    ("losses", "norms", "holds"),
    [
        ([5.0, 4.0], [1.0, 2.0], True),
        ([5.0, 4.0 + 2e-9], [1.0, 2.0], False),
        ([5.0, 4.0], [1.0, 2.1], False),
        ([5.0, float("nan")], [1.0, 2.0], False),
        ([5.0], [1.0], False),
    ],
)
def test_parity_is_held_to_its_bounds(script, monkeypatch, tmp_path, losses, norms, holds: bool) -> None:
    checks = script("hosts_checks")
    alone = {"loss": [5.0, 4.0], "norm": [1.0, 2.0]}
    monkeypatch.setattr(
        checks,
        "_train",
        lambda options, folder, limit_s: alone if folder.name.endswith("single") else {"loss": losses, "norm": norms},
    )
    content = checks.parity(2, tmp_path, dtype="float64", limit_s=9, only=["fsdp2", "cp2-ring"])
    assert content["ok"] is holds and set(content["meshes"]) == {"fsdp2", "cp2-ring"}
    monkeypatch.setattr(
        checks,
        "_train",
        lambda options, folder, limit_s: alone if folder.name.endswith("single") else {"error": "exit code 1"},
    )
    assert checks.parity(2, tmp_path, dtype="float64", limit_s=9, only=["tp2"])["ok"] is False


@pytest.mark.parametrize("typed", [[], ["runner=bench"], ["0", "runner=bench"], ["4", "parallel=fsdp4"]])
def test_one_rank_wants_a_number_of_ranks_and_a_benchmark(typed: list[str], script, capsys) -> None:
    one_rank = script("one_rank")
    with pytest.raises(SystemExit) as refused:
        one_rank.parse(typed)
    assert refused.value.code == 2 and "usage: " in capsys.readouterr().err
    assert one_rank.parse(["4", "runner=bench", "parallel=fsdp4"]) == (4, ["runner=bench", "parallel=fsdp4"])
