from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.references import cross_entropy_reference_
from titanyaml.kernels import cross_entropy
from titanyaml.kernels.cross_entropy import cross_entropy_
from titanyaml.loss import CrossEntropy

IGNORE = -100


def inputs(device: torch.device, dtype: torch.dtype, *, vocab: int, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, vocab, generator=generator) * scale).to(dtype)
    labels = torch.randint(vocab, (9,), generator=generator)
    labels[2], labels[3], labels[4] = IGNORE, 0, vocab - 1
    return logits.to(device), labels.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocab", "scale"), [(53, 1.0), (64, 30.0), (200, 5.0)])
def test_equals_its_reference(monkeypatch, device, dtype: torch.dtype, vocab: int, scale: float) -> None:
    """In blocks that do and do not divide the vocabulary, with sharp and flat distributions."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    ours, labels = inputs(device, dtype, vocab=vocab, scale=scale)
    expected_logits, read_only = ours.clone(), ours.clone()
    losses = cross_entropy_(ours, labels, ignore_index=IGNORE, gradient=True)
    expected = cross_entropy_reference_(expected_logits, labels, ignore_index=IGNORE, gradient=True)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-5)
    # an exponential that differs in its last bit may round to the next bfloat16
    torch.testing.assert_close(ours, expected_logits, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert losses[2] == 0 and not ours[2].any()
    before = read_only.clone()
    assert torch.equal(cross_entropy_(read_only, labels, ignore_index=IGNORE, gradient=False), losses)
    assert torch.equal(read_only, before)


def test_gradient_is_that_of_autograd_in_float64(device) -> None:
    logits, labels = inputs(device, torch.float32, vocab=53, scale=3.0)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none", ignore_index=IGNORE)
    expected.sum().backward()
    losses = cross_entropy_(logits, labels, ignore_index=IGNORE, gradient=True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), wide.grad, rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("label", [-1, 53])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(device, label: int) -> None:
    logits, labels = inputs(device, torch.float32, vocab=53, scale=1.0)
    labels[5] = label
    losses = cross_entropy_(logits, labels, ignore_index=IGNORE, gradient=False)
    assert losses.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(device, bad: float) -> None:
    logits, labels = inputs(device, torch.float32, vocab=53, scale=1.0)
    logits[6, 40] = bad
    losses = cross_entropy_(logits, labels, ignore_index=IGNORE, gradient=False)
    assert losses.isfinite().logical_not().nonzero().flatten().tolist() == [6]


def head(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [40, 32], weight [200, 32] whose logits have a spread of 6, and labels."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(40, 32, generator=generator), torch.randn(200, 32, generator=generator)
    labels = torch.randint(200, (40,), generator=generator)
    labels[:5] = labels[-1] = IGNORE
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), labels.to(device)


@pytest.mark.parametrize("chunk_tokens", [7, 40, 1000])
def test_loss_and_gradients_against_float64(device, chunk_tokens: int) -> None:
    """bfloat16: off by what rounding the logits allows, and no more; float32: equal."""
    for dtype, loss_bound, grad_bound in ((torch.bfloat16, None, 8e-3), (torch.float32, 1e-4, 1e-5)):
        hidden, weight, labels = head(device, dtype)
        loss = CrossEntropy(chunk_tokens, IGNORE, fused=True)(hidden, weight, labels)
        (loss * 0.5).backward()
        wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        logits = wide[0] @ wide[1].t()
        expected = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)
        (expected * 0.5).backward()
        valid = int((labels != IGNORE).sum())
        bound = loss_bound or 2**-8 * float(logits.detach().abs().amax()) * valid
        error = abs(loss.item() - expected.item())
        assert loss.dtype == torch.float32 and error < bound
        assert error < 1e-3 * expected.item()  # roundings of either sign cancel
        for ours, exact in zip((hidden, weight), wide, strict=True):
            assert (ours.grad.double() - exact.grad).norm() < grad_bound * exact.grad.norm()


def test_evaluation_and_one_sided_gradients(device) -> None:
    hidden, weight, labels = head(device, torch.float32)
    fused, plain = CrossEntropy(16, IGNORE, fused=True), CrossEntropy(16, IGNORE)
    with torch.no_grad():
        torch.testing.assert_close(fused(hidden, weight, labels), plain(hidden, weight, labels))
    for operand, constant in ((hidden, weight.detach()), (weight, hidden.detach())):
        arguments = (operand, constant) if operand is hidden else (constant, operand)
        grads = [torch.autograd.grad(loss(*arguments, labels), operand)[0] for loss in (fused, plain)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_operator_contract_and_compile(device) -> None:
    hidden, weight, labels = (t.detach() for t in head(device, torch.bfloat16))
    arguments = (hidden, weight, labels, 16, IGNORE, True, True, "", 0, 1, True)
    torch.library.opcheck(
        torch.ops.titanyaml.chunked_cross_entropy.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    loss_fn = CrossEntropy(16, IGNORE, fused=True)
    compiled = torch.compile(lambda *a: loss_fn(*a) / 3, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden, weight, labels), loss_fn(hidden, weight, labels) / 3)
