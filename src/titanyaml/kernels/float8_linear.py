"""A linear layer whose GEMMs are in float8, on the cast that makes both copies of an operand at once.

Forward y = x w^T, input gradient dx = dy w, weight gradient dw = dy^T x. Each operand is scaled along the rows that its
GEMM does not sum over (rowwise), or by one number (tensorwise). The cast of an input in the forward pass makes the
transposed copy for the backward pass as well: 8-bit activations are kept, and nothing is cast twice. Layers with the
same input share the cast (``cast_operand``).

On a CPU the GEMMs are emulated: the same float8 numbers, multiplied in float32.

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
from titanyaml.kernels.float8_cast import Float8Copies, compute_amax, float8_cast, transpose_float8
from titanyaml.kernels.float8_gather import GatheredWeight, gathered_parts

#: ``rowwise_with_gw_hp``: rowwise, with the weight gradient in the dtype of the input.
Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
E4M3 = torch.float8_e4m3fn
_Copy = Tensor | None  # of Float8Copies


@dataclass(frozen=True)
class Float8Options:
    """How a layer casts and multiplies."""

    recipe: Recipe  # granularity of the scales; rowwise ones are powers of two, so that scaling itself never rounds
    fast_accum: bool  # the gradient GEMMs add in the tensor core's short accumulator; the forward always does
    grad_dtype: torch.dtype = E4M3  # or float8_e5m2, with more range and one bit less precision
    fused: bool = False  # cast by the Triton kernels (``float8_cast``)
    # The backward pass reads the weight and casts it again; else its transposed float8 copy is kept from the forward
    # pass, one byte a weight. A weight gathered in float8 is transposed in the backward pass.
    recast_weight: bool = True

    @property
    def rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    @property
    def weight_gradient_in_float8(self) -> bool:
        return self.recipe != "rowwise_with_gw_hp"

    def compute_amax(self, x: Tensor, *, by_producer: bool = False) -> Tensor:
        return compute_amax(x, rowwise=self.rowwise, fused=self.fused, by_producer=by_producer)

    def cast(self, x: Tensor, amax: Tensor, dtype: torch.dtype = E4M3, **copies: bool) -> Float8Copies:
        return float8_cast(x, amax, dtype=dtype, power_of_2=self.rowwise, fused=self.fused, **copies)

    @torch.no_grad()
    def cast_for_recipe(self, x: Tensor, dtype: torch.dtype, *, by_producer: bool) -> Float8Copies:
        """The copies of an input, or of an output's gradient, that the recipe multiplies."""
        x = x.contiguous()
        if self.weight_gradient_in_float8:
            return self.cast(x, self.compute_amax(x, by_producer=by_producer), dtype)
        # a single copy, which a compiler computes in one kernel: ours gains nothing
        amax = x.abs().amax(-1).float().flatten()
        return float8_cast(x, amax, dtype=dtype, power_of_2=True, fused=False, transposed=False)


class AmaxSources(NamedTuple):
    """Whether the amax of an input, and of the output's gradient, is begun by the kernel that produces them."""

    # That is almost free in a kernel over whole rows: a norm's, SwiGLU's, or one of their backward. All else, weights
    # as well, is read once more (float8_partial_amax_kernel): a compiler's own pass is slower, and its RoPE becomes
    # slower as a reduction over rows. A wrong guess costs time, not numbers: both give the same bits.
    #
    # Microseconds on H200, Llama 3 3B, 16,384 tokens, our pass taken at the speed of a copy. Producer + our pass,
    # against both in one: SwiGLU 182 + 67 against 212, backward 310 + 67 against 365; norm 73 + 25 against 93, backward
    # 178 + 25 against 196; backward of RoPE 74 + 25 against 126. Our pass against a compiler's: attention's output 25
    # against 63, dv 8 against 30, the weights of a block 50 against 170.

    input: bool
    gradient: bool

    @classmethod
    def of(cls, *, outputs: int, inputs: int, is_shared: bool) -> AmaxSources:
        """Guessed by the layer's sides, and by whether other layers share its input, as for q, k, v and gate, up."""
        # The wide side of a feed-forward layer is SwiGLU's. The output of o goes to a norm; that of down to the next
        # block, whose gradient comes from another graph.
        if is_shared:
            return cls(input=True, gradient=outputs > inputs)
        return cls(input=inputs > outputs, gradient=inputs <= outputs)


class Float8Operand(NamedTuple):
    """An input [..., K] and its float8 copies, for every layer that takes it."""

    x: Tensor
    copies: Float8Copies


def cast_operand(x: Tensor, options: Float8Options) -> Float8Operand:
    """Cast a norm's output for several ``float8_linear``. Its gradient flows through their outputs."""
    return Float8Operand(x, options.cast_for_recipe(x, E4M3, by_producer=True))


def gather_operand(x_BSK: Tensor, options: Float8Options, group: TensorGroup) -> Float8Operand:
    """The float8 copies of a sequence of which each rank holds a shard [B, S/size, K]: cast, then gathered; tensorwise.
    1 byte a number travels instead of 2. The gradients of the full sequence are summands.
    """
    # all ranks scale by the amax of the full sequence: the copies are, to the bit, those of the gathered sequence
    assert not options.rowwise, "a scale per row and another per column: the gathered bytes would serve one of them"
    full_BSK, data_MK, data_KM, inverse = _GatherCopies.apply(x_BSK, options, group.name, group.size)
    # a clone, since Dynamo takes no tensor twice
    return Float8Operand(full_BSK, Float8Copies(data_MK, inverse, data_KM, inverse.clone()))


class _GatherCopies(torch.autograd.Function):
    """Shards to the copies of the full sequence, and a tensor of its shape, without memory, that carries gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_BSK: Tensor, options: Float8Options, name: str, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.group = name, size
        x_BSK = x_BSK.contiguous()
        amax = compat.all_reduce(options.compute_amax(x_BSK), "max", name)
        shard = options.cast(x_BSK, amax, transposed=False)
        assert shard.data_MK is not None and shard.inverse_M1 is not None
        # bytes: gloo gathers no float8
        bytes_BSK = gather_shards(shard.data_MK.view(torch.uint8).view(x_BSK.shape), name, size)
        bytes_MK = bytes_BSK.flatten(0, -2)
        copies = bytes_MK.view(E4M3), bytes_MK.t().contiguous().view(E4M3), shard.inverse_M1
        ctx.mark_non_differentiable(*copies)
        return x_BSK.new_zeros(()).expand(bytes_BSK.shape), *copies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSK: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return reduce_scatter_shards(grad_BSK, *ctx.group), None, None, None


def float8_linear(x: Tensor | Float8Operand, w_NK: Tensor, options: Float8Options) -> Tensor:
    """x w^T in x's dtype, with gradients. x: [..., K], bfloat16 (on a CPU also float32).
    w_NK: of the same dtype, or gathered in float8 (tensorwise) for it; no DTensor. On a GPU, K, N and the tokens divide
    by 16.
    """
    outputs, inputs = w_NK.shape
    sources = AmaxSources.of(outputs=outputs, inputs=inputs, is_shared=isinstance(x, Float8Operand))
    if not isinstance(x, Float8Operand):
        x = Float8Operand(x, options.cast_for_recipe(x, E4M3, by_producer=sources.input))
    tensor, copies = x
    assert tensor.dtype == w_NK.dtype and tensor.shape[-1] == inputs, (tensor.dtype, w_NK.dtype, tensor.shape)
    return _Float8Linear.apply(tensor, w_NK, *copies, options, sources.gradient)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_NK: Tensor, data_MK: Tensor, inverse_M1: Tensor, data_KM: _Copy, inverse_K1: _Copy,
        options: Float8Options, gradient_amax_by_producer: bool,
    ) -> Tensor:  # fmt: skip
        ctx.options, ctx.amax_by_producer = options, gradient_amax_by_producer
        ctx.is_gathered = isinstance(w_NK, GatheredWeight)
        if ctx.is_gathered:
            assert not options.rowwise, "the gathered bytes have one scale"
            saved_weight: tuple[_Copy, _Copy] = gathered_parts(w_NK)
            w = Float8Copies(*saved_weight, None, None)
        else:
            w_NK = w_NK.contiguous()
            w_amax = options.compute_amax(w_NK)
            w = options.cast(w_NK, w_amax, transposed=not options.recast_weight)
            saved_weight = (w_NK, w_amax) if options.recast_weight else w[2:]
        ctx.save_for_backward(*((data_KM, inverse_K1) if options.weight_gradient_in_float8 else (x,)), *saved_weight)
        y_MN = _multiply(data_MK, inverse_M1, w.data_MK, w.inverse_M1, fast_accum=True, dtype=x.dtype)
        return y_MN.view(*x.shape[:-1], w_NK.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        options: Float8Options = ctx.options
        *x, w, w_scale = ctx.saved_tensors
        style: dict[str, Any] = {"fast_accum": options.fast_accum, "dtype": grad_y.dtype}
        grad = options.cast_for_recipe(grad_y, options.grad_dtype, by_producer=ctx.amax_by_producer)
        grad_x = grad_w = None
        if ctx.needs_input_grad[1]:
            if options.weight_gradient_in_float8:
                grad_w = _multiply(grad.data_KM, grad.inverse_K1, *x, **style)
            else:
                grad_w = grad_y.flatten(0, -2).t() @ x[0].flatten(0, -2)
        if ctx.needs_input_grad[0]:
            if ctx.is_gathered:
                assert grad.inverse_M1 is not None
                w = transpose_float8(w, after=grad.inverse_M1, fused=options.fused)
            elif options.recast_weight:
                _, _, w, w_scale = options.cast(w, w_scale, row_major=False)
            grad_x = _multiply(grad.data_MK, grad.inverse_M1, w, w_scale, **style).view(*grad_y.shape[:-1], -1)
        return grad_x, grad_w, *(None,) * 6


def _multiply(
    a_MK: _Copy, inverse_a: _Copy, b_NK: _Copy, inverse_b: _Copy, *, fast_accum: bool, dtype: torch.dtype
) -> Tensor:
    """a b^T in ``dtype``, both operands float8 and contiguous along the summed dimension."""
    assert a_MK is not None and inverse_a is not None and b_NK is not None and inverse_b is not None
    if a_MK.is_cuda:
        return compat.scaled_mm(a_MK, b_NK.t(), inverse_a, inverse_b.t(), fast_accum=fast_accum, dtype=dtype)
    return ((a_MK.float() @ b_NK.float().t()) * inverse_a * inverse_b.t()).to(dtype)
