from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.models.cases import SPECS, relative, tokens
from tests.ranks import run_ranks
from titanyaml.errors import TitanError
from titanyaml.kernels.master_weights import full_precision
from titanyaml.loss import CrossEntropy
from titanyaml.models import decoder
from titanyaml.models.decoder import Decoder
from titanyaml.models.init import materialise

CPU = torch.device("cpu")
SEED = 3


def fresh(name: str, *, seed: int = SEED, dtype: torch.dtype = torch.float32) -> tuple[Decoder, dict[str, Tensor]]:
    model = decoder.build(SPECS[name]).to(dtype)
    return model, materialise(model, device=CPU, seed=seed, param_dtype=torch.float32)


def shard(model: Decoder, mesh, **options) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def on_fsdp(rank: int, name: str) -> dict:
    """Weights, masters of a bf16 copy, and a step's loss and gradients on 2 ranks; each rank has one sequence."""
    mesh = init_device_mesh("cpu", (2,))
    model = decoder.build(SPECS[name])
    shard(model, mesh)
    materialise(model, device=CPU, seed=SEED, param_dtype=torch.float32)
    weights = {n: full(p).clone() for n, p in model.named_parameters()}
    half = decoder.build(SPECS[name]).to(torch.bfloat16)
    shard(half, mesh)
    masters = materialise(half, device=CPU, seed=SEED, param_dtype=torch.float32)
    bf16 = {n: full(p).clone() for n, p in half.named_parameters()}
    remainders = materialise(half, device=CPU, seed=SEED, param_dtype=torch.float32, split=True)
    sizes = {n: (m.to_local().untyped_storage().nbytes(), 4 * m.to_local().numel()) for n, m in masters.items()}
    ids = tokens(2, 17)[rank : rank + 1]
    loss = model(ids[:, :-1], labels_BS=ids[:, 1:], loss_fn=CrossEntropy(5))
    loss.backward()
    return {
        "weights": weights,
        "masters": {n: full(m) for n, m in masters.items()},
        "joined": {n: full(full_precision(p.detach(), remainders[n])) for n, p in half.named_parameters()},
        "bf16": bf16,
        "sizes": sizes,
        "loss": loss.detach(),
        # FSDP averages over its two ranks what the loss sums
        "grads": {n: 2 * full(p.grad) for n, p in model.named_parameters()},
        "rope": model.rope_cos_TP,
    }


def on_fsdp_and_tp(rank: int, name: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = decoder.build(SPECS[name])
    plan = {
        f"feed_forward.{w}": style
        for w, style in (("w1", ColwiseParallel()), ("w2", RowwiseParallel()), ("w3", ColwiseParallel()))
    }
    for block in model.layers:
        parallelize_module(block, mesh["tp"], plan)
    shard(model, mesh["dp"])
    materialise(model, device=CPU, seed=SEED, param_dtype=torch.float32)
    return {n: full(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama_bias", "qwen3_tied"])
def test_weights_are_bit_equal_under_fsdp_and_so_is_the_model(name: str) -> None:
    single, _ = fresh(name)
    half, masters = fresh(name, dtype=torch.bfloat16)
    ids = tokens(2, 17)
    loss = single(ids[:, :-1], labels_BS=ids[:, 1:], loss_fn=CrossEntropy(5))
    loss.backward()
    ranks = run_ranks(on_fsdp, 2, name)
    for got in ranks:
        for n, parameter in single.named_parameters():
            assert torch.equal(got["weights"][n], parameter), n
            assert torch.equal(got["masters"][n], masters[n]) and torch.equal(masters[n], parameter), n
            assert torch.equal(got["joined"][n], parameter), n
            assert relative(got["grads"][n], parameter.grad) < 1e-5, n
        for n, parameter in half.named_parameters():
            assert torch.equal(got["bf16"][n], parameter) and parameter.dtype == torch.bfloat16
        assert torch.equal(got["rope"], single.rope_cos_TP)
        # a master holds its shard, not the whole tensor that the shard was cut from
        assert all(held <= needed for held, needed in got["sizes"].values())
    torch.testing.assert_close(ranks[0]["loss"] + ranks[1]["loss"], loss.detach())


def test_weights_are_bit_equal_under_fsdp_with_tp() -> None:
    single, _ = fresh("llama3_1")
    for got in run_ranks(on_fsdp_and_tp, 4, "llama3_1"):
        for n, parameter in single.named_parameters():
            assert torch.equal(got[n], parameter), n


def cast_inputs(rank: int) -> str:
    model = decoder.build(SPECS["llama3_1"])
    shard(model, init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    materialise(model, device=CPU, seed=SEED, param_dtype=torch.float32)
    with pytest.raises(AssertionError) as caught:
        model(tokens(1, 8))
    return str(caught.value)


def test_a_mixed_precision_policy_that_would_narrow_the_rotary_tables_is_refused() -> None:
    assert all("RoPE tables were cast" in message for message in run_ranks(cast_inputs, 2))


def test_statistics() -> None:
    spec = replace(SPECS["qwen3"], dim=256, ffn_dim=512, num_layers=8, init_std=0.02, attention_bias=True)
    model = decoder.build(spec)
    materialise(model, device=CPU, seed=0, param_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
        else:
            std = 0.02 / 4 if name.endswith(("wo.weight", "w2.weight")) else 0.02
            error = 1 / math.sqrt(parameter.numel())
            assert abs(parameter.std().item() / std - 1) < 5 * error, name
            assert abs(parameter.mean().item() / std) < 5 * error, name


def test_values_depend_on_seed_and_name_and_not_on_precision() -> None:
    one, _ = fresh("llama3_1")
    same, _ = fresh("llama3_1")
    other, _ = fresh("llama3_1", seed=SEED + 1)
    wide = decoder.build(SPECS["llama3_1"]).to(torch.float64)
    assert materialise(wide, device=CPU, seed=SEED, param_dtype=torch.float64) == {}
    pairs = zip(one.parameters(), same.parameters(), other.parameters(), wide.parameters(), strict=True)
    for a, b, c, d in pairs:
        assert torch.equal(a, b) and torch.equal(a.double(), d)
        assert a.ndim == 1 or not torch.equal(a, c)
    first, second = one.layers[0].feed_forward, one.layers[1].feed_forward
    assert not torch.equal(first.w1.weight, second.w1.weight) and not torch.equal(first.w1.weight, first.w3.weight)


def test_masters_exist_only_where_storage_is_narrower() -> None:
    model, masters = fresh("llama3_1")
    assert masters == {}
    half, masters = fresh("llama3_1", dtype=torch.bfloat16)
    assert masters.keys() == dict(half.named_parameters()).keys()
    assert half.rope_cos_TP.dtype == torch.float32, "a model stored in bf16 keeps its rotary tables"
    for name, parameter in half.named_parameters():
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name].bfloat16(), parameter)


def test_what_nobody_fills_is_refused_by_name() -> None:
    model = decoder.build(SPECS["llama3_1"])
    model.layers[1].register_buffer("scale", torch.empty(3, device="meta"), persistent=False)
    model.layers[0].attention.gate = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(TitanError, match=r"layers\.0\.attention\.gate, layers\.1\.scale"):
        materialise(model, device=CPU, seed=0, param_dtype=torch.float32)


def test_a_plugins_module_fills_its_own_buffers() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.empty(3, device="meta"))

        def init_buffers(self, device: torch.device, *, dtype: torch.dtype) -> None:
            self.scale = torch.ones(3, device=device, dtype=dtype)

    model = decoder.build(SPECS["llama3_1"])
    model.layers[0].extra = Scale()
    materialise(model, device=CPU, seed=0, param_dtype=torch.float32)
    assert model.layers[0].extra.scale.tolist() == [1, 1, 1]


def test_parameters_tied_on_meta_stay_tied() -> None:
    model = decoder.build(SPECS["llama3_1"])
    model.layers[1].feed_forward.w1.weight = model.layers[0].feed_forward.w1.weight
    materialise(model, device=CPU, seed=0, param_dtype=torch.float32)
    assert model.layers[1].feed_forward.w1.weight is model.layers[0].feed_forward.w1.weight
