"""Mixtures against Hugging Face transformers, through checkpoints on disk as they stand on the hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from tests.models.cases import MIXTURES, build, relative, tokens
from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.schema import Model, MoE, RopeScaling
from titanyaml.errors import ConfigError
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder, hf
from titanyaml.models.generate import generate

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def write(state: dict[str, Tensor], spec: Model, folder: Path) -> None:
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in hf.to_hf(state, spec).items()}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf.hf_config(spec)))


def read(spec: Model, folder: Path) -> dict[str, Tensor]:
    [file] = folder.glob("*.safetensors")
    return hf.from_hf(safetensors.load_file(file), spec)


#: Parameters and those that a token meets, of the text model. Published as 46.7 and 12.9, 30.5 and 3.3, 235 and 22,
#: 109 and 17 (with the vision encoder), 400 and 17 billion.
PUBLISHED = {
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
    "qwen3_235b_a22b": (235_093_634_560, 22_190_763_520),
    "llama4_17bx16e": (107_769_861_120, 17_172_894_720),
    "llama4_17bx128e": (400_711_848_960, 17_184_691_200),
}


def shipped(name: str) -> Model:
    tree = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / f"{name}.yaml").read_text())
    scaling = tree.pop("rope_scaling", None)
    return Model(**tree | {"moe": MoE(**tree["moe"]), "rope_scaling": scaling and RopeScaling(**scaling)})


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_mixtures_have_the_parameters_of_the_architecture(name: str) -> None:
    spec = shipped(name)
    facts = decoder.build(spec).facts
    assert (facts.num_params, facts.num_active_params) == PUBLISHED[name]
    config = transformers.AutoConfig.for_model(**hf.hf_config(spec))
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in peer.parameters()) == facts.num_params
    shape = DecoderShape.of(spec)
    assert (shape.num_params, shape.num_active_params) == PUBLISHED[name]
    assert sum(block.mixture for block in DecoderShape.of(spec).blocks) == sum(
        bool(layout.experts) for layout in decoder.build(spec).facts.layouts
    )


def test_what_a_family_cannot_say_is_refused() -> None:
    def refused(name: str, **changes: object) -> list[str]:
        spec = MIXTURES[name]
        moe = {key.removeprefix("moe_"): value for key, value in changes.items() if key.startswith("moe_")}
        rest = {key: value for key, value in changes.items() if not key.startswith("moe_")}
        with pytest.raises(ConfigError) as error:
            hf.hf_config(replace(spec, moe=replace(spec.moe, **moe), **rest))
        return [problem.key for problem in error.value.problems]

    assert refused("mixtral", moe_shared_ffn_dim=8, moe_scale=2.0) == ["model.moe.shared_ffn_dim", "model.moe.scale"]
    assert refused("mixtral", moe_ffn_dim=8) == ["model.moe.ffn_dim"]
    twice = replace(MIXTURES["mixtral"], moe=replace(MIXTURES["mixtral"].moe, ffn_dim=MIXTURES["mixtral"].ffn_dim))
    assert hf.hf_config(twice) == hf.hf_config(MIXTURES["mixtral"])
    assert refused("qwen3_moe", nope_every=4, moe_score="sigmoid") == ["model.nope_every", "model.moe.score"]
    assert refused("llama4", moe_bias_rate=0.1, moe_shared_ffn_dim=8) == [
        "model.moe.shared_ffn_dim",
        "model.moe.bias_rate",
    ]
    assert refused("llama4", moe_num_experts=0) == ["model.moe.num_experts"]
    with pytest.raises(ConfigError, match="model.moe.num_experts"):
        hf.hf_config(replace(MIXTURES["mixtral"], family="llama3"))


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_gradients_and_names(name: str, tmp_path: Path) -> None:
    model, ids = build(MIXTURES[name]), tokens(2, 61)
    spec = model.spec
    write(model.state_dict(), spec, tmp_path)
    peer, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(peer).__name__ == hf.hf_config(spec)["architectures"][0]
    assert sum(p.numel() for p in peer.parameters()) == model.facts.num_params
    inputs, labels = ids[:, :-1], ids[:, 1:]
    theirs = peer(input_ids=inputs, use_cache=False).logits
    with torch.no_grad():
        assert (model(inputs) - theirs).abs().max() < 1e-5
    F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    loss = model(inputs, labels_BS=labels, loss_fn=CrossEntropy(32))
    loss.backward()
    prompt = tokens(1, 5)
    greedy = peer.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert list(generate(model, prompt[0].tolist(), max_new_tokens=40, temperature=0.0)) == greedy
    for parameter in peer.parameters():  # the way back carries their gradients
        parameter.data = parameter.grad
    (tmp_path / "back").mkdir()
    peer.save_pretrained(tmp_path / "back")
    back = read(spec, tmp_path / "back")
    assert set(back) == set(model.state_dict())
    errors = {name: relative(parameter.grad, back[name]) for name, parameter in model.named_parameters()}
    assert max(errors.values()) < 1e-4, errors
