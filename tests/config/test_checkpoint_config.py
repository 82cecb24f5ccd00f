from __future__ import annotations

from pathlib import Path

import pytest

from titanyaml.config import dump
from titanyaml.config.checkpoint_config import with_checkpoint_config
from titanyaml.config.rules import table

EVAL = ["tokenizer=bytes", "tracker=none", "runner=eval"]


@pytest.fixture
def trained(compose, tmp_path: Path) -> Path:
    """A run of a mixture with eight experts, and a checkpoint in it."""
    (tmp_path / "config.yaml").write_text(dump.to_yaml(compose("model=moe_debug", "tokenizer=bytes", "tracker=none")))
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("inside", ["", "checkpoints/step-00000003"])
def test_a_mesh_is_checked_against_the_checkpoints_model(compose, trained: Path, inside: str) -> None:
    checkpoint = f"runner.checkpoint={trained / inside}"
    assert table.check_rules(compose(*EVAL, checkpoint, "parallel=ep2")) == []
    [problem] = table.check_rules(compose(*EVAL, checkpoint, "parallel=ep3"))
    assert "3, which does not divide model.moe.num_experts=8" in problem.message


def test_nothing_is_brought_where_nothing_is_read(compose, trained: Path) -> None:
    values = table.check_tree(compose("tokenizer=bytes")).values
    assert with_checkpoint_config(values) is values
    (trained / "config.yaml").write_text("model: [")
    values = table.check_tree(compose(*EVAL, f"runner.checkpoint={trained}")).values
    assert with_checkpoint_config(values) is values
