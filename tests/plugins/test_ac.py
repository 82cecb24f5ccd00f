"""Activation checkpointing changes memory and work, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from tests.plugins.small import AC, COMPILE, LAYERS, CountOperators, batch, build, context, loss, spec, step
from titanyaml.errors import PipelineError
from titanyaml.pipeline.resolve import resolve, verify
from titanyaml.plugins.ac import selective_contexts

MODES = ("full", "selective_op", "selective_layer")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def ac(mode, **arguments):
    return {"ac": {**AC, "mode": mode, **arguments}}


def backward_operators(nodes):
    """What runs in the backward pass of one step."""
    model = build(nodes).model
    value = loss(model, *batch(2))
    with CountOperators() as operators:
        value.backward()
    return operators.counts


def saved_bytes(nodes):
    """Storage that one forward keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    model = build(nodes).model
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(model, *batch(2))
    del value
    return sum(sizes.values()) - sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("document_mask", [False, True])
def test_loss_and_gradients_are_bit_equal(mode, document_mask):
    tokens_BS, labels_BS = batch(2)
    documents_BS = torch.arange(tokens_BS.shape[1]).div(5, rounding_mode="floor").expand_as(tokens_BS)
    results = []
    for nodes in ({}, ac(mode)):
        model = build(nodes, model_spec=spec(document_mask=document_mask, qk_norm=document_mask)).model
        value = loss_of_documents(model, tokens_BS, labels_BS, documents_BS)
        value.backward()
        results.append((value, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (plain, plain_grads), (value, grads) = results
    assert torch.equal(value, plain)
    assert grads.keys() == plain_grads.keys()
    assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)


def loss_of_documents(model, tokens_BS, labels_BS, documents_BS):
    return model(
        tokens_BS,
        labels_BS=labels_BS,
        documents_BS=documents_BS,
        loss_fn=lambda h_BSD, w_VD, y_BS: F.cross_entropy(F.linear(h_BSD, w_VD).flatten(0, 1), y_BS.flatten()),
    )


@pytest.mark.parametrize(
    ("mode", "products", "attention"),
    [
        # a block repeats q, k, v, o, gate, up (down's output is not needed); selective_op has kept k, o and up
        ("full", 6 * LAYERS, LAYERS),
        ("selective_op", 3 * LAYERS, 0),
        ("selective_layer", 6 * LAYERS // 2, LAYERS // 2),
    ],
)
def test_the_backward_pass_really_recomputes(mode, products, attention):
    plain, counts = backward_operators({}), backward_operators(ac(mode))
    assert plain[ATTENTION] == 0 and plain["mm"] == 2 * 7 * LAYERS
    assert counts["mm"] - plain["mm"] == products
    assert counts[ATTENTION] == attention


@pytest.mark.parametrize(
    ("share", "products"),
    [
        # four blocks: none, none and half in turn, half and all in turn, all
        (0.0, 6 * LAYERS),
        (0.25, (6 + 3) * LAYERS // 2),
        (0.75, 3 * LAYERS // 2),
        (1.0, 0),
    ],
)
def test_a_share_of_the_products_is_kept(share, products):
    nodes = ac("selective_op", keep_products=share)
    plain, counts = backward_operators({}), backward_operators(nodes)
    assert counts["mm"] - plain["mm"] == products
    assert counts[ATTENTION] == 0, "attention is never repeated"
    (value, grads), (expected, expected_grads) = step(build(nodes).model), step(build({}).model)
    assert torch.equal(value, expected)
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


def test_the_change_says_how_many_blocks_keep_what():
    assert "keep fused attention and every second matrix product and" in build(ac("selective_op")).changes["ac"].summary
    assert (
        "every second matrix product (in 3) or every matrix product (in 1) and recompute the rest"
        in build(ac("selective_op", keep_products=0.6)).changes["ac"].summary
    )


def test_attention_with_a_document_mask_is_kept_too():
    model = build(ac("selective_op"), model_spec=spec(document_mask=True)).model
    tokens_BS, labels_BS = batch(2)
    value = loss_of_documents(model, tokens_BS, labels_BS, torch.zeros_like(tokens_BS))
    with CountOperators() as operators:
        value.backward()
    assert operators.counts[f"{ATTENTION}_backward"] == LAYERS
    assert operators.counts[ATTENTION] == 0


def test_float8_products_are_counted_like_the_others():
    scale = torch.ones((), dtype=torch.float32)

    def forward(x):
        for _ in range(4):
            a = x.detach().to(torch.float8_e4m3fn)
            x = x * torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16).sin()
        return x

    value = checkpoint(
        forward, torch.ones(16, 16, requires_grad=True), use_reentrant=False, context_fn=selective_contexts
    )
    with CountOperators() as operators:
        value.sum().backward()
    assert operators.counts["_scaled_mm"] == 2, "the 2nd and the 4th are kept"


def test_flex_attention_is_kept(monkeypatch):
    # torch refuses its backward pass on a CPU, though the eager one is right
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *args: None)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)

    def products(**options):
        x = torch.ones(1, 1, 16, 8, requires_grad=True)
        attend = lambda x: flex_attention(x, x * 2, x * 3, block_mask=mask)  # noqa: E731
        value = checkpoint(attend, x, use_reentrant=False, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            value.sum().backward()
        return sum(event.count for event in profile.key_averages() if event.key in ("aten::bmm", "aten::mm"))

    assert products() - products(context_fn=selective_contexts) == 2, "queries by keys, weights by values"


def test_full_keeps_a_fraction_of_the_activations():
    assert saved_bytes(ac("full")) < saved_bytes(ac("selective_layer")) < saved_bytes({})
    assert saved_bytes(ac("full")) < 0.35 * saved_bytes({})


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_are_repeated(mode):
    def with_dropout(nodes):
        model = build(nodes).model
        for block in model.layers:
            block.feed_forward.register_forward_hook(lambda module, args, out: F.dropout(out, 0.5))
        torch.manual_seed(7)
        return step(model)

    plain, plain_grads = with_dropout({})
    value, grads = with_dropout(ac(mode))
    assert torch.equal(value, plain)
    assert all(torch.equal(grads[name], plain_grads[name]) for name in grads)


def test_names_stay_and_a_copy_is_independent():
    built = build(ac("full"))
    assert list(built.model.state_dict()) == list(build({}).model.state_dict())
    clone = copy.deepcopy(built.model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    tokens_BS, _ = batch(2)
    assert clone(tokens_BS).abs().max() == 0
    assert built.model(tokens_BS).abs().max() > 0


def test_selective_layer_takes_every_kth_block_and_lists_the_others():
    change = build(ac("selective_layer", every=3)).changes["ac"]
    assert change.modules == ["layers.0", "layers.3"]
    assert change.skipped == dict.fromkeys(["layers.1", "layers.2"], "selective_layer takes one block in 3")
    assert change.summary.startswith("selective_layer: 2 of 4 blocks")


def test_none_is_off_and_bad_arguments_are_problems():
    assert build(ac("none")).resolved.off == {"ac": "ac.mode is none"}
    with pytest.raises(PipelineError) as error:
        resolve(ac("ful", every=0, budget=1.0, keep_products=1.1), context(spec()))
    assert [problem.key for problem in error.value.problems] == ["ac.mode", "ac.every", "ac.budget", "ac.keep_products"]
    with pytest.raises(PipelineError, match="nothing is compiled"):
        resolve(ac("memory_budget"), context(spec()))


def test_verify_sees_the_recomputation():
    built = build(ac("selective_layer"))
    step(built.model)
    [(_, change)] = verify(built.model, built.resolved, built.ctx)
    assert change.modules == ["layers.0", "layers.2"]


def test_verify_notices_a_block_that_no_longer_recomputes():
    built = build(ac("full"))
    block: nn.Module = built.model.layers[1]
    del block.forward  # as a later plugin would that puts its own function there
    step(built.model)
    with pytest.raises(PipelineError, match=r"not recomputed in the first step: layers\.1"):
        verify(built.model, built.resolved, built.ctx)


def test_verify_says_that_compiled_blocks_are_not_counted():
    built = build({**ac("full"), "compile": COMPILE})
    step(built.model)
    change = dict(verify(built.model, built.resolved, built.ctx))["ac"]
    assert change.modules == [] and len(change.skipped) == LAYERS
