"""Loss on held-out text, during training and of a checkpoint (``runner=eval``)."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from titanyaml.config.schema import Config
from titanyaml.data.loader import validation_batches
from titanyaml.data.packing import TokenData
from titanyaml.distributed import comm
from titanyaml.distributed.env import Env
from titanyaml.pipeline_parallel.staged import StagedModel
from titanyaml.rundir import RunDir
from titanyaml.runner import setup
from titanyaml.runner.train_step import model_inputs, valid_tokens
from titanyaml.runner.trained_model import adopt_trained, load_weights

if TYPE_CHECKING:
    from titanyaml.runner.setup import BuiltModel

log = logging.getLogger("titanyaml")


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
    counted_loss = float(loss_sum) if dims.adds_loss(mesh) else 0.0
    counted_tokens = tokens if dims.counts_batch(mesh) else 0
    total, count = comm.sum_scalars([counted_loss, counted_tokens], env)
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
