"""A plugin of another package, from the command line to the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import TRAINING, Cli, metrics, records
from tests.thirdparty.install import install
from titanyaml.errors import EXIT_CONFIG

TARGET = "+pipeline.plugins.x._target_=their_pkg.noise.EmbeddingNoise"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example package is installed."""
    return install(tmp_path_factory.mktemp("third_party"))


def test_their_plugin_trains_with_ours(cli: Cli, site: Path, straight: Path) -> None:
    common = (*TRAINING, "train.steps=7")
    option, target, bad = cli.together(
        [
            (*common, "plugin=[noise]", "ac=full", "run.id=option"),
            (*common, TARGET, "+pipeline.plugins.x.alpha=5", "run.id=target"),
            (*common, TARGET, "run.id=bad"),
        ],
        PYTHONPATH=str(site),
    )
    assert option.returncode == 0, option.stderr
    assert target.returncode == 0, target.stderr
    for run_id, name, nodes in (("option", "noise", ["noise", "ac"]), ("target", "x", ["x"])):
        changes = json.loads((cli.run(run_id) / "pipeline.json").read_text())
        active = [record for record in changes if record.get("modules")]
        assert [record["node"] for record in active] == nodes
        assert active[0]["node"] == name and (active[0]["stage"], active[0]["modules"]) == ("model", ["tok_embeddings"])
        assert "noise of alpha=5" in active[0]["summary"]
        assert f"pipeline {name}: training forwards add noise" in (option if name == "noise" else target).stderr
    # the same noise by either way, and recomputation changes no bit
    assert metrics(cli.run("option")) == metrics(cli.run("target"))
    plain = records(straight)[:7]
    assert all(noisy["loss"] != quiet["loss"] for noisy, quiet in zip(records(cli.run("target")), plain, strict=True))
    assert bad.returncode == EXIT_CONFIG and "pipeline.plugins.x.alpha" in bad.stderr
