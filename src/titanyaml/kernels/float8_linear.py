"""A linear layer whose matrix products are in float8, on the cast that makes both copies of an operand at once.

Forward y = x w^T, input gradient dx = dy w, weight gradient dw = dy^T x. Each operand is scaled along the rows that its
product does not sum over (rowwise), or by one number (tensorwise). The cast of an input in the forward pass makes the
transposed copy for the backward pass as well, so that 8-bit activations are kept and nothing is cast twice; layers with
the same input share it (``cast_operand``).

On a CPU the products are emulated: the same float8 numbers, multiplied in float32.

Shapes: M tokens, K input features, N output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanyaml.distributed import compat
from titanyaml.distributed.tensor import TensorGroup, gather_shards, reduce_scatter_shards
from titanyaml.kernels.float8_cast import Float8, float8_cast, largest
from titanyaml.kernels.float8_gather import GatheredWeight, gathered_parts
from titanyaml.kernels.float8_transpose import transpose_float8

#: ``rowwise_with_gw_hp``: rowwise, with the weight gradient in the dtype of the input.
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Float8Options:
    """How a layer casts and multiplies.

    Args:
        recipe: granularity of the scales. Rowwise ones are powers of two, so that scaling itself never rounds.
        fast_accum: the two gradient products add in the tensor core's short accumulator; the forward always does.
        grad_dtype: float8_e4m3fn, or float8_e5m2 with more range and one bit less precision.
        fused: cast by the Triton kernels (``float8_cast``).
        recast_weight: the backward pass reads the weight and casts it again; else its transposed float8 copy is kept
            from the forward pass, one byte a weight. One that is gathered in float8 is turned in the backward pass.
    """

    recipe: Recipe
    fast_accum: bool
    grad_dtype: torch.dtype = E4M3
    fused: bool = False
    recast_weight: bool = True

    @property
    def rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    @property
    def gradient_in_float8(self) -> bool:
        return self.recipe != "rowwise_with_gw_hp"

    def largest(self, x: Tensor, *, where_made: bool = False) -> Tensor:
        """As ``float8_cast.largest``."""
        return largest(x, rowwise=self.rowwise, fused=self.fused, where_made=where_made)

    def cast(self, x: Tensor, largest: Tensor, dtype: torch.dtype = E4M3, **copies: bool) -> Float8:
        """As ``float8_cast.float8_cast``."""
        return float8_cast(x, largest, dtype=dtype, power_of_2=self.rowwise, fused=self.fused, **copies)

    @torch.no_grad()
    def both(self, x: Tensor, dtype: torch.dtype, *, where_made: bool) -> Float8:
        """The copies of an input or of an output's gradient that the recipe multiplies.

        Args:
            where_made: who finds the largest number (``float8_cast.largest``).
        """
        x = x.contiguous()
        if self.gradient_in_float8:
            return self.cast(x, self.largest(x, where_made=where_made), dtype)
        # one copy, of which a compiler makes one kernel
        rows = x.abs().amax(-1).float().flatten()
        return float8_cast(x, rows, dtype=dtype, power_of_2=True, fused=False, turned=False)


class AmaxSources(NamedTuple):
    """Where the largest number of a whole input, and of the output's gradient, is found in the kernel that makes them.

    It is almost free there if that kernel is one over whole rows: a norm's, SwiGLU's, or one of their backward. All
    else, weights as well, is read once more (``float8_parts_kernel``): a compiler's own pass is slower, and so is its
    RoPE as a reduction over rows.

    Microseconds on H200, Llama 3 3B, 16,384 tokens, our pass taken at the speed of a copy. Alone + our pass, against
    together: SwiGLU 182 + 67 against 212, backward 310 + 67 against 365; norm 73 + 25 against 93, backward 178 + 25
    against 196; backward of RoPE 74 + 25 against 126. Our pass against a compiler's: attention's output 25 against 63,
    dv 8 against 30, the weights of a block 50 against 170.
    """

    input: bool
    gradient: bool

    @classmethod
    def of(cls, *, outputs: int, inputs: int, is_shared: bool) -> AmaxSources:
        """Told by the layer's sides, and by whether other layers share its input, that of q, k, v and gate, up.

        The wide side of a feed-forward layer is SwiGLU's. The output of o goes to a norm; that of down to the next
        block, whose gradient comes from another graph.
        """
        if is_shared:
            return cls(input=True, gradient=outputs > inputs)
        return cls(input=inputs > outputs, gradient=inputs <= outputs)


class Float8Operand(NamedTuple):
    """An input [..., K] and its float8 copies, for every layer that takes it."""

    x: Tensor
    copies: Float8


def cast_operand(x: Tensor, options: Float8Options) -> Float8Operand:
    """Cast an input of several ``float8_linear``, what a norm made. Its gradient flows through their outputs."""
    return Float8Operand(x, options.both(x, E4M3, where_made=True))


def gather_operand(x_BSK: Tensor, options: Float8Options, group: TensorGroup) -> Float8Operand:
    """The float8 copies of a sequence of which each rank holds a part [B, S/size, K]: cast, then gathered; tensorwise.

    The scale is that of the whole, so that the copies are, to the bit, those of the gathered sequence. 1 byte a number
    travels in place of 2. The gradients of the whole are summands.
    """
    assert not options.rowwise, "a scale per row and another per column: the gathered bytes would serve one of them"
    whole_BSK, data_MK, data_KM, inverse = _GatherCopies.apply(x_BSK, options, group.name, group.size)
    return Float8Operand(whole_BSK, Float8(data_MK, inverse, data_KM, inverse.clone()))  # no tensor twice: Dynamo


class _GatherCopies(torch.autograd.Function):
    """Parts to the copies of the whole, and a tensor of its shape, without memory, that its gradient flows through."""

    @staticmethod
    def forward(ctx: Any, x_BSK: Tensor, options: Float8Options, name: str, size: int) -> tuple[Tensor, ...]:
        ctx.group = name, size
        x_BSK = x_BSK.contiguous()
        largest = compat.all_reduce(options.largest(x_BSK), "max", name)
        part = options.cast(x_BSK, largest, turned=False)
        whole_BSK = gather_shards(part.data_MK.view(torch.uint8).view(x_BSK.shape), name, size)
        bytes_MK = whole_BSK.flatten(0, -2)
        copies = bytes_MK.view(E4M3), bytes_MK.t().contiguous().view(E4M3), part.inverse_M1
        ctx.mark_non_differentiable(*copies)
        return x_BSK.new_zeros(()).expand(whole_BSK.shape), *copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSK: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return reduce_scatter_shards(grad_BSK, *ctx.group), None, None, None


def float8_linear(x: Tensor | Float8Operand, w_NK: Tensor, options: Float8Options) -> Tensor:
    """x w^T in x's dtype, with gradients.

    Args:
        x: [..., K], bfloat16 (on a CPU float32 too). w_NK: same dtype, or gathered in float8 (tensorwise) for it. On a
            GPU, K, N and the tokens divide by 16.
    """
    is_shared, (n, k) = isinstance(x, Float8Operand), w_NK.shape
    where_made = AmaxSources.of(outputs=n, inputs=k, is_shared=is_shared)
    x, copies = x if is_shared else (x, options.both(x, E4M3, where_made=where_made.input))
    assert x.dtype == w_NK.dtype and x.shape[-1] == w_NK.shape[1], (x.dtype, w_NK.dtype, x.shape, w_NK.shape)
    return _Float8Linear.apply(x, w_NK, *copies, options, where_made.gradient)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_NK: Tensor,
        data_MK: Tensor,
        inverse_M1: Tensor,
        data_KM: Tensor | None,
        inverse_K1: Tensor | None,
        options: Float8Options,
        gradient_where_made: bool,
    ) -> Tensor:
        ctx.options, ctx.where_made = options, gradient_where_made
        ctx.is_gathered = isinstance(w_NK, GatheredWeight)
        if ctx.is_gathered:
            assert not options.rowwise, "the gathered bytes have one scale"
            kept = gathered_parts(w_NK)
            w = Float8(*kept, None, None)
        else:
            w_NK = w_NK.contiguous()
            w_largest = options.largest(w_NK)
            w = options.cast(w_NK, w_largest, turned=not options.recast_weight)
            kept = (w_NK, w_largest) if options.recast_weight else (w.data_KM, w.inverse_K1)
        ctx.save_for_backward(*((data_KM, inverse_K1) if options.gradient_in_float8 else (x,)), *kept)
        y_MN = _product(data_MK, inverse_M1, w.data_MK, w.inverse_M1, fast_accum=True, dtype=x.dtype)
        return y_MN.view(*x.shape[:-1], w_NK.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.options
        *x, w, w_scale = ctx.saved_tensors
        how = {"fast_accum": options.fast_accum, "dtype": grad_y.dtype}
        grad = options.both(grad_y, options.grad_dtype, where_made=ctx.where_made)
        grad_x = grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = (
                _product(grad.data_KM, grad.inverse_K1, *x, **how)
                if options.gradient_in_float8
                else grad_y.flatten(0, -2).t() @ x[0].flatten(0, -2)
            )
        if ctx.needs_input_grad[0]:
            if ctx.is_gathered:
                w = transpose_float8(w, after=grad.inverse_M1, fused=options.fused)
            elif options.recast_weight:
                _, _, w, w_scale = options.cast(w, w_scale, straight=False)
            grad_x = _product(grad.data_MK, grad.inverse_M1, w, w_scale, **how).view(*grad_y.shape[:-1], -1)
        return grad_x, grad_w, *(None,) * 6


def _product(
    a_MK: Tensor, inverse_a: Tensor, b_NK: Tensor, inverse_b: Tensor, *, fast_accum: bool, dtype: torch.dtype
) -> Tensor:
    """a b^T in ``dtype``, both operands float8 and contiguous along the summed dimension."""
    if a_MK.is_cuda:
        return compat.scaled_mm(a_MK, b_NK.t(), inverse_a, inverse_b.t(), fast_accum=fast_accum, dtype=dtype)
    return ((a_MK.float() @ b_NK.float().t()) * inverse_a * inverse_b.t()).to(dtype)
