"""The decoder against Hugging Face transformers, with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.models.cases import SPECS, build, relative, tokens
from titanyaml.config.schema import Model
from titanyaml.errors import CheckpointError, ConfigError
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder, hf
from titanyaml.models.decoder import Decoder
from titanyaml.models.generate import generate

transformers = pytest.importorskip("transformers")


def name_map(spec: Model) -> dict[str, str]:
    """Our parameter names to Hugging Face's, of tensors that have one layout on both sides."""
    return {mapping.ours[0]: mapping.hf[0] for mapping in hf.mappings(spec) if mapping.export is tuple}


def peer_of(model: Decoder) -> torch.nn.Module:
    """The transformers model of the same configuration and weights."""
    peer = empty_peer(model.spec)
    result = peer.load_state_dict(hf.to_hf(model.state_dict(), model.spec), strict=False)
    assert result.missing_keys == (["lm_head.weight"] if model.spec.tie_embeddings else [])
    assert result.unexpected_keys == []
    return peer.eval()


def empty_peer(spec: Model) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(**hf.hf_config(spec))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("name", SPECS)
def test_logits_loss_and_every_gradient(name: str) -> None:
    model, ids = build(SPECS[name]), tokens(2, 61)
    peer = peer_of(model)
    assert type(peer).__name__ == hf.hf_config(model.spec)["architectures"][0]
    inputs, labels = ids[:, :-1], ids[:, 1:]
    hf_output = peer(input_ids=inputs, use_cache=False).logits
    with torch.no_grad():
        assert (model(inputs) - hf_output).abs().max() < 1e-5
    peer_loss = F.cross_entropy(hf_output.flatten(0, 1), labels.flatten(), reduction="sum")
    peer_loss.backward()
    loss = model(inputs, labels_BS=labels, loss_fn=CrossEntropy(32))
    loss.backward()
    assert abs(loss.item() / peer_loss.item() - 1) < 1e-5
    peer_grads = {n: p.grad for n, p in peer.named_parameters()}
    names = name_map(model.spec)
    assert set(names.values()) == set(peer_grads)
    errors = {n: relative(p.grad, peer_grads[names[n]]) for n, p in model.named_parameters()}
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", SPECS)
def test_greedy_generation(name: str) -> None:
    model, prompt = build(SPECS[name]), tokens(1, 5)
    hf_output = peer_of(model).generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert list(generate(model, prompt[0].tolist(), max_new_tokens=20, temperature=0.0)) == hf_output[0, 5:].tolist()


@pytest.mark.parametrize("name", SPECS)
def test_names_survive_the_round_trip(name: str) -> None:
    model = build(SPECS[name])
    state = model.state_dict()
    back = hf.from_hf(hf.to_hf(state, model.spec), model.spec)
    assert list(back) == list(name_map(model.spec)) and set(back) == set(state)
    assert all(back[n] is state[n] for n in state)
    # a state_dict of transformers brings a tied head a second time
    from_peer = hf.from_hf(dict(peer_of(model).state_dict()), model.spec)
    assert all(torch.equal(from_peer[n], state[n]) for n in state)


def test_key_sets_are_strict_both_ways() -> None:
    spec = SPECS["llama3_1"]
    state = build(spec).state_dict()
    hf_output = hf.to_hf(state, spec)
    for convert, good in ((hf.to_hf, state), (hf.from_hf, hf_output)):
        first = next(iter(good))
        with pytest.raises(CheckpointError, match=f"1 missing .{first}.*; 1 unexpected .stranger"):
            convert({n: t for n, t in good.items() if n != first} | {"stranger": state["norm.weight"]}, spec)
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding"):
        hf.from_hf(hf_output, replace(spec, tie_embeddings=True))


def test_a_variant_that_the_family_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.qk_norm"):
        hf.hf_config(replace(SPECS["llama3_1"], qk_norm=True))
    with pytest.raises(ConfigError, match="model.qk_norm"):
        hf.hf_config(replace(SPECS["qwen3"], qk_norm=False))


@pytest.mark.parametrize(
    ("dim", "layers", "heads", "ffn_dim", "tied"),
    [(1024, 28, 16, 3072, True), (4096, 36, 32, 12288, False), (5120, 64, 64, 25600, False)],
    ids=["0.6b", "8b", "32b"],
)
def test_qwen3_has_the_parameters_of_the_architecture(
    dim: int, layers: int, heads: int, ffn_dim: int, tied: bool
) -> None:
    spec = Model(
        name="qwen3",
        family="qwen3",
        vocab_size=151936,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=ffn_dim,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=tied,
        qk_norm=True,
    )
    with torch.device("meta"):
        peer = empty_peer(spec)
    assert decoder.build(spec).facts.num_params == sum(p.numel() for p in peer.parameters())
