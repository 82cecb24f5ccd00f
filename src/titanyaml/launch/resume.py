"""Decide whether a configuration may continue a run that another configuration began.

Each key of the schema says so itself (``resume`` in ``config/keys.py``): what only says how far, how often, how fast or
where may change; what changes the mathematics may not, unless ``checkpoint.accept_changes`` names it; the mesh and the
batches may change as long as a step still sees equally many sequences.
"""

from typing import Any

from titanyaml.config import dump
from titanyaml.config.checkpoint_config import override_key
from titanyaml.config.schema import Config
from titanyaml.config.schema_keys import find_key, is_under
from titanyaml.errors import ConfigError, Problem
from titanyaml.rundir import RunDir

#: Groups that a checkpoint brings along for the runners that read one.
FROM_CHECKPOINT = ("model", "tokenizer")


def resume_rule(key: str) -> str | None:
    """``resume`` of a dotted key, or of the innermost section around it that has one."""
    while key:
        field = find_key(key)
        if field is not None and field.rules["resume"] is not None:
            return str(field.rules["resume"])
        key = key.rpartition(".")[0]
    return None


def check_changes(config: Config, text: str, run: RunDir, *, global_batch: int) -> dict[str, tuple[Any, Any]]:
    """How ``config`` differs from what ``run`` recorded: dotted key to (old, new), empty for a new folder.

    Args:
        text: of the new config.yaml.
        global_batch: sequences of a step under ``config``.

    Raises:
        ConfigError: a difference that would make the rest of the run another run.
    """
    path = run.path / "config.yaml"
    if not path.exists():
        if config.checkpoint.resume != "none" and any((run.path / "checkpoints").glob("step-*")):
            raise ConfigError(
                f"{run.path} holds checkpoints but no config.yaml: what they were begun with is unknown",
                key="run.id",
                hint=f"put the file back, or another run.id and checkpoint.resume={run.path}",
            )
        return {}
    changes = dump.changes_since(path, config)
    # of both files: where one has a value of its own in place of the reference, the rule of the key still holds
    references = dump.plugin_references(path.read_text(encoding="utf-8")) | dump.plugin_references(text)
    accepted = config.checkpoint.accept_changes
    refused: dict[str, tuple[str, str]] = {}  # key -> (message, override that brings the old value back)
    for changed_key, (old, new) in changes.items():
        key = _referred_key(changed_key, references)
        rule = resume_rule(key)
        if rule == "fixed" or not (rule or is_under(key, accepted) or is_under(changed_key, accepted)):
            # one problem a value: a plugin's argument that only repeats a changed key is that key's problem
            key = key if key in changes else changed_key
            refused[key] = f"is {new!r}, but {run.path} was begun with {old!r}", f"{key}={old}"
    old_batch = run.status().get("global_batch", global_batch)
    if old_batch != global_batch and not is_under("train.global_batch", accepted):
        # named by the batch, whichever of the batch and mesh keys changed it
        message = f"a step would see {global_batch} sequences, but {run.path} was begun with {old_batch}"
        refused["train.global_batch"] = message, f"train.global_batch={old_batch} (on any mesh)"
    if refused:
        raise ConfigError(_problems(refused, accepted))
    return changes


def _referred_key(key: str, references: dict[str, str]) -> str:
    """The key of the schema that a plugin's argument repeats: ``pipeline.plugins.ac.mode`` -> ``ac.mode``."""
    for repeating, referred in references.items():
        if is_under(key, (repeating,)):
            return referred + key.removeprefix(repeating)
    return key


def _problems(refused: dict[str, tuple[str, str]], accepted: list[str]) -> list[Problem]:
    fixed = {key for key in refused if resume_rule(key) == "fixed"}
    acceptable = [*accepted, *(key for key in refused if key not in fixed)]
    accept = f", or 'checkpoint.accept_changes=[{','.join(acceptable)}]'"
    return [
        Problem(key, message, hint=f"{old_value}, another run.id{'' if key in fixed else accept}")
        for key, (message, old_value) in refused.items()
    ]


def refuse_checkpoint_keys(config: Config, overrides: list[str]) -> None:
    """Raise ConfigError if the command line sets what ``runner.checkpoint`` brings: model or tokenizer."""
    if config.runner.checkpoint is None:
        return
    # of the command line only: the composed tree always has a model, if only the default
    texts = {override_key(text): text for text in overrides}
    problems = [
        Problem(key, f"is fixed by the checkpoint {config.runner.checkpoint}", hint=f"leave out {text}")
        for key, text in texts.items()
        if is_under(key, FROM_CHECKPOINT)
    ]
    if problems:
        raise ConfigError(problems)


def is_finished(run: RunDir, changes: dict[str, tuple[Any, Any]], *, steps: int) -> bool:
    """Whether nothing is left to do: the run is done, and was not extended since."""
    status = run.status()
    # a higher train.steps extends a finished run
    return status.get("state") == "done" and ("train.steps" not in changes or status.get("step", 0) >= steps)
