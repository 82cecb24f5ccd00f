"""Options without a file of conf/: mesh names, experiments, installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.object_type import ObjectType

from titanyaml.config.hydra import search_path, store


@pytest.fixture
def mesh() -> search_path.MeshSource:
    return search_path.MeshSource("titanyaml-mesh", "mesh://parallel")


@pytest.fixture
def experiments() -> search_path.ExperimentSource:
    return search_path.ExperimentSource("titanyaml-experiments", "experiments://titanyaml.experiments")


def test_a_mesh_name_sets_its_degrees_and_no_more(compose) -> None:
    parallel = compose("parallel=hsdp2x4_tp2").parallel
    assert (parallel.dp_replicate, parallel.dp_shard, parallel.tp, parallel.cp) == (2, 4, 2, 1)
    assert compose("parallel.tp=4", "parallel=fsdp2_tp2").parallel.tp == 4


def test_an_experiment_can_choose_a_mesh_name(with_files) -> None:
    text = "# @package _global_\ndefaults:\n  - override /parallel: hsdp2x2\n"
    report = with_files({"experiment/mesh.yaml": text}, "experiment=mesh")
    assert report.problems == []
    assert report.cfg.parallel.dp_replicate == 2


def test_listed_meshes_are_real_options(mesh, report) -> None:
    names = mesh.list("parallel", ObjectType.CONFIG)
    assert "fsdp2" in names
    for name in names:
        assert report(f"parallel={name}").problems == [], name


def test_mesh_source_is_a_group_of_one_name(mesh) -> None:
    assert mesh.is_group("") and mesh.is_group("parallel") and not mesh.is_group("model")
    assert mesh.list("", ObjectType.GROUP) == ["parallel"]
    assert mesh.list("parallel", ObjectType.GROUP) == mesh.list("", ObjectType.CONFIG) == []
    assert mesh.is_config("parallel/tp8") and not mesh.is_config("model/tp8") and not mesh.is_config("parallel/tp8_tp2")


@pytest.mark.parametrize(
    ("typed", "some", "never"),
    [
        ("fs", ["fsdp2", "fsdp64"], "hsdp"),
        ("fsdp2_", ["fsdp2_ddp2"], "fsdp2_fsdp"),
        ("hsdp2x", ["hsdp2x2", "hsdp2x64"], "_"),
        ("hsdp2x2_", ["hsdp2x2_tp2"], "hsdp2x2_ddp"),
        ("hsdp2x2_tp2_", ["hsdp2x2_tp2_cp2", "hsdp2x2_tp2_pp2"], "hsdp2x2_tp2_tp"),
    ],
)
def test_completion_of_mesh_names(mesh, monkeypatch, typed: str, some: list[str], never: str) -> None:
    monkeypatch.setenv("COMP_LINE", f"titanyaml -m model=llama3_debug parallel={typed}")
    names = mesh.list("parallel", ObjectType.CONFIG)
    assert set(some) <= set(names)
    assert not [name for name in names if never in name]


def test_completion_lists_common_meshes_before_anything_is_typed(mesh, monkeypatch) -> None:
    monkeypatch.setenv("COMP_LINE", "titanyaml parallel=")
    assert mesh.list("parallel", ObjectType.CONFIG) == sorted(search_path._COMMON_MESHES)


def test_experiments_are_found_with_their_header(experiments) -> None:
    assert experiments.available()
    assert "lr_sweep" in experiments.list("experiment", ObjectType.CONFIG)
    assert experiments.list("", None) == ["experiment"]
    result = experiments.load_config("experiment/lr_sweep")
    assert result.header == {"package": "_global_"}
    assert result.config.run.name == "lr_sweep"
    assert not experiments.is_config("experiment/nope") and not experiments.is_config("lr_sweep")


def test_experiments_in_folders_are_listed_with_their_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "row1.yaml").write_text("# @package _global_\n")
    (tmp_path / "README.md").write_text("")
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(search_path.resources, "files", lambda package: tmp_path)
    source = search_path.ExperimentSource("x", "experiments://titanyaml.experiments")
    assert source.list("experiment", ObjectType.CONFIG) == ["table/row1"]
    assert source.list("experiment", ObjectType.GROUP) == []
    assert source.is_config("experiment/table/row1")


def test_a_package_joins_by_an_entry_point(tmp_path, monkeypatch, compose) -> None:
    package = tmp_path / "their_conf"
    (package / "plugin").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "plugin" / "noise.yaml").write_text(
        "# @package pipeline.plugins\nnoise:\n  _target_: their_code.Noise\n  amount: 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("their", "their_conf", search_path.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        search_path, "entry_points", lambda group: [point] if group == search_path.ENTRY_POINT_GROUP else []
    )
    for override in ("plugin=[noise]", "plugin=noise"):
        nodes = compose(override).pipeline.plugins
        assert nodes.noise == {"_target_": "their_code.Noise", "amount": 0.5}
        assert list(nodes) == [*compose().pipeline.plugins, "noise"]


def test_our_configuration_is_found_behind_a_users_folder(tmp_path) -> None:
    """``--config-path``: a replayed run, or a user's own primary configuration."""
    store.register()
    (tmp_path / "config.yaml").write_text(
        "defaults: [config_schema, titan_hydra, model: llama3_debug, parallel: fsdp2, _self_]\ntrain: {steps: 7}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = hydra_compose("config", return_hydra_config=True)
    assert (cfg.train.steps, cfg.parallel.dp_shard, cfg.model.dim) == (7, 2, 256)
    assert cfg.hydra.job.name == "titanyaml"
    providers = [source.provider for source in cfg.hydra.runtime.config_sources]
    assert "titanyaml" in providers
