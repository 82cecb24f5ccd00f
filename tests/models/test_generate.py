from __future__ import annotations

import pytest
import torch

from tests.models.cases import SPECS, VOCAB, build, tokens
from titanyaml.errors import ConfigError, DataError
from titanyaml.models.attention import KVCache
from titanyaml.models.generate import generate

PROMPT = tokens(1, 7)[0].tolist()


def run(model, **options) -> list[int]:
    return list(generate(model, PROMPT, **{"max_new_tokens": 24, "temperature": 0.0, **options}))


@torch.no_grad()
def uncached(model, count: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("name", SPECS)
def test_greedy_with_a_cache_equals_argmax_without(name: str) -> None:
    model = build(SPECS[name])
    assert run(model) == uncached(model, 24)


@torch.no_grad()
def test_cached_logits_equal_whole_ones_in_any_split() -> None:
    model, ids = build(SPECS["qwen3"]), tokens(2, 20)
    cache = KVCache(20)
    parts = [model(part, cache=cache) for part in ids.split([9, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-5)


def test_sampling_is_reproducible_and_keeps_to_top_k() -> None:
    model = build(SPECS["llama3_1"])

    def draw(seed: int, **options) -> list[int]:
        return run(model, temperature=1.5, generator=torch.Generator().manual_seed(seed), **options)

    assert draw(0) == draw(0) != draw(1)
    assert draw(0, top_k=1) == run(model)
    assert draw(0, top_k=10 * VOCAB) == draw(0, top_k=VOCAB)
    ids = PROMPT + draw(2, top_k=3)
    with torch.no_grad():
        best = model(torch.tensor([ids]))[0].topk(3).indices
    assert all(ids[i + 1] in best[i] for i in range(len(PROMPT) - 1, len(ids) - 1))


def test_draws_follow_the_probabilities_of_the_temperature() -> None:
    model = build(SPECS["llama3_1"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPT]))[0, -1] / 0.7).softmax(-1)
    options = {"max_new_tokens": 1, "temperature": 0.7, "generator": generator}
    counts = torch.zeros(VOCAB)
    for _ in range(1000):
        counts[run(model, **options)[0]] += 1
    deviation = (expected * (1 - expected) / 1000).sqrt()
    assert ((counts / 1000 - expected).abs() <= 5 * deviation + 2e-3).all()


def test_stop_ids_end_the_text_and_are_not_part_of_it() -> None:
    model = build(SPECS["llama3_1"])
    greedy = run(model)
    stop = greedy[5]
    assert run(model, stop_ids=[stop]) == greedy[: greedy.index(stop)]


def test_what_cannot_be_written_is_refused_before_the_first_token() -> None:
    model = build(SPECS["llama3_1"])
    with pytest.raises(ConfigError, match="runner.max_new_tokens=57"):
        run(model, max_new_tokens=58)
    assert len(run(model, max_new_tokens=57)) == 57
    with pytest.raises(ConfigError, match="no tokens"):
        generate(model, [], max_new_tokens=1, temperature=0.0)
    with pytest.raises(DataError, match=f"prompt id {VOCAB} is outside the vocabulary of {VOCAB} ids"):
        generate(model, [VOCAB], max_new_tokens=1, temperature=0.0)
