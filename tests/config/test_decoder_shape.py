"""The counts of a decoder's shape against the module that is built."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.schema import Model, MoE
from titanyaml.models import decoder

SIZES = {"vocab_size": 96, "dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 80}
DENSE = Model(name="dense", max_seq_len=64, **SIZES)
MIXED = MoE(num_experts=8, top_k=3, ffn_dim=24, shared_ffn_dim=16, first_dense=1, every=2)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tie_embeddings": True},
        {"qk_norm": True, "head_dim": 8},
        {"nope_every": 2, "attention_chunk": 16},
        {"moe": MIXED},
        {"moe": dataclasses.replace(MIXED, ffn_dim=None, shared_ffn_dim=0, first_dense=0, every=1)},
    ],
    ids=["dense", "tied", "head norms", "chunks", "some mixtures", "all mixtures"],
)
def test_counts_are_those_of_the_module(changed: dict) -> None:
    spec = dataclasses.replace(DENSE, **changed)
    model, shape = decoder.build(spec), DecoderShape.of(spec)
    assert shape.num_params == model.facts.num_params
    assert shape.num_active_params == model.facts.num_active_params
    assert shape.flops_per_token(32) == model.facts.flops_per_token(32)
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in model.layers]
    assert [shape.block_params(block) for block in shape.blocks] == blocks
    for block, kind in zip(model.layers, shape.blocks, strict=True):
        linears = {
            name.rpartition(".")[2]: module.weight.shape
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and not name.endswith("router")
        }
        assert {linear.name: (linear.outputs, linear.inputs) for linear in shape.linears_of(kind)} == linears
