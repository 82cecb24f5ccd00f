"""Autoregressive generation with a key/value cache."""

from collections.abc import Collection, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titanyaml.errors import ConfigError, DataError
from titanyaml.models.attention import KVCache
from titanyaml.models.decoder import Decoder
from titanyaml.models.layers import at_least_float32


def generate(
    model: Decoder,
    tokens: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Continue the prompt ``tokens``, yielding each new id.

    Args:
        temperature: 0 takes the most likely id (the lowest of equals); above, logits are divided by it and an id drawn.
        top_k: draw among this many most likely ids; None: among all.
        generator: source of the draws, on the model's device.
        stop_ids: ids that end the text; they are not yielded.
    Raises:
        ConfigError: the prompt is empty, or prompt and new tokens exceed ``model.max_seq_len``.
        DataError: a prompt id is outside the vocabulary.
    """
    limit = model.facts.max_seq_len
    if not tokens:
        raise ConfigError("the prompt has no tokens", key="runner.prompt", hint="runner.prompt='def '")
    if len(tokens) + max_new_tokens > limit:
        raise ConfigError(
            f"{len(tokens)} prompt tokens and {max_new_tokens} new ones exceed model.max_seq_len={limit}",
            key="runner.max_new_tokens",
            hint=f"runner.max_new_tokens={max(limit - len(tokens), 1)}",
        )
    invalid = [token for token in tokens if not 0 <= token < model.facts.vocab_size]
    if invalid:
        raise DataError(
            f"prompt id {invalid[0]} is outside the vocabulary of {model.facts.vocab_size} ids", key="model.vocab_size"
        )

    @torch.no_grad()
    def new_ids() -> Iterator[int]:
        device = next(model.parameters()).device
        # the last new token is never fed back, so that it needs no position
        cache = KVCache(len(tokens) + max_new_tokens - 1)
        unread = tokens  # the whole prompt at first, then one token a forward: the cache holds the others
        for _ in range(max_new_tokens):
            logits_BV = model(torch.tensor([unread], device=device), loss_fn=_last_logits, cache=cache)
            token = _choose(logits_BV[0], temperature, top_k, generator)
            if token in stop_ids:
                return
            yield token
            unread = [token]

    # Were this function a generator itself, it would raise its errors at the first ``next``, not when called.
    return new_ids()


def _last_logits(hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor | None) -> Tensor:
    # of the last position only: the other positions of a prompt predict ids that are given
    return F.linear(hidden_BSD[:, -1], weight_VD)


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    # in float32: probabilities rounded to bfloat16 would not sum to 1 over a large vocabulary
    logits_V = logits_V.to(at_least_float32(logits_V.dtype)) / temperature
    if top_k is None:
        return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))
    # softmax over the kept logits alone: the others get probability 0
    best = logits_V.topk(min(top_k, logits_V.shape[0]))
    return int(best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=generator)])
