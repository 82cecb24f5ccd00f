from __future__ import annotations

from omegaconf import OmegaConf

from titanyaml.config.hydra.origins import ConfigFile, Origins


def files(tmp_path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("# mine\nlr: 1\ngroups:\n  - pattern: a\n")
    (tmp_path / "x.yaml").write_text("# @package _global_\n\noptim:\n  beta1: 2\n  lr: 3\n")
    group = ConfigFile(f"file://{tmp_path}", "optim/mine", "optim", OmegaConf.load(tmp_path / "optim" / "mine.yaml"))
    root = ConfigFile(f"file://{tmp_path}", "x", "_global_", OmegaConf.load(tmp_path / "x.yaml"))
    return group, root


def test_the_last_file_wins_and_its_line_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    group, root = files(tmp_path)
    assert Origins([], lambda: [group, root]).of("optim.lr") == "x.yaml:5"
    assert Origins([], lambda: [root, group]).of("optim.lr") == "optim/mine.yaml:2"
    assert Origins([], lambda: [root, group]).of("optim.groups[0].pattern") == "optim/mine.yaml:3"
    assert Origins([], lambda: [root, group]).of("optim.eps") == ""


def test_an_override_wins_over_files_which_are_then_not_read() -> None:
    def unread() -> list[ConfigFile]:
        raise AssertionError("read")

    typed = [("optim.lr", "optim.lr=1"), ("parallel", "parallel=tp2"), ("optim.lr", "optim.lr=2")]
    assert Origins(typed, unread).of("optim.lr") == "override 'optim.lr=2'"
    # an option may be the user's own file, whose line says more: only a shipped one is told by what was typed
    mesh = ConfigFile("mesh://parallel", "parallel/tp2", "parallel", OmegaConf.create({"tp": 2}))
    assert Origins(typed, lambda: [mesh]).of("parallel.tp") == "override 'parallel=tp2'"


def test_files_elsewhere_are_absolute_and_packages_have_paths(tmp_path, monkeypatch) -> None:
    group, _ = files(tmp_path)
    assert Origins([], lambda: [group]).of("optim.lr") == f"{tmp_path}/optim/mine.yaml:2"
    packaged = ConfigFile("pkg://titanyaml.conf", "model/llama3_8b", "model", OmegaConf.create({"dim": 4096}))
    monkeypatch.chdir("/")
    assert Origins([], lambda: [packaged]).of("model.dim").endswith("conf/model/llama3_8b.yaml:5")
    shipped = ConfigFile(
        "experiments://titanyaml.experiments",
        "experiment/lr_sweep",
        "_global_",
        OmegaConf.create({"run": {"name": "lr_sweep"}}),
    )
    assert "experiments/lr_sweep.yaml:" in Origins([], lambda: [shipped]).of("run.name")


def test_a_mesh_name_is_its_own_place() -> None:
    mesh = ConfigFile("mesh://parallel", "parallel/tp2", "parallel", OmegaConf.create({"tp": 2}))
    assert Origins([], lambda: [mesh]).of("parallel.tp") == "the mesh name parallel=tp2"
