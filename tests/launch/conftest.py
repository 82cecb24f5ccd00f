"""Run directories with a configuration that the stand-in runners read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from titanyaml.config import dump, schema
from titanyaml.rundir import RunDir, atomic_write

REPOSITORY = Path(__file__).parents[2]
MODEL = {
    "name": "m",
    "vocab_size": 8,
    "dim": 8,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "ffn_dim": 8,
    "max_seq_len": 8,
}


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """``make_run(user={...}, steps=1, target="train")``: a claimed run directory of its own."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    claimed: list[RunDir] = []

    def make(*, user: dict[str, Any] | None = None, steps: int = 1, target: str = "train") -> RunDir:
        cfg = OmegaConf.merge(
            OmegaConf.structured(schema.Config),
            {
                "run": {"name": "t", "id": "i", "dir": "d"},
                "model": MODEL,
                "user": user or {},
                "runner": {"name": "train", "_target_": f"tests.launch.standins.{target}"},
                "data": {"kind": "synthetic"},
                "tokenizer": {"kind": "bytes"},
                "train": {"steps": steps, "seq_len": 8},
            },
        )
        run = RunDir(tmp_path / f"run{len(claimed)}")
        run.claim()
        claimed.append(run)
        atomic_write(run.path / "config.yaml", dump.to_yaml(cfg))
        return run

    yield make
    for run in claimed:
        run.release()
