"""One rank of a job, by itself on one device: what a rank of any mesh computes and holds, without the other GPUs.

    python benchmarks/one_rank.py 64 runner=bench model=llama3_70b parallel=fsdp8_tp8 ...

The first argument is the number of ranks, the others are titanyaml's. The rank is number 0. Every transfer is a copy
inside the device, as if all ranks held what this one holds: shapes, kernels and memory are those of the job, losses are
not, and what the network would take is missing, so that no speed of this is one of the job. With tp, ids must be such
that rank 0 has their embeddings (``tokenizer=bytes`` and text). A pipeline's rank cannot be alone, since its neighbours
hold other layers.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

from titanyaml.distributed import compat, replica_checks

BACKEND = "alone"


class Alone(dist.ProcessGroup):
    """Collectives of a rank whose peers hold the same tensors; sums over ranks are means, which stay in range."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._named

    def _set_group_name(self, name: str) -> None:
        self._named = name

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return _done(tensors)

    def barrier(self, opts: Any) -> dist.Work:
        return _done([])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        for shards, own in zip(outputs, inputs, strict=True):
            for shard in shards:
                shard.copy_(own)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any) -> dist.Work:
        output.view(self.size(), -1).copy_(own.reshape(1, -1).expand(self.size(), -1))
        return _done(output)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own, opts)
        return _done(outputs)

    all_gather_single = _allgather_base  # the name since torch 2.13

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        for output, shards in zip(outputs, inputs, strict=True):
            output.copy_(shards[self.rank()])
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, full: Tensor, opts: Any) -> dist.Work:
        output.view(-1).copy_(full.reshape(self.size(), -1)[self.rank()])
        return _done(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        for output, full in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, full, opts)
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, source: Tensor, out_sizes: list[int], sizes: list[int], opts: Any
    ) -> dist.Work:
        received, sent = output.view(-1), source.reshape(-1)
        length = min(len(received), len(sent))  # other ranks may send more or less than this one does
        received[:length].copy_(sent[:length])
        received[length:].zero_()
        return _done(output)

    all_to_all_single = alltoall_base

    def send(self, *_: Any) -> dist.Work:
        sys.exit("one_rank.py: a pipeline's rank waits for others; parallel.pp is 1 here")

    recv = send


def _done(result: Any) -> dist.Work:
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def stand_alone(ranks: int) -> None:
    """Make this process rank 0 of so many, for titanyaml and all that it imports."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    dist.Backend.register_backend(
        BACKEND, lambda store, rank, size, timeout: Alone(rank, size), devices=["cpu", "cuda"]
    )
    join, new_group = dist.init_process_group, dist.new_group
    dist.init_process_group = lambda *_, **options: join(BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
    dist.new_group = lambda *ranks, **options: new_group(*ranks, **options | {"backend": BACKEND})
    dist.monitored_barrier = lambda *_, **options: None
    compat.set_group_timeout = lambda group, seconds: None
    # there are no other ranks whose replicas and random numbers could be asked for
    replica_checks.check_replicas_match = replica_checks.check_random_streams = lambda *_: None


def parse(typed: list[str]) -> tuple[int, list[str]]:
    """(ranks, titanyaml's arguments) of a command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", type=int, help="of the job")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="titanyaml's, with runner=bench")
    options = parser.parse_args(typed)
    if options.ranks < 1:
        parser.error(f"{options.ranks} ranks")
    if "runner=bench" not in options.overrides:
        parser.error("runner=bench is missing: what a lone rank trains, and would save, is nothing")
    return options.ranks, options.overrides


if __name__ == "__main__":
    ranks, sys.argv[1:] = parse(sys.argv[1:])
    stand_alone(ranks)
    from titanyaml import cli  # whose import puts a check into Hydra: not for those who import this file

    cli.main()
