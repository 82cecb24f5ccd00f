"""Transfers of tp ranks with the products next to them, apart and fused, at the shapes of published blocks.

    torchrun --nproc-per-node=2 benchmarks/async_tp_ops.py out.json [--debug]

Every rank times every place; the slowest rank's milliseconds count (``distributed.async_tp_times``). Before the
products of float8 layers also: gathered in bfloat16 and cast, and cast and gathered in float8 (one scale).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titanyaml.distributed import async_tp_times, compat, compat_async_tp
from titanyaml.distributed.env import Env, start, stop
from titanyaml.distributed.graph_matmuls import CollectivePlace, block_places
from titanyaml.distributed.tensor import TensorGroup, gather_sequence

#: (sequences, tokens of each, dim, width of queries, of keys, of the feed-forward): of the whole model.
BLOCKS = {
    "3B": (2, 4096, 3072, 3072, 1024, 8192),
    "8B": (1, 8192, 4096, 4096, 1024, 14336),
    "70B": (2, 8192, 8192, 8192, 1024, 28672),
}
DEBUG = {"debug": (2, 32, 64, 64, 32, 96)}


def main() -> None:
    """Time all blocks; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--debug", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    env = Env.from_environ("cpu" if options.debug else None)
    start(env, timeout_s=300)
    if env.device.type == "cpu":
        compat_async_tp.register_cpu_kernels()
    group = TensorGroup.of(init_device_mesh(env.device.type, (env.world_size,)))
    clock = _host if env.device.type == "cpu" else async_tp_times.event_clock
    blocks = {name: _block(sizes, group, env, clock) for name, sizes in (DEBUG if options.debug else BLOCKS).items()}
    if env.is_main:
        options.out.write_text(json.dumps({"ranks": env.world_size, "blocks": blocks}, indent=1) + "\n")
    stop(env)


def _block(sizes: tuple[int, ...], group: TensorGroup, env: Env, clock: async_tp_times.Clock) -> list[dict[str, Any]]:
    batch, length, dim, query, key, ffn = sizes
    columns = [(query // group.size, key // group.size, key // group.size), (ffn // group.size,) * 2]
    collectives = [
        collective
        for float8 in (False, True)
        for collective in block_places(
            batch * length, dim, columns, [query // group.size, ffn // group.size], float8=float8
        )
    ]
    times = async_tp_times.measure(
        collectives, group, batch=batch, dtype=torch.bfloat16, device=env.device, cache=None, clock=clock
    )
    rows = [
        {"place": str(collective), "apart_ms": pair.apart, "fused_ms": pair.fused, "fuse": pair.wins}
        for collective, pair in times.items()
    ]
    if env.device.type == "cuda":
        for collective, row in zip(times, rows, strict=True):
            if collective.kind == "all_gather":
                slowest = torch.tensor(
                    [clock(call) for call in _float8(collective, group, batch, env)], dtype=torch.float64
                )
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                row |= dict(zip(("float8_cast_behind_ms", "float8_gathered_ms"), slowest.tolist(), strict=True))
    return rows


def _float8(
    collective: CollectivePlace, group: TensorGroup, batch: int, env: Env
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A gather in bfloat16 and a cast of the whole; a cast of the slice and a gather of its bytes; then products."""
    narrow, scale = torch.float8_e4m3fn, torch.ones((), device=env.device)
    x_BSK = torch.randn(batch, collective.tokens // batch // group.size, collective.inner, device=env.device).bfloat16()
    weights = [torch.randn(n, collective.inner, device=env.device).to(narrow).t() for n in collective.widths]

    def products(whole_BSK: torch.Tensor) -> list[torch.Tensor]:
        return [compat.scaled_mm(whole_BSK.flatten(0, 1), weight, scale, scale) for weight in weights]

    return (
        lambda: products(gather_sequence(x_BSK, group).to(narrow)),
        lambda: products(gather_sequence(x_BSK.to(narrow).view(torch.uint8), group).view(narrow)),
    )


def _host(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
