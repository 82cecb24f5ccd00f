"""GEMMs of narrow (bfloat16) operands whose result is float32.

Shapes as in ``cross_entropy.py``. Callers reach these functions through the module, so that tests can replace them.
"""

import torch
from torch import Tensor


def project(hidden_CD: Tensor, weight_VD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Logits hidden_CD @ weight_VD^T in ``dtype``."""
    # Tensor cores accumulate in float32 anyway. With ``out_dtype`` they write that: the result is neither rounded to
    # bfloat16 nor cast in a second pass. A CPU has no such GEMM, so that operands or results are cast there.
    if hidden_CD.is_cuda and hidden_CD.dtype != dtype:
        return torch.mm(hidden_CD, weight_VD.t(), out_dtype=dtype)
    return (hidden_CD @ weight_VD.t()).to(dtype)


def outer(grad_CV: Tensor, hidden_CD: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Weight gradient grad_CV^T @ hidden_CD in ``dtype``."""
    if grad_CV.is_cuda and grad_CV.dtype != dtype:
        return torch.mm(grad_CV.t(), hidden_CD, out_dtype=dtype)
    return grad_CV.to(dtype).t() @ hidden_CD.to(dtype)


def add_outer(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """sum_VD += grad_CV^T @ hidden_CD in sum_VD's dtype."""
    if sum_VD.dtype == hidden_CD.dtype:
        sum_VD.addmm_(grad_CV.t(), hidden_CD)
    elif sum_VD.is_cuda:
        # ``out`` is the addend: the GEMM accumulates in place and no second [V, D] float32 tensor exists
        torch.addmm(sum_VD, grad_CV.t(), hidden_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD.addmm_(grad_CV.to(sum_VD.dtype).t(), hidden_CD.to(sum_VD.dtype))
