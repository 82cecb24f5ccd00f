from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.models.cases import BASE, SPECS, VOCAB, build, relative, tokens
from titanyaml.config.schema import Model, RopeScaling
from titanyaml.errors import ConfigError
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder

LLAMA = partial(Model, vocab_size=128256, max_seq_len=131072, num_kv_heads=8, rope_scaling=RopeScaling())
QWEN = partial(Model, family="qwen3", vocab_size=151936, max_seq_len=40960, num_kv_heads=8, head_dim=128, qk_norm=True)
PUBLISHED = [
    (8_030_261_248, LLAMA(name="llama3_8b", dim=4096, num_layers=32, num_heads=32, ffn_dim=14336)),
    (70_553_706_496, LLAMA(name="llama3_70b", dim=8192, num_layers=80, num_heads=64, ffn_dim=28672)),
    (405_853_388_800, LLAMA(name="llama3_405b", dim=16384, num_layers=126, num_heads=128, ffn_dim=53248)),
    (1_235_814_400, LLAMA(name="llama3_1b", dim=2048, num_layers=16, num_heads=32, ffn_dim=8192, tie_embeddings=True)),
    (3_212_749_824, LLAMA(name="llama3_3b", dim=3072, num_layers=28, num_heads=24, ffn_dim=8192, tie_embeddings=True)),
    (596_049_920, QWEN(name="qwen3_0_6b", dim=1024, num_layers=28, num_heads=16, ffn_dim=3072, tie_embeddings=True)),
    (8_190_735_360, QWEN(name="qwen3_8b", dim=4096, num_layers=36, num_heads=32, ffn_dim=12288)),
    (32_762_123_264, QWEN(name="qwen3_32b", dim=5120, num_layers=64, num_heads=64, ffn_dim=25600)),
]


@pytest.mark.parametrize(("count", "spec"), PUBLISHED, ids=[spec.name for _, spec in PUBLISHED])
def test_published_parameter_counts_on_meta(count: int, spec: Model) -> None:
    begin = time.monotonic()
    model = decoder.build(spec)
    assert time.monotonic() - begin < 10
    assert model.facts.num_params == count
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_facts() -> None:
    untied, tied = (decoder.build(SPECS[name]).facts for name in ("llama3_1", "llama3_2_tied"))
    assert untied.blocks == ("layers.0", "layers.1") and untied.head == "output" and not untied.tied
    assert tied.head == tied.embedding == "tok_embeddings" and tied.tied
    assert untied.num_params - tied.num_params == untied.num_embedding_params == VOCAB * 48
    # 6 * (parameters of matrix products) + 12 * layers * heads * head_dim * seq: the head's product counts in both
    assert untied.flops_per_token(32) == tied.flops_per_token(32) == 6 * tied.num_params + 12 * 2 * 48 * 32


@pytest.mark.parametrize("name", ["llama3_2_tied", "qwen3"])
def test_tokens_see_the_past_only(name: str) -> None:
    model, ids = build(SPECS[name]), tokens(2, 12)
    changed_ids = ids.clone()
    changed_ids[:, 7] = (changed_ids[:, 7] + 1) % VOCAB
    with torch.no_grad():
        moved = (model(ids) - model(changed_ids)).abs().amax(dim=(0, 2))
    assert (moved[:7] == 0).all() and (moved[7:] > 1e-4).all()


def test_documents_do_not_see_each_other() -> None:
    model, ids = build(replace(SPECS["llama3_1"], document_mask=True)), tokens(1, 20)
    documents = torch.tensor([[0] * 8 + [1] * 12])
    changed_ids = ids.clone()
    changed_ids[0, :8] = tokens(1, 8, seed=1)
    with torch.no_grad():
        together, changed = model(ids, documents_BS=documents), model(changed_ids, documents_BS=documents)
        first, second = (model(part, documents_BS=torch.zeros_like(part)) for part in (ids[:, :8], ids[:, 8:]))
    assert (together[:, :8] - changed[:, :8]).abs().max() > 0.1
    assert torch.equal(together[:, 8:], changed[:, 8:])
    # rotary positions are relative: a document is the same wherever it stands
    torch.testing.assert_close(together, torch.cat((first, second), 1), rtol=1e-4, atol=1e-5)


def test_one_document_masked_is_plain_causal_and_its_ids_are_not_forgotten() -> None:
    spec, ids = SPECS["qwen3"], tokens(2, 16)
    masked = build(replace(spec, document_mask=True))
    with torch.no_grad():
        torch.testing.assert_close(
            masked(ids, documents_BS=torch.zeros_like(ids)), build(spec)(ids), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(AssertionError, match="documents_BS is missing"):
        masked(ids)


def test_a_loss_inside_the_forward_equals_one_on_the_logits() -> None:
    model, ids = build(SPECS["llama3_2_tied"]), tokens(2, 17)
    labels = ids[:, 1:]
    loss = model(ids[:, :-1], labels_BS=labels, loss_fn=CrossEntropy(5))
    loss.backward()
    inside = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(ids[:, :-1])
    outside = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    outside.backward()
    torch.testing.assert_close(loss, outside)
    assert max(relative(inside[name], p.grad) for name, p in model.named_parameters()) < 1e-5


def test_float64_runs_in_float64() -> None:
    spec = SPECS["qwen3"]
    wide, ids = build(spec, dtype=torch.float64), tokens(1, 33)
    assert wide.rope_cos_TP.dtype == torch.float64
    loss = wide(ids[:, :-1], labels_BS=ids[:, 1:], loss_fn=CrossEntropy(7))
    assert loss.dtype == torch.float64
    # derivative along one direction, by central differences: holds to 1e-8 only if no step of the model is narrower
    loss.backward()
    generator = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(p.shape, generator=generator).double() for n, p in wide.named_parameters()}
    slope = sum((direction[n] * p.grad).sum() for n, p in wide.named_parameters())
    values = []
    for sign in (1, -1):
        moved = {n: p.detach() + sign * 1e-6 * direction[n] for n, p in wide.named_parameters()}
        arguments = {"labels_BS": ids[:, 1:], "loss_fn": CrossEntropy(7)}
        values.append(torch.func.functional_call(wide, moved, (ids[:, :-1],), arguments).item())
    assert abs((values[0] - values[1]) / 2e-6 / slope.item() - 1) < 1e-7


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_whole_model_compiles_as_one_graph(backend: str) -> None:
    spec = replace(SPECS["llama3_2_tied"], document_mask=True)
    model, ids = build(spec), tokens(2, 17)
    arguments = {
        "documents_BS": (torch.arange(16) // 6).expand(2, 16),
        "labels_BS": ids[:, 1:],
        "loss_fn": CrossEntropy(8),
    }
    eager = model(ids[:, :-1], **arguments)
    eager.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend=backend)
    compiled = model(ids[:, :-1], **arguments)
    compiled.backward()
    torch.testing.assert_close(compiled, eager)
    assert max(relative(p.grad, expected[name]) for name, p in model.named_parameters()) < 1e-5


def test_too_long_a_sequence_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="train.seq_len"):
        build(BASE)(tokens(1, 65))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True])
def test_bf16_on_cuda_follows_float32_on_the_cpu(masked: bool) -> None:
    spec = replace(SPECS["llama3_1"], document_mask=masked, init_std=0.05)
    model, ids = build(spec), tokens(2, 33)
    arguments = {"labels_BS": ids[:, 1:], "documents_BS": (torch.arange(32) // 10).expand(2, 32)}
    expected = model(ids[:, :-1], **arguments, loss_fn=CrossEntropy(8))
    expected.backward()
    half = build(spec).to("cuda", torch.bfloat16)
    half.init_buffers(torch.device("cuda"))
    loss = half(ids[:, :-1].cuda(), **{k: v.cuda() for k, v in arguments.items()}, loss_fn=CrossEntropy(8))
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) < 2e-3
    grads = dict(model.named_parameters())
    assert max(relative(p.grad.cpu().float(), grads[n].grad) for n, p in half.named_parameters()) < 0.1
