"""The work of a step by shapes, and the floor that follows from measured times."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from tests.plugins.small import spec
from titanyaml import ceilings
from titanyaml.ceilings import Ceilings, GemmShape, GemmTimes
from titanyaml.config.schema import Model
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.models import decoder

LLAMA3_8B = Model(
    name="8b", vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, max_seq_len=8192
)


def work_of(model_spec=LLAMA3_8B, **degrees):
    model = decoder.build(model_spec)
    dims = ParallelDims(**degrees)
    return ceilings.rank_work(model, model.facts, dims, seq_len=8192, local_batch=1, accumulation=2)


def shapes(rank_work):
    return [
        (shape.tokens, shape.inputs, shape.outputs, len(shape.layers)) for shape in [*rank_work.linears, rank_work.head]
    ]


def test_the_work_of_one_rank_is_the_whole_model():
    rank_work = work_of()
    assert shapes(rank_work) == [
        (8192, 4096, 4096, 64),
        (8192, 4096, 1024, 64),
        (8192, 4096, 14336, 64),
        (8192, 14336, 4096, 32),
        (8192, 4096, 128256, 1),
    ]
    assert (rank_work.forwards, rank_work.parameters, rank_work.attentions) == (2, 8_030_261_248, 32)
    # every FLOP of the published formula but attention's: 6 per weight of a matrix and token
    products = sum(tokens * inputs * outputs * count for tokens, inputs, outputs, count in shapes(rank_work))
    facts = decoder.build(LLAMA3_8B).facts
    published = facts.flops_per_token(8192) - 12 * 32 * 32 * 128 * 8192
    assert 6 * products / 8192 == pytest.approx(published, rel=1e-4), "norms are in the formula"


def test_each_axis_takes_its_part():
    split = work_of(tp=4, cp=2, pp=2, dp_shard=2)
    assert shapes(split) == [
        (4096, 4096, 1024, 32),
        (4096, 4096, 256, 64),
        (4096, 1024, 4096, 32),
        (4096, 4096, 3584, 64),
        (4096, 3584, 4096, 32),
        (4096, 4096, 32064, 1),
    ]
    assert (split.heads, split.kv_heads, split.shares, split.forwards) == (8, 2, 2, 1.0)
    assert split.parameters == 8_030_261_248 // 32


def test_a_matrix_that_is_not_counted_leaves_no_floor():
    model = decoder.build(spec())
    model.layers[1].experts = nn.Parameter(torch.empty(2, 3, 4, device="meta"))
    rank_work = ceilings.rank_work(model, model.facts, ParallelDims(), seq_len=16, local_batch=2, accumulation=1)
    assert rank_work.left_out == ("layers.1.experts",)
    assert make_ceilings(work=rank_work).floor("bfloat16") is None
    assert make_ceilings(work=rank_work).why_no_floor("bfloat16") == "no floor: it does not count layers.1.experts"


def make_ceilings(**changes):
    """Two shapes, three layers, forward of 1, 2, 4 seconds and so on."""
    layers = GemmShape(8, 16, 16, ("a", "b")), GemmShape(8, 16, 17, ("c",))

    def times(unit):
        return dict(zip(ceilings.PASSES, (unit, 2 * unit, 4 * unit), strict=True))

    head = GemmShape(8, 16, 32, ("head",))
    values = {
        "work": ceilings.RankWork(
            layers,
            head,
            batch=1,
            heads=2,
            kv_heads=2,
            seq_len=8,
            head_dim=8,
            attentions=3,
            shares=2,
            forwards=0.5,
            parameters=100,
        ),
        "device": "made",
        "precisions": ["bfloat16", "float8_rowwise"],
        "linears": [
            GemmTimes(layers[0], {"bfloat16": times(1.0), "float8_rowwise": times(0.25)}),
            GemmTimes(layers[1], {"bfloat16": times(1.0)}),
        ],
        "head": GemmTimes(head, {"bfloat16": times(10.0)}),
        "attention": {"slow": (1.0, 9.0), "fast": (3.0, 5.0)},
        "copy": 1e12,
        "adamw": 0.01,
    }
    return Ceilings(**(values | changes))


def test_the_floor_adds_up():
    measured = make_ceilings()
    assert measured.best_attention == "fast"
    parts = {"linear": 10.5, "head": 35.0, "attention": 6.0, "optimizer": 1.0}
    assert measured.floor("bfloat16") == {**parts, "step": 52.5}
    # the second shape cannot be float8, and the weights' gradients of the mixed recipe are not
    assert measured.floor("float8_rowwise")["linear"] == 0.5 * (2 * 7 * 0.25 + 7)
    assert measured.floor("float8_rowwise_with_gw_hp")["linear"] == 0.5 * (2 * (3 * 0.25 + 4) + 7)
    assert measured.floor("float8_rowwise", quantised=["b"])["linear"] == 0.5 * (7 * 0.25 + 7 + 7)
    assert measured.why_no_floor("float8_rowwise") == ""
    assert measured.why_no_floor("mxfp8") == "no floor: this device has no fast products in mxfp8 to measure"
    assert measured.floor("mxfp8") is None and measured.floor("float8_tensorwise") is None


def test_a_record_says_rates():
    record = json.loads(json.dumps(make_ceilings().record()))
    assert record["gemm"][0]["tflops"]["bfloat16"] == pytest.approx(3 * 2 * 8 * 16 * 16 / 7 / 1e12)
    assert record["floor_ms"]["bfloat16"]["step"] == 52_500
    assert set(record["floor_ms"]) == {"bfloat16", "float8_rowwise", "float8_rowwise_with_gw_hp"}
    assert record["adamw"] == {"ns_per_parameter": 1e7, "tb_s": 28 / 0.01 / 1e12}


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "BUDGET_S", 0.001)
    model = decoder.build(spec())
    small = ceilings.rank_work(model, model.facts, ParallelDims(), seq_len=16, local_batch=2, accumulation=1)
    measured = ceilings.measure(small, device=torch.device("cpu"), dtype=torch.float32)
    floor = measured.floor("float32")
    assert all(part > 0 for part in floor.values())
    assert floor["step"] == pytest.approx(sum(s for part, s in floor.items() if part != "step"))
    assert measured.precisions == ["float32"] and list(measured.attention) == ["flash"]
    assert dataclasses.asdict(measured.work)["attentions"] == 4
