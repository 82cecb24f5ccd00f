from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models.cases import BASE
from titanyaml.errors import ConfigError
from titanyaml.models import decoder
from titanyaml.models.attention import Attention, KVCache, document_mask


def test_document_mask_is_block_causal() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, 1]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_groups_share_heads_in_order_with_and_without_a_mask(num_kv_heads: int) -> None:
    attention = Attention(replace(BASE, num_kv_heads=num_kv_heads))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 8, generator=generator)
    k, v = torch.randn(2, 2, num_kv_heads, 5, 8, generator=generator)
    group = 6 // num_kv_heads
    scores = torch.stack([q[:, h] @ k[:, h // group].mT / 8**0.5 for h in range(6)], 1)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    expected = torch.stack([weights[:, h] @ v[:, h // group] for h in range(6)], 1)
    torch.testing.assert_close(attention.attend(q, k, v, None), expected)
    torch.testing.assert_close(attention.attend(q, k, v, causal), expected)


def test_heads_that_do_not_divide_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="model.num_kv_heads: is 4, which does not divide model.num_heads=6"):
        decoder.build(replace(BASE, num_kv_heads=4))
    with pytest.raises(ConfigError, match="model.dim: is 48, which gives model.num_heads=5 heads a width of 9.6"):
        decoder.build(replace(BASE, num_heads=5, num_kv_heads=5))
    assert decoder.build(replace(BASE, num_heads=5, num_kv_heads=5, head_dim=16)).facts.head_dim == 16


def test_a_cache_attends_to_what_it_holds_and_refuses_more() -> None:
    cache = KVCache(4)
    cpu = torch.device("cpu")
    positions, mask = cache.advance(3, device=cpu)
    assert positions.tolist() == [0, 1, 2] and mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    positions, mask = cache.advance(1, device=cpu)
    assert positions.tolist() == [3] and mask.all()
    with pytest.raises(AssertionError, match="5 tokens in a cache of 4"):
        cache.advance(1, device=cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA only")
@pytest.mark.parametrize("rows", [None, [0, 1, 2, 120, 121, 255]])
def test_blocks_of_a_mask_allow_what_the_dense_mask_allows(rows: list[int] | None) -> None:
    torch.manual_seed(0)
    documents = (torch.rand(2, 256) < 0.05).long().cumsum(-1)
    rows_S = None if rows is None else torch.tensor(rows)
    dense = document_mask(documents, rows_S)
    blocks = document_mask(documents.cuda(), None if rows_S is None else rows_S.cuda())
    attention = Attention(replace(BASE, dim=256, num_heads=4, num_kv_heads=2, head_dim=64))
    q, k, v = (torch.randn(2, heads, length, 64) for heads, length in ((4, dense.shape[2]), (2, 256), (2, 256)))
    outs = []
    for device, mask in (("cpu", dense), ("cuda", blocks)):
        leaves = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        out = attention.attend(*leaves, mask)
        out.square().sum().backward()
        outs.append([t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    for actual, expected in zip(*outs, strict=True):
        assert (actual - expected).norm() < 2e-3 * expected.norm(), "TF32 products"
