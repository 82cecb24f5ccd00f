"""Clocks and counters behind a metrics record: throughput, utilisation, memory, time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from titanyaml import hardware
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.pipeline.protocol import Context


class Meter:
    """Adds up the steps of one logging interval. Validation and checkpoints lie outside its clocks.

    ``tps`` is tokens per second *per device*; ``tflops = tps * flops_per_token / 1e12`` with the formula of
    ``ModelFacts.flops_per_token``; ``mfu`` is left out where the device's peak is unknown.
    """

    def __init__(self, config: Config, ctx: Context, env: Env, *, global_batch: int) -> None:
        self.env = env
        self.tokens_per_step = global_batch * config.train.seq_len
        self.flops_per_token = ctx.facts.flops_per_token(config.train.seq_len)
        self.peak_tflops = hardware.peak_tflops(config.hardware, env.device)
        self._reset()

    def _reset(self) -> None:
        self._steps, self._train_s, self._wait_s = 0, 0.0, 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time until the next batch is there."""
        begin = time.perf_counter()
        yield
        self._wait_s += time.perf_counter() - begin

    @contextmanager
    def training(self) -> Iterator[None]:
        """Time of one step, until the device has finished it."""
        begin = time.perf_counter()
        yield
        # the update runs on after the step has read its loss: without this its time would count as waiting for data
        hardware.synchronize(self.env.device)
        self._train_s += time.perf_counter() - begin
        self._steps += 1

    def read(self, step: int) -> dict[str, float | int]:
        """The figures of the interval, by step; starts the next interval."""
        seconds = (self._train_s + self._wait_s) / self._steps
        tps = self.tokens_per_step / seconds / self.env.world_size
        tflops = tps * self.flops_per_token / 1e12
        record: dict[str, float | int] = {"tokens": step * self.tokens_per_step, "tps": tps, "tflops": tflops}
        if self.peak_tflops is not None:
            record["mfu"] = tflops / self.peak_tflops
        memory = hardware.memory_stats(self.env.device)
        record |= {f"mem_{name}": value for name, value in memory.items() if value is not None}
        record |= {"data_wait_s": self._wait_s / self._steps, "step_s": seconds}
        self._reset()
        return record
