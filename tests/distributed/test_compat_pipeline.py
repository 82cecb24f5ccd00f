"""Backwards in two parts, as torch's pipeline stages run them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from titanyaml.distributed import compat
from titanyaml.distributed.compat_pipeline import PatchedStage


class Product(torch.autograd.Function):
    """x w^T; torch's own product has a node of another kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(torch.sin(x), self.weight)


class Saved:
    """What a node keeps for its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_the_graph_lives_until_the_backward_by_weight() -> None:
    """Though only Python's object of the uppermost node is left of it, which is empty by itself in torch 2.11."""
    blocks = nn.Sequential(Block(), Block())
    with compat.fake_process_group(2):
        stage = PatchedStage(blocks, stage_index=1, num_stages=2, device=torch.device("cpu"))
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def save(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    x, grad_y = torch.ones(2, 3, dtype=torch.float64, requires_grad=True), torch.ones(2, 3, dtype=torch.float64)
    expected = torch.autograd.grad(blocks(x), (x, *blocks.parameters()), grad_y)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved.tensor):
        y = blocks(x)
    forward = {"stage_output": (y,), "output_grads": (grad_y,), "input_values": [x]}
    (grad_x,), groups = stage.backward_maybe_with_nosync("input", forward)
    assert len(alive) > 0
    stage.backward_maybe_with_nosync("weight", {"stage_output": (y,), "param_groups": groups})
    assert [gradient.tolist() for gradient in (grad_x, *(weight.grad for weight in blocks.parameters()))] == [
        gradient.tolist() for gradient in expected
    ]
    del groups
    assert len(alive) == 0, "the graph is still held"
