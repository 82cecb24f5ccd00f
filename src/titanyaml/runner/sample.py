"""Write text from a checkpoint (``runner=sample``)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from titanyaml.config.schema import Config
from titanyaml.distributed import rng
from titanyaml.distributed.env import Env
from titanyaml.errors import ConfigError, LaunchError
from titanyaml.models.generate import generate
from titanyaml.rundir import RunDir, atomic_write
from titanyaml.runner import setup
from titanyaml.runner.evaluate import adopt_trained, load_weights

if TYPE_CHECKING:
    from titanyaml.models.decoder import Decoder


def sample(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Continue ``runner.prompt`` with the checkpoint's model; print token by token, and write ``sample.txt``."""
    if env.world_size > 1:  # the cache of keys and values is not sharded
        raise LaunchError("runner=sample runs on one rank", key="parallel", hint="parallel=single launch.nproc=1")
    config, path = adopt_trained(config, run)
    tokenizer = setup.build_tokenizer(config, env)
    if tokenizer is None:
        raise ConfigError(
            f"{path} was trained on random tokens, which are no text to continue",
            key="runner.checkpoint",
            hint="a run that was trained on text, or data=stdlib",
        )
    built = setup.build_model(config, env)
    load_weights(built, path, config=config, run=run, env=env)
    options = config.runner
    prompt = tokenizer.encode(options.prompt)
    # the model has to be given a token to begin with
    if not prompt and tokenizer.bos_id is not None:
        prompt = [tokenizer.bos_id]
    room = config.model.max_seq_len - len(prompt)
    if not prompt or room < options.max_new_tokens:
        raise ConfigError(
            f"{len(prompt)} prompt tokens and {options.max_new_tokens} new ones do not fit in "
            f"model.max_seq_len={config.model.max_seq_len}, or the prompt is empty",
            key="runner.max_new_tokens",
            hint=f"runner.max_new_tokens={max(room, 1)}",
        )
    tokens = generate(
        cast("Decoder", built.model),  # one rank has no pipeline
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=rng.generator(config.run.seed, "sample", device=env.device),
        stop_ids=(tokenizer.eos_id,),
    )
    written, text = list(prompt), options.prompt
    sys.stdout.write(text)
    for token in tokens:
        written.append(token)
        # a token may end within a character: print only what later tokens cannot change
        decoded = tokenizer.decode(written).rstrip("\ufffd")
        if decoded.startswith(text):
            sys.stdout.write(decoded[len(text) :])
            sys.stdout.flush()
            text = decoded
    sys.stdout.write("\n")
    atomic_write(run.path / "sample.txt", tokenizer.decode(written) + "\n")
    return {"tokens": len(written) - len(prompt)}
