"""Conversions between the tensor layouts of our decoder and of Hugging Face checkpoints.

Most tensors are the same numbers under another name. Experts are stacked here; Mixtral and Qwen3-MoE store each by
itself, Llama 4 stores gate and up as one tensor, and its rotary embedding rotates neighbouring channels where ours
rotates channels half a head apart. Shapes: E experts, D model width, F inner width, H head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class TensorMapping:
    """Tensors of ours, the same values as tensors of a Hugging Face checkpoint, and how each are made of the other.

    Args:
        ours, hf: names.
        export: our tensors, in the order of ``ours``, to those of ``hf``; by default they are the same objects.
        load: the reverse.
    """

    ours: tuple[str, ...]
    hf: tuple[str, ...]
    export: Convert = tuple
    load: Convert = tuple


def same(ours: str, hf: str) -> TensorMapping:
    """One tensor under two names."""
    return TensorMapping((ours,), (hf,))


def stacked_experts(ours: str, hf: str, *, num_experts: int) -> TensorMapping:
    """[E, ...] here, E tensors there; ``hf`` has a ``{}`` for the expert's number."""
    names = tuple(hf.format(i) for i in range(num_experts))
    return TensorMapping((ours,), names, lambda t: t[0].unbind(), lambda t: (torch.stack(tuple(t)),))


def fused_gate_up(gate: str, up: str, hf: str) -> TensorMapping:
    """Gate and up [E, F, D] each here, [E, D, 2F] there."""
    return TensorMapping(
        (gate, up),
        (hf,),
        lambda t: (torch.cat(tuple(t), dim=1).transpose(1, 2).contiguous(),),
        lambda t: tuple(half.contiguous() for half in t[0].transpose(1, 2).chunk(2, dim=1)),
    )


def transposed(ours: str, hf: str) -> TensorMapping:
    """[E, D, F] here, [E, F, D] there."""

    def transpose(tensors: Sequence[Tensor]) -> tuple[Tensor]:
        return (tensors[0].transpose(1, 2).contiguous(),)

    return TensorMapping((ours,), (hf,), transpose, transpose)


def interleaved_rotary(ours: str, hf: str, *, head_dim: int) -> TensorMapping:
    """Output features of a head: channels i and i + H/2 rotate together here, 2i and 2i + 1 there."""

    def permute(weight: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor]:
        return (torch.unflatten(weight, 0, sizes).transpose(1, 2).flatten(0, 2),)

    half = head_dim // 2
    return TensorMapping((ours,), (hf,), lambda t: permute(t[0], (-1, 2, half)), lambda t: permute(t[0], (-1, half, 2)))
