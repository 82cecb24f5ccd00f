"""config.yaml: what is resolved, what stays an expression, what the hash sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from titanyaml.config import dump, schema
from titanyaml.errors import ConfigError

Compose = Callable[..., DictConfig]


def config_hash(compose: Compose, *overrides: str) -> str:
    return dump.config_hash(dump.to_dataclass(compose(*overrides)))


def test_all_is_resolved_but_identity_and_references(compose: Compose) -> None:
    tree = yaml.safe_load(dump.to_yaml(compose("model=llama3_debug", "run.name=n", "+user.twice='${train.steps}'")))
    assert tree["defaults"] == ["config_schema", "titan_hydra", "_self_"]
    assert tree["run"] == {
        "name": "n",
        "id": schema.Run().id,
        "dir": schema.Run().dir,
        "seed": 0,
        "deterministic": False,
    }
    assert tree["train"]["seq_len"] == compose("model=llama3_debug").train.seq_len
    assert tree["user"] == {"twice": schema.Train().steps}
    assert tree["pipeline"]["plugins"]["ac"] == "${ac}"
    assert tree["pipeline"]["plugins"]["fsdp"]["reshard_after_forward"] == "${parallel.fsdp_reshard_after_forward}"
    assert "${" not in yaml.safe_dump({name: node for name, node in tree.items() if name not in ("run", "pipeline")})


def test_a_typed_identity_is_not_replayed_but_a_typed_pattern_is(compose: Compose) -> None:
    run = yaml.safe_load(dump.to_yaml(compose("run.id=mine", "run.dir=/data/mine")))["run"]
    assert (run["id"], run["dir"]) == (schema.Run().id, schema.Run().dir)
    run = yaml.safe_load(dump.to_yaml(compose("run.id='x-${now:%H}'", "run.dir='/data/${run.id}'")))["run"]
    assert (run["id"], run["dir"]) == ("x-${now:%H}", "/data/${run.id}")


def test_loading_gives_the_run_its_identity_and_plain_objects(compose: Compose, tmp_path: Path) -> None:
    cfg = compose("ac=full", "optim.lr=1e-3", "+user.a=[1,{b: null}]")
    path = tmp_path / "config.yaml"
    path.write_text(dump.to_yaml(cfg))
    config = dump.load(path, run_id="i", run_dir="/d")
    assert (config.run.id, config.run.dir, config.optim.lr) == ("i", "/d", 1e-3)
    assert isinstance(config, schema.Config) and isinstance(config.ac, schema.ActivationCheckpointingConfig)
    assert type(config.pipeline.plugins["ac"]) is dict and config.pipeline.plugins["ac"]["mode"] == "full"
    assert config.user == {"a": [1, {"b": None}]} and type(config.user["a"]) is list
    assert dump.config_hash(config) == dump.config_hash(dump.to_dataclass(cfg))


def test_what_was_written_and_composed_again_is_written_alike(compose: Compose) -> None:
    text = dump.to_yaml(compose("ac=full", "optim.lr=1e-3", "+user.a=[1,{b: null}]"))
    tree = {name: node for name, node in yaml.safe_load(text).items() if name != "defaults"}
    assert dump.to_yaml(OmegaConf.merge(OmegaConf.structured(schema.Config), tree)) == text


def test_plugin_nodes_and_arguments_that_repeat_a_key_are_known(compose: Compose) -> None:
    references = dump.plugin_references(dump.to_yaml(compose("pipeline.plugins.fsdp.prefetch=2")))
    assert references["pipeline.plugins.ac"] == "ac"
    assert references["pipeline.plugins.fsdp.master"] == "optim.master"
    assert "pipeline.plugins.fsdp.prefetch" not in references


@pytest.mark.parametrize(
    "override", ["run.id=x", "run.dir=/x", "launch.nproc=2", "launch.step_timeout_s=1", "sweep.on_failure=stop"]
)
def test_what_changes_no_result_is_not_in_the_hash(compose: Compose, override: str) -> None:
    assert config_hash(compose, override) == config_hash(compose)


@pytest.mark.parametrize(
    "override", ["run.name=x", "run.seed=1", "optim.lr=1", "ac=full", "+user.x=1", "train.steps=3", "runner=eval"]
)
def test_all_else_is(compose: Compose, override: str) -> None:
    assert config_hash(compose, override) != config_hash(compose)


def test_the_hash_is_of_values_not_of_spelling(compose: Compose) -> None:
    assert config_hash(compose, "optim.lr=0.001") == config_hash(compose, "optim.lr=1e-3")
    assert config_hash(compose, "+user.k={1: a, x: b}") == config_hash(compose, "+user.k={x: b, 1: a}")


def test_text_that_would_come_alive_is_refused(compose: Compose) -> None:
    with pytest.raises(ConfigError, match="user.x") as refused:
        dump.to_yaml(compose(r"+user.x='\${run.id}'"))
    assert refused.value.exit_code == 2


def test_a_difference_names_keys_and_both_values() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "gone": {"x": 1}, "same": None}
    new = {"a": {"b": 2, "c": [1, 3]}, "gone": None, "same": None, "new": "n"}
    assert dump.changes(old, new) == {"a.b": (1, 2), "a.c": ([1, 2], [1, 3]), "gone.x": (1, None), "new": (None, "n")}
    assert dump.changes(old, old) == {}


def test_a_recorded_configuration_is_compared_without_its_identity(compose: Compose, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump.to_yaml(compose("run.id=a", "optim.lr=1")))
    repeated, changed = (dump.to_dataclass(compose("run.id=b", f"optim.lr={lr}")) for lr in (1, 2))
    assert dump.changes_since(path, repeated) == {}
    assert dump.changes_since(path, changed) == {"optim.lr": (1.0, 2.0)}
    path.write_text(path.read_text().replace("lr: 1.0", "learning_rate: 1.0"))
    with pytest.raises(ConfigError, match="learning_rate"):
        dump.changes_since(path, repeated)
