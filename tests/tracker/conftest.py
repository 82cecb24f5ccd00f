"""A small configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanyaml.config import schema


@pytest.fixture
def config(tmp_path: Path) -> schema.Config:
    """Plain dataclasses, as a rank gets them; the Aim repository lies in ``tmp_path``."""
    tree = schema.Config()
    tree.run = schema.Run(name="exp", id="run-1", dir=str(tmp_path / "run"))
    tree.model = schema.Model(
        name="tiny", vocab_size=8, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=96, max_seq_len=32
    )
    tree.runner = schema.Runner(name="train", _target_="titanyaml.runner.train.train")
    tree.train.steps, tree.train.seq_len = 40, 32
    tree.tracker = schema.Tracker(kind="aim", repo=str(tmp_path / "repo"))
    return tree
