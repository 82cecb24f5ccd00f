from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.cases import BASE, MIXTURES, build, relative, tokens
from titanyaml.config.decoder_shape import DecoderShape
from titanyaml.config.schema import Model, MoE
from titanyaml.distributed import compat
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder
from titanyaml.models.grouped import grouped_linear
from titanyaml.models.moe import Experts, Router

SPEC = MoE(num_experts=6, top_k=2, ffn_dim=24, normalize=True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def router(dim: int = 8, **changes: Any) -> Router:
    made = Router(replace(SPEC, **changes), dim).double()
    made.init_buffers(torch.device("cpu"), dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(draw(*made.weight.shape, seed=7))
    return made


def test_router_in_groups_with_bias_is_deepseeks() -> None:
    """Against transformers' DeepSeek-V3: sigmoid, bias for the choice alone, groups, normalised and scaled weights."""
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=8,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    mine = router(num_experts=12, top_k=3, num_groups=4, top_groups=2, score="sigmoid", scale=2.5, bias_rate=0.1)
    mine.float().init_buffers(torch.device("cpu"))
    peer = DeepseekV3TopkRouter(config)
    x = draw(2, 50, 8).float()
    with torch.no_grad():
        mine.bias_E.copy_(0.2 * draw(12, seed=3))
        peer.weight.copy_(mine.weight)
        peer.e_score_correction_bias.copy_(mine.bias_E)
        ids, weights, counts = mine(x)
        _, wanted_weights, wanted_ids = peer(x)
    order, wanted_order = ids.flatten(0, 1).argsort(-1), wanted_ids.argsort(-1)
    assert torch.equal(ids.flatten(0, 1).gather(1, order), wanted_ids.gather(1, wanted_order))
    torch.testing.assert_close(weights.flatten(0, 1).gather(1, order), wanted_weights.gather(1, wanted_order))
    assert torch.equal(counts, ids.flatten().bincount(minlength=12))


@pytest.mark.parametrize("weight_at", ["output", "input"])
def test_no_token_is_dropped_though_all_choose_the_same(weight_at: str) -> None:
    spec = replace(SPEC, weight_at=weight_at)
    experts = Experts(spec, 8, ffn_dim=5).double()
    with torch.no_grad():
        for i, matrix in enumerate(experts.parameters()):
            matrix.copy_(draw(*matrix.shape, seed=i))
    x, weights = draw(2, 7, 8).requires_grad_(), draw(2, 7, 2, seed=9).requires_grad_()
    ids = torch.tensor([4, 1]).expand(2, 7, 2)
    got = experts(x, ids, weights, ids.flatten().bincount(minlength=6)).view_as(x)

    def one(e: int, x: Tensor) -> Tensor:
        return (F.silu(x @ experts.w1[e].T) * (x @ experts.w3[e].T)) @ experts.w2[e].T

    parts = [
        (one(e, w * x) if weight_at == "input" else w * one(e, x))
        for e, w in ((4, weights[..., :1]), (1, weights[..., 1:]))
    ]
    leaves = (x, weights, *experts.parameters())
    torch.testing.assert_close(got, sum(parts), rtol=1e-12, atol=1e-12)
    actual, expected = (torch.autograd.grad((t * draw(2, 7, 8, seed=5)).sum(), leaves) for t in (got, sum(parts)))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert (actual[2][0] == 0).all(), "an expert without tokens has a gradient of zeros"


def test_balance_loss_is_that_of_each_sequence_and_comes_with_its_gradient() -> None:
    made, x = router(balance_loss=0.1, score="sigmoid"), draw(3, 10, 8)
    made.gain.fill_(0.25)
    _, weights, _ = made(x)
    (weights * 0).sum().backward()
    got, made.weight.grad = made.weight.grad, None
    assert made.load_E.grad.sum() == 60
    # by the definition
    scores = (x @ made.weight.T).sigmoid()
    share = scores / scores.sum(-1, keepdim=True)
    chosen = F.one_hot(scores.topk(2, -1).indices, 6).sum(2).double()
    losses = (chosen.mean(1) * 6 / 2 * share.mean(1)).sum(-1)
    assert made.balance.grad.item() == pytest.approx(10 * losses.sum().item(), rel=1e-12)
    (0.25 * 10 * losses.sum()).backward()
    torch.testing.assert_close(got, made.weight.grad, rtol=1e-10, atol=1e-14)


def test_an_even_load_has_balance_loss_one() -> None:
    made = router(balance_loss=1.0)
    with torch.no_grad():
        made.weight.zero_()
    _, weights, _ = made(draw(1, 9, 8))
    weights.sum().backward()
    assert made.balance.grad.item() == pytest.approx(9.0)


def test_descending_the_balance_loss_evens_out_a_skewed_router() -> None:
    made, x = router(balance_loss=1.0, score="sigmoid"), draw(4, 50, 8) + 1.0
    made.gain.fill_(1 / 200)
    busiest = []
    for _ in range(60):
        _, weights, counts = made(x)
        (weights * 0).sum().backward()
        busiest.append((counts.max() / counts.double().mean()).item())
        with torch.no_grad():
            made.weight -= 5 * made.weight.grad
        made.weight.grad = made.load_E.grad = made.balance.grad = None
    assert busiest[0] > 1.7 and busiest[-1] < 1.3, (busiest[0], busiest[-1])


def test_products_of_groups_equal_torchs_grouped_product() -> None:
    counts = torch.tensor([3, 0, 8, 5])
    x, weight = (draw(*shape, seed=i).bfloat16().requires_grad_() for i, shape in enumerate(((16, 32), (4, 24, 32))))
    ours = grouped_linear(x, weight, counts)
    theirs = compat.grouped_mm(x, weight.transpose(1, 2), counts.cumsum(0).to(torch.int32))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    probe = draw(16, 24, seed=4).bfloat16()
    for a, b in zip(*(torch.autograd.grad(t, (x, weight), probe) for t in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_a_mixture_compiles_as_one_graph() -> None:
    spec = replace(MIXTURES["llama4"], moe=replace(MIXTURES["llama4"].moe, balance_loss=0.1))
    model, ids = build(spec), tokens(2, 25)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        for module in model.modules():
            if isinstance(module, Router):
                module.gain.fill_(0.5)
                module.load_E.grad = module.balance.grad = None
        model.zero_grad()
        loss = model(ids[:, :-1], labels_BS=ids[:, 1:], loss_fn=CrossEntropy(8))
        loss.backward()
        told = {
            f"{n}.{b}": getattr(m, b).grad
            for n, m in model.named_modules()
            if isinstance(m, Router)
            for b in ("load_E", "balance")
        }
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()} | told

    loss, expected = step()
    torch._dynamo.reset()
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    compiled, grads = step()
    torch.testing.assert_close(compiled, loss)
    assert max(relative(grads[name], grad) for name, grad in expected.items()) < 1e-5


def test_each_expert_starts_from_a_stream_of_its_own() -> None:
    """The first experts are the same however many there are."""
    few, many = (build(replace(BASE, init_std=0.02, moe=replace(SPEC, num_experts=n, ffn_dim=96))) for n in (4, 7))
    for name in ("w1", "w2", "w3"):
        first, more = (getattr(model.layers[1].feed_forward.experts, name) for model in (few, many))
        assert torch.equal(first, more[:4]) and not torch.equal(first[0], first[1])
        std = 0.02 / 2 if name == "w2" else 0.02  # sqrt(2 * layers)
        assert first.std().item() == pytest.approx(std, rel=5 / first.numel() ** 0.5)
    assert few.layers[0].feed_forward.router.weight.std().item() == pytest.approx(0.02, rel=0.3)


def test_which_blocks_are_mixtures_and_what_a_token_meets() -> None:
    spec = MIXTURES["qwen3_moe"]
    model = decoder.build(spec)
    assert [kind.mixture for kind in DecoderShape.of(spec).blocks] == [False, True, False, True]
    assert [bool(layout.experts) for layout in model.facts.layouts] == [False, True, False, True]
    idle = 2 * (6 - 3) * 3 * 48 * 24
    assert model.facts.num_params - model.facts.num_active_params == idle
    untied = model.facts.num_active_params - model.facts.num_embedding_params
    assert model.facts.flops_per_token(32) == 6 * untied + 12 * 4 * 6 * 16 * 32


def test_a_dense_models_facts_count_everything_as_active() -> None:
    facts = decoder.build(BASE).facts
    assert facts.num_active_params == facts.num_params and facts.num_experts == 0


@torch.no_grad()
def test_chunks_and_documents_together() -> None:
    """A rotary block sees neither another chunk nor another document."""
    spec: Model = replace(MIXTURES["llama4"], document_mask=True, num_layers=1, nope_every=0, attention_temperature=0.0)
    model, ids = build(spec), tokens(1, 40)
    documents = (torch.arange(40) >= 24).long().unsqueeze(0)
    whole = model(ids, documents_BS=documents)
    for first, last in ((0, 16), (16, 24), (24, 32), (32, 40)):
        part = model(ids[:, first:last], documents_BS=torch.zeros(1, last - first, dtype=torch.int64))
        torch.testing.assert_close(whole[:, first:last], part, rtol=1e-4, atol=1e-5)
