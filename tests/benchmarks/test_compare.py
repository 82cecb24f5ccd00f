"""The comparison: a dry run of ours against a stand-in for torchtitan, and the rows' spelling."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

#: Writes log lines like torchtitan's, and refuses what it was not started with, or a port that others could take.
STANDIN = """
import os, socket, sys
try:
    socket.socket().bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
except OSError:
    pass
else:
    raise SystemExit("the port is free to others")
assert os.environ["WORLD_SIZE"] == "1" and "--model.flavor=debugmodel" in sys.argv, sys.argv
import torchtitan_sizes
for step in range(1, 31):
    print(f"[titan] step: {step:2}  loss:  8.1{step:02}  grad_norm:  1.5  memory:  {step / 10:.2f}GiB(1.00%)  "
          f"tps: {'5' if step <= 5 else f'1,{step:03}'}  tflops: 1.00  mfu: 0.10%", file=sys.stderr)
"""


@pytest.fixture
def compare(monkeypatch):
    spec = importlib.util.spec_from_file_location("compare", REPOSITORY / "benchmarks" / "compare.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare", module)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    """A folder that can be taken for torchtitan's."""
    package = tmp_path / "peer" / "torchtitan" / "models"
    package.mkdir(parents=True)
    (package / "llama3.py").write_text("llama3_args = {}\nTransformerModelArgs = dict\n")
    (package.parent / "train.py").write_text(STANDIN)
    return package.parents[1]


def test_a_dry_run_of_both_sides(compare, checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(
        compare,
        "COMMON",
        [*compare.COMMON[:2], "runner.skipped_steps=1", "runner.measured_steps=2", "runner.profiled_steps=0"],
    )
    out = tmp_path / "results" / "here"
    assert compare.main(["--rows", "debug", "--torchtitan", str(checkout), "--out", str(out)]) == 0
    row = json.loads(out.with_suffix(".json").read_text())["rows"]["debug"]
    assert row["ours"]["tps"] > 0 and row["ours"]["fraction_of_floor"] > 0
    peer = row["torchtitan"]
    assert (peer["tps"], peer["mem_reserved_gib"], peer["loss"]) == (1018.0, 3.0, 8.13)
    assert peer["tps_spread"] == pytest.approx(24 / 1018)
    assert row["ratio"] == row["ours"]["tps"] / 1018
    assert "| debug | " in out.with_suffix(".md").read_text()


def test_a_side_that_fails_is_recorded(compare, checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run_ours", lambda row, more: {"tps": 1.0, "tps_spread": 0.0})
    (checkout / "torchtitan" / "train.py").write_text("raise SystemExit('no such device')")
    assert compare.main(["--rows", "debug", "--torchtitan", str(checkout), "--out", str(tmp_path / "x")]) == 1
    row = json.loads((tmp_path / "x.json").read_text())["rows"]["debug"]
    assert row["torchtitan"]["error"] == "exit code 1: no such device" and row["ratio"] is None
    assert "| 1 +- 0.0% | failed | - |" in (tmp_path / "x.md").read_text()


def test_unknown_rows_are_refused(compare, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--rows", "4b", "--out", str(tmp_path / "x")])
    assert "no row is called 4b; there are 3b-bf16" in capsys.readouterr().err
