"""The compiled update is AdamW's, one graph for parameters of all shapes and numbers of dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.optim.test_adamw import LRS, SPEC, Toy, batch, masters_of
from titanyaml.distributed import compat_compile
from titanyaml.kernels.master_weights import split_master
from titanyaml.optim import adamw_backends, build
from titanyaml.optim.adamw_backends import CompiledAdamW

#: backend, dtype of the model, of the masters, whether the gradient is read as autograd leaves it, graphs.
CASES = [
    ("aot_eager", torch.float64, None, False, 1),
    ("aot_eager", torch.bfloat16, torch.int16, False, 1),
    ("aot_eager", torch.bfloat16, torch.float32, False, 1),
    ("aot_eager", torch.bfloat16, torch.float32, True, 1),
]


@pytest.mark.parametrize(("backend", "dtype", "master", "one", "graphs"), CASES, ids=str)
def test_updates_as_eager(backend: str, dtype: torch.dtype, master: torch.dtype | None, one: bool, graphs: int) -> None:
    torch._dynamo.reset()
    models = [Toy(dtype), Toy(dtype)]
    optimizers = []
    for model, compiled in zip(models, (backend, ""), strict=True):
        named = dict(model.named_parameters())
        masters = {} if master is None else masters_of(model)
        if master == torch.int16:  # split: the remainder
            masters = {key: split_master(value, named[key]) for key, value in masters.items()}
        else:
            for key, value in masters.items():
                named[key].data.copy_(value)
        optimizers.append(
            build(SPEC, named, masters=masters, device="cpu", one_backward=one and bool(compiled), compiled=compiled)
        )
    ours, eager = optimizers
    assert isinstance(ours, CompiledAdamW) and ours.describe().startswith("compiled")
    clip = torch.tensor(0.7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for step, lr in enumerate(LRS):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch(step, dtype=dtype)).backward()
            optimizer.step(lr, clip=clip)
            optimizer.zero_grad()
    assert compat_compile.count_graphs_of(adamw_backends.update) == graphs
    for name in ours.names:
        compiled_state, eager_state = ours.state_tensors()[name], eager.state_tensors()[name]
        pairs: list[tuple[Tensor, Tensor]] = [(ours.master(name), eager.master(name))]
        pairs += [(compiled_state[kind], eager_state[kind]) for kind in compiled_state]
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, rtol=1e-12 if dtype == torch.float64 else 2e-4, atol=1e-6)
    for got, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, expected)
