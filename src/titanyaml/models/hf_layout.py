"""Where a tensor of ours stands in a Hugging Face checkpoint, and in which layout.

Most are the same numbers under another name. Experts are stacked here; Mixtral and Qwen3-MoE store each by itself,
Llama 4 stores gate and up as one tensor, and its rotary embedding turns neighbouring channels where ours turns
channels half a head apart. Shapes: E experts, D model width, F inner width, N heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Piece:
    """Tensors of ours that are made of tensors of theirs, and the other way round. Without functions: one is the other.

    Args:
        ours, theirs: names. export: ours, in this order, to theirs. load: theirs to ours.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    export: Convert = tuple
    load: Convert = tuple


def same(ours: str, theirs: str) -> Piece:
    """One tensor under two names."""
    return Piece((ours,), (theirs,))


def one_by_one(ours: str, theirs: str, *, num_experts: int) -> Piece:
    """Stacked here [E, ...], there E tensors; ``theirs`` has a ``{}`` for the expert's number."""
    names = tuple(theirs.format(i) for i in range(num_experts))
    return Piece((ours,), names, lambda t: t[0].unbind(), lambda t: (torch.stack(tuple(t)),))


def fused_gate_up(gate: str, up: str, theirs: str) -> Piece:
    """Gate and up here [E, F, D] each, there [E, D, 2F]."""
    return Piece(
        (gate, up),
        (theirs,),
        lambda t: (torch.cat(tuple(t), dim=1).transpose(1, 2).contiguous(),),
        lambda t: tuple(half.contiguous() for half in t[0].transpose(1, 2).chunk(2, dim=1)),
    )


def transposed(ours: str, theirs: str) -> Piece:
    """[E, D, F] here, [E, F, D] there."""
    turn = lambda t: (t[0].transpose(1, 2).contiguous(),)  # noqa: E731
    return Piece((ours,), (theirs,), turn, turn)


def neighbours(ours: str, theirs: str, *, head_dim: int) -> Piece:
    """Output features of a head: channels i and i + H/2 turn together here, 2i and 2i + 1 there."""

    def export(tensors: Sequence[Tensor]) -> tuple[Tensor]:
        return (tensors[0].unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2),)

    def load(tensors: Sequence[Tensor]) -> tuple[Tensor]:
        return (tensors[0].unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2),)

    return Piece((ours,), (theirs,), export, load)
