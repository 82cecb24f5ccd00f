from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

from hydra.core.config_store import ConfigStore

from titanyaml.config import schema
from titanyaml.config.hydra import store


def test_registering_twice_changes_nothing(compose) -> None:
    first = compose()
    store.register()
    store.register()
    assert compose().model == first.model


def test_the_composed_tree_is_typed(compose) -> None:
    cfg = compose()
    assert cfg._metadata.object_type is schema.Config
    assert cfg.model._metadata.object_type is schema.Model


def test_the_store_is_shared_and_hands_out_copies() -> None:
    """Without this, --help copies the store for every option that it lists."""
    store.register()
    instance = ConfigStore.instance()
    assert copy.deepcopy(instance) is instance
    node = instance.load(f"{store.SCHEMA_NAME}.yaml").node
    node.train.steps = 3
    assert instance.load(f"{store.SCHEMA_NAME}.yaml").node.train.steps == schema.Train().steps


def test_jobs_of_hydra_log_nothing_to_files(compose) -> None:
    hydra = compose(return_hydra_config=True).hydra
    assert hydra.job_logging.get("handlers") is None
    assert hydra.output_subdir is None


def test_no_module_and_no_check_imports_torch() -> None:
    folder = Path(schema.__file__).parents[2]
    files = [path.relative_to(folder.parent) for path in (folder / "config").rglob("*.py")]
    imports = "; ".join(f"import {'.'.join(file.with_suffix('').parts)}" for file in files)
    program = (
        f"import sys; {imports}; from titanyaml.config.hydra.compose_hook import main_loader; "
        "from titanyaml.config.hydra.composition_report import compose_report; "
        "problems = compose_report(['ac=full', 'tokenizer=bytes', 'optim.lrr=1'], loader=main_loader()).problems; "
        "assert len(problems) == 1, problems; assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
