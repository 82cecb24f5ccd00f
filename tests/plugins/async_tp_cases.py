"""Nodes, clocks and fake ranks for tests of async tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.plugins import inductor_graphs
from tests.plugins.inductor_graphs import GRAPHS
from tests.plugins.parity import TP, VOCAB
from tests.plugins.small import COMPILE, Built, batch, build, loss, spec
from titanyaml.distributed import async_tp_times, compat
from titanyaml.distributed.graph_matmuls import CollectivePlace
from titanyaml.distributed.mesh import ParallelDims
from titanyaml.plugins.async_tp import AsyncTensorParallel

ASYNC = {"_target_": "titanyaml.plugins.async_tp.AsyncTensorParallel"}
GRAPH = {**COMPILE, "backend": inductor_graphs.BACKEND}
TP2, FSDP2_TP2 = ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)
BFLOAT16 = {"param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ROWS_NEED = "this torch (2.11) has no float8 products with a scale a row on a CPU"
NO_PRODUCT = "what is scattered is no matrix product of this graph, and no sum of such alone"


def scales_rows() -> bool:
    a, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        compat.scaled_mm(a, a.t(), scales, scales.t())
    except RuntimeError:
        return False
    return True


def compiles_float64() -> bool:
    """torch 2.11 takes the log-sum-exp of fused attention for float32."""
    with compat.fake_tensors():
        q = torch.ones(1, 1, 2, 8, dtype=torch.float64)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].dtype == q.dtype


@pytest.fixture(autouse=True)
def release_inductor() -> Iterator[None]:
    yield
    release()


def release() -> None:
    import torch._inductor.config as config

    config.post_grad_custom_pre_pass = None
    torch.compiler.reset()


def fused(forward: tuple[int, int], backward: tuple[int, int], unfused: str = "none") -> str:
    return (
        f"fused in the compiled graphs, forward + backward: {forward[0]} + {backward[0]} all-gathers, "
        f"{forward[1]} + {backward[1]} reduce-scatters; left as they are: {unfused}"
    )


def on_fake_ranks(
    nodes: dict[str, Any], *, sequences: int = 2, model: dict[str, Any] | None = None, hook: Any = None
) -> Built:
    """A forward and a backward on rank 0 of two that do not exist: its graphs are those of a real one.

    Args:
        hook: forward pre-hook of each feed-forward, which acts on what was gathered.
    """
    inductor_graphs.register()
    GRAPHS.clear()
    sizes = {"vocab_size": VOCAB, "num_layers": 2} | (model or {})
    built = build(
        {"tp": TP, "async_tp": ASYNC} | nodes, model_spec=spec(**sizes), dims=TP2, mesh=TP2.build("cpu"), **BFLOAT16
    )
    for layer in built.model.layers if hook else ():
        layer.feed_forward.register_forward_pre_hook(hook)
    tokens_BS, labels_BS = (part % VOCAB for part in batch(sequences))
    loss(built.model, tokens_BS, labels_BS).backward()
    return built


AUTO = {**ASYNC, "operators": ["auto"]}
SLOWER = "measured slower when fused"


def clocked(monkeypatch, wins: Callable[[CollectivePlace], bool]) -> list[CollectivePlace]:
    """A clock that says of each place, apart and fused, what ``wins`` wants; the places that it is asked about."""
    timed, calls = [], async_tp_times.calls

    def fake_calls(collective, group, **options):
        timed.append(collective)
        assert all(map(callable, calls(collective, group, **options)))
        return 1.0, 0.5 if wins(collective) else 0.99  # less than the margin

    monkeypatch.setattr(async_tp_times, "calls", fake_calls)
    monkeypatch.setattr(AsyncTensorParallel, "clock", staticmethod(lambda milliseconds: milliseconds))
    return timed
