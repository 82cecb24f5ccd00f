"""A plugin of another package works as a built-in one: by its own YAML option, or by ``_target_`` alone."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from tests.plugins.small import AC, COMPILE, FSDP, batch, build, context, loss, spec, step
from tests.ranks import run_ranks
from tests.thirdparty.install import SOURCE
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import PipelineError
from titanyaml.pipeline.resolve import resolve

TARGET = "their_pkg.noise.EmbeddingNoise"
NOISE = {"_target_": TARGET, "alpha": 5.0}


def plugins(compose, *overrides):
    """The plugin nodes of a composed configuration, as plain dicts."""
    return OmegaConf.to_container(compose(*overrides).pipeline.plugins, resolve=True)


def by_config(compose):
    return plugins(compose, "plugin=[noise]", "pipeline.plugins.noise.alpha=5")


def by_target(compose):
    return plugins(compose, f"+pipeline.plugins.noise._target_={TARGET}", "+pipeline.plugins.noise.alpha=5")


@pytest.mark.parametrize("composed", [by_config, by_target])
def test_both_ways_reach_the_model(their_pkg, compose, composed):
    nodes = composed(compose)
    assert nodes["noise"] == {"_target_": TARGET, "alpha": 5}
    built = build(nodes)
    assert built.resolved.active == ("noise",)
    assert built.changes["noise"].modules == ["tok_embeddings"]
    assert built.changes["noise"].summary == "training forwards add noise of alpha=5 to the embeddings"


def test_without_the_package_neither_way_composes_or_binds(compose):
    assert importlib.util.find_spec("their_pkg") is None
    with pytest.raises(ConfigCompositionException, match="plugin"):
        # with Hydra's own node nothing comes from the cache of compositions, which may have seen the package
        compose("plugin=[noise]", return_hydra_config=True)
    with pytest.raises(PipelineError) as error:
        resolve(by_target(compose), context(spec()))
    [problem] = error.value.problems
    assert problem.key == "pipeline.plugins.noise._target_" and "their_pkg" in problem.message


def test_the_noise_is_in_training_and_not_in_validation(their_pkg):
    plain, noisy = build({}).model, build({"noise": NOISE}).model
    tokens_BS, labels_BS = batch(2)
    with torch.no_grad():
        assert torch.equal(loss(noisy, tokens_BS, labels_BS), loss(plain, tokens_BS, labels_BS))
    torch.manual_seed(3)
    first, _ = step(noisy)
    torch.manual_seed(3)
    same_seed, _ = step(noisy)
    later, _ = step(noisy)
    assert first == same_seed != later
    assert first != step(plain)[0]


@pytest.mark.parametrize("mode", ["block", "model"])
def test_it_takes_its_place_before_ours_and_works_with_them(their_pkg, mode):
    torch.compiler.reset()
    nodes = {"ac": {**AC, "mode": "full"}, "compile": {**COMPILE, "mode": mode, "backend": "eager"}, "noise": NOISE}
    built = build(nodes)
    assert built.resolved.active == ("noise", "ac", "compile")
    torch.manual_seed(3)
    value, grads = step(built.model)
    torch.manual_seed(3)
    eager, eager_grads = step(build({"noise": NOISE}).model)
    assert value.item() == pytest.approx(eager.item(), rel=1e-14)
    assert all(torch.allclose(grads[name], eager_grads[name], rtol=1e-12, atol=1e-14) for name in grads)


def noisy_loss(rank, site):
    import sys

    sys.path.insert(0, site)
    dims = ParallelDims(dp_shard=2)
    built = build({"noise": NOISE, "fsdp": FSDP}, dims=dims, mesh=dims.build("cpu"))
    torch.manual_seed(3)
    return step(built.model)[0].item()


def test_it_works_under_fsdp(their_pkg):
    torch.manual_seed(3)
    alone, _ = step(build({"noise": NOISE}).model)
    assert run_ranks(noisy_loss, 2, str(their_pkg)) == pytest.approx([alone.item()] * 2, rel=1e-13)


def test_its_problems_are_reported_with_ours(their_pkg):
    nodes = {"ac": {**AC, "mode": "ful"}, "noise": {**NOISE, "alpha": -1.0}, "typo": {**NOISE, "alfa": 1}}
    with pytest.raises(PipelineError) as error:
        resolve(nodes, context(spec()))
    assert [(problem.key, problem.hint) for problem in error.value.problems] == [
        ("pipeline.plugins.typo.alfa", "pipeline.plugins.typo.alpha=..."),
        ("ac.mode", "ac.mode=full"),
        ("pipeline.plugins.noise.alpha", ""),
    ]


def test_noise_of_strength_zero_changes_nothing_and_is_an_error(their_pkg):
    with pytest.raises(PipelineError, match=r"was asked for and changed nothing \(alpha is 0\)"):
        build({"noise": {**NOISE, "alpha": 0.0}})


def test_the_documentation_shows_these_files():
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    shown = re.findall(r"^`([\w/.]+)`\n```\w+\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in shown} == {"their_pkg/noise.py", "their_pkg/conf/plugin/noise.yaml", "setup.cfg"}
    for name, text in shown:
        assert text in (SOURCE / name).read_text(), f"docs/plugins.md shows another {name}"
