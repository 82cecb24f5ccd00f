"""Clocks and counters: a start by its parts, and the throughput, utilisation and memory of a metrics record."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from titanyaml import hardware, machine
from titanyaml.config.schema import Config
from titanyaml.distributed.env import Env
from titanyaml.pipeline.protocol import Context

#: Parts of a start, in their order. ``other``: optimizer, checkpoint, comparison of replicas, trackers.
PARTS = ("import", "ceilings", "data", "build", "materialise", "other", "first_step")


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


class StartupClock:
    """A stopwatch with laps: each ``lap`` books the time since the previous one under a part of the start.

    ``import`` is the age of the process when this object is made: interpreter, libraries, joining the process group.
    ``first_step`` includes compilation.
    """

    def __init__(self) -> None:
        self.parts = {"import": machine.process_age_s()}
        self._last_lap = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last lap under ``part``, one of PARTS; a part may have several laps."""
        assert part in PARTS, part
        lap_end = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + lap_end - self._last_lap
        self._last_lap = lap_end

    def record(self) -> dict[str, float]:
        """Seconds by part, and ``total``."""
        return {"total": sum(self.parts.values()), **{name: self.parts[name] for name in PARTS if name in self.parts}}

    def sentence(self) -> str:
        """One line for the log."""
        (_, total), *parts = self.record().items()
        listed = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in parts)
        return f"first step done after {total:.1f} s: {listed}"
