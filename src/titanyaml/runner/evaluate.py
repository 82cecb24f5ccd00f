"""Loss on held-out text, during training and of a checkpoint (``runner=eval``); reading a trained model."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from titanyaml.config import dump
from titanyaml.config.checkpoint_config import override_key, run_folder_of
from titanyaml.config.schema import Config
from titanyaml.data.loader import validation_batches
from titanyaml.data.packing import TokenData
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env
from titanyaml.errors import CheckpointError
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.rundir import RunDir
from titanyaml.runner import setup
from titanyaml.runner.train_step import model_inputs, valid_tokens

if TYPE_CHECKING:
    from titanyaml.runner.setup import BuiltModel

log = logging.getLogger("titanyaml")
#: Keys of ``train`` that come from the checkpoint unless they are typed.
_TRAIN_KEYS = ("seq_len", "param_dtype", "compute_dtype", "reduce_dtype")


@torch.no_grad()
def mean_loss(config: Config, built: BuiltModel, dataset: TokenData, *, env: Env) -> float:
    """Mean token loss (nats) over the first ``validation.batches`` global batches, the same on every rank."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=env.device)
    tokens, dims = 0, built.context.dims
    loss_fn, documents = setup.build_loss(config, built.context), config.model.document_mask
    steps = validation_batches(
        dataset,
        global_batch=setup.global_batch(config, dims),
        local_batch=config.train.local_batch,
        data_rank=dims.data_rank(built.context.mesh),
        data_degree=dims.data_degree,
        batches=config.validation.batches,
    )
    for step in steps:
        tokens += valid_tokens(step)
        inputs = (model_inputs(batch, env.device, documents=documents) for batch in step)
        if isinstance(built.model, StagedModel):  # forwards alone need no schedule, and may be of any number
            loss_sum += built.model.runtime.evaluate(list(inputs), loss_fn=loss_fn)
            continue
        for microbatch in inputs:
            loss_sum += built.model(**microbatch, loss_fn=loss_fn)
    # tp, cp and pp peers know the same loss or read the same batch: one of them counts
    mesh = built.context.mesh
    counted = [float(loss_sum) if dims.adds_loss(mesh) else 0.0, tokens if dims.counts_batch(mesh) else 0]
    total, count = comm.sum_scalars(counted, env)
    return total / count


def evaluate(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Validation loss and perplexity of the checkpoint ``runner.checkpoint``.

    Model and tokenizer are those of the checkpoint's run; so is the text, unless ``data`` was typed.
    """
    config, path = adopt_trained(config, run)
    tokenizer = setup.build_tokenizer(config, env)
    dataset = setup.build_data(config, env, tokenizer, split="validation")
    built = setup.build_model(config, env)
    meta = load_weights(built, path, config=config, run=run, env=env)
    loss = mean_loss(config, built, dataset, env=env)
    record = {"step": meta["step"], "validation_loss": loss, "perplexity": math.exp(loss)}
    if env.is_main:
        run.metric(record)
        log.info("step %d: validation loss %.4f nats/token, perplexity %.2f", meta["step"], loss, record["perplexity"])
    return {"metric": loss, **record}


def adopt_trained(config: Config, run: RunDir) -> tuple[Config, Path]:
    """``config`` with the model, the tokenizer and, unless typed, text, dtypes and sequence length of a trained run.

    Returns the path of the checkpoint too. Raises CheckpointError without a run at ``runner.checkpoint``.
    """
    assert config.runner.checkpoint is not None, "a rule refuses runner=eval and runner=sample without it"
    checkpoint, run_folder = Path(config.runner.checkpoint), run_folder_of(config.runner.checkpoint)
    if not (run_folder / "config.yaml").is_file():
        raise CheckpointError(
            f"{checkpoint} is neither a run folder nor a checkpoint in one",
            key="runner.checkpoint",
            hint="runner.checkpoint=outputs/<run.name>/<run.id>",
        )
    trained = dump.load(run_folder / "config.yaml", run_id=run_folder.name, run_dir=str(run_folder))
    typed = typed_groups(run)
    groups = ("model", "tokenizer") if "data" in typed else ("model", "tokenizer", "data")
    train_values = {key: getattr(trained.train, key) for key in _TRAIN_KEYS if f"train.{key}" not in typed}
    adopted = {group: getattr(trained, group) for group in groups}
    return dataclasses.replace(config, **adopted, train=dataclasses.replace(config.train, **train_values)), checkpoint


def typed_groups(run: RunDir) -> set[str]:
    """Groups and keys of the command line: ``model=x model.dim=8`` -> {"model", "model.dim"}."""
    overrides = yaml.safe_load((run.path / "overrides.yaml").read_text()).get("overrides", [])
    keys = {override_key(override) for override in overrides}
    return keys | {key.split(".")[0] for key in keys}


def load_weights(built: BuiltModel, path: Path, *, config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Read the checkpoint's weights into the model; returns its meta data."""
    weights = built.weights()
    checkpointer = setup.build_checkpointer(config, run, env)
    meta = checkpointer.load(path, {"model": weights}, only=("model",))  # optimizer state is left on disk
    built.load(weights)
    return meta
