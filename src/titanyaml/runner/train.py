"""The training loop, to be read in one sitting."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from typing import Any

import torch

from titanyaml import tracker
from titanyaml.config.schema import Config
from titanyaml.distributed import comm, rng, signals
from titanyaml.distributed.env import Env, set_timeout
from titanyaml.errors import NonFiniteError, Preempted
from titanyaml.optim.schedule import lr_at
from titanyaml.pipeline import resolve as pipeline
from titanyaml.planner.search.choose_ac import AcChoice
from titanyaml.rundir import RunDir
from titanyaml.runner import auto_ac, run_report, setup
from titanyaml.runner.evaluate import mean_loss
from titanyaml.runner.meter import StartupClock
from titanyaml.runner.train_step import StepResult, valid_tokens

log = logging.getLogger("titanyaml")


def train(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Train ``config`` in ``run``, from its newest checkpoint or from step 0.

    Returns ``metric`` (validation loss where there is one, else the loss), ``loss``, ``validation_loss`` and ``step``.
    Raises NonFiniteError, DataError, CheckpointError and Preempted (``titanyaml.errors``).
    """
    trainer = build_trainer(config, run, env)
    try:
        return trainer.fit()
    except NonFiniteError as error:
        run.event("non_finite", str(error), rank=env.rank, step=trainer.step)
        raise
    finally:
        trainer.close()


def build_trainer(config: Config, run: RunDir, env: Env, *, clock: StartupClock | None = None) -> Trainer:
    """Resolve ``ac=auto``, build every part of the run and log what is about to be trained."""
    clock = clock or StartupClock()  # a benchmark's began before, with its ceilings
    resolved_config, ac_choice = auto_ac.resolve(config, env)
    auto_ac.announce(ac_choice, run, env)
    parts = setup.build_all(resolved_config, run, env, requested_config=config, clock=clock)
    trackers = None
    if env.is_main:
        run_report.start(resolved_config, run, env, parts)
        trackers = tracker.build(resolved_config, run)
    clock.lap("other")
    return Trainer(resolved_config, run, env, parts, clock=clock, trackers=trackers, ac_choice=ac_choice)


class Trainer:
    """One training run; ``fit`` is the loop. ``config`` has a concrete ``ac.mode``; the main rank has ``trackers``."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        env: Env,
        parts: setup.Parts,
        *,
        clock: StartupClock,
        trackers: tracker.Trackers | None,
        ac_choice: AcChoice | None,  # None where a mode was typed
    ) -> None:
        self.config, self.run, self.env = config, run, env
        self.clock, self.trackers, self.ac_choice = clock, trackers, ac_choice
        self.built, self.optimizer, self.train_step = parts.built, parts.optimizer, parts.train_step
        self.checkpointer, self.validation_data = parts.checkpointer, parts.validation_data
        self.batches, self.data_state = parts.batches, parts.batches.state()
        self.meter, self.profiler = parts.meter, parts.profiler
        self.step = parts.last_step  # the last one that is done
        self.data_rank = parts.built.data_rank
        context = parts.built.context
        self.counts_batch = context.dims.counts_batch(context.mesh)
        self.last_record: dict[str, Any] = {}
        self.plan_compared = False

    def fit(self) -> dict[str, Any]:
        """Train to ``train.steps``; validate, log and save on the way."""
        gc.collect()
        # Python collects garbage when it likes, and one rank's pause is everybody's: here all collect at the same step
        gc.disable()
        first_step = self.step + 1
        while self.step < self.config.train.steps:
            self.one_step()
            if self.step == first_step:
                self.after_first_step()
            self.profiler.step(self.step)
            if self.step % self.config.train.gc_every == 0:
                gc.collect()
        if not self.last_record and self.validation_data is not None:
            # the run was killed between its last checkpoint and its end: the step's record is there already
            self.last_record = {"validation_loss": self._validate()}
        self._save()
        reported = ("loss", "validation_loss", "tps")
        figures = {name: self.last_record[name] for name in reported if name in self.last_record}
        metric = figures.get("validation_loss", figures.get("loss"))
        result = {"metric": metric, "step": self.step, **figures}
        self.close_trackers("done")
        if self.env.is_main:
            run_report.finish(self.run, result, saved=self.config.checkpoint.enabled)
        return result

    def after_first_step(self) -> None:
        """Check what only the first step shows: that compilation and recomputation happened. Then short time-outs."""
        verified = pipeline.verify(self.built.model, self.built.resolved, self.built.context)
        self.clock.lap("first_step")
        if self.env.is_main:
            run_report.add_verified(self.run, verified)
            log.info("%s", self.clock.sentence())
            self.run.write_status(startup_s=self.clock.record())
        # the first step compiles, for minutes; from now on a rank that waits this long waits for a dead one
        set_timeout(self.config.launch.step_timeout_s)

    def one_step(self) -> None:
        """Fetch, train, and do whatever falls due at this step."""
        config = self.config
        with self.meter.waiting_for_data():
            batches = next(self.batches)
        # One reduction tells the global token count and whether any rank was asked to stop: all ranks must stop at the
        # same step, or the others would wait for this one in the next collective.
        local_tokens = valid_tokens(batches) if self.counts_batch else 0
        tokens, stop = comm.sum_scalars([local_tokens, signals.requested() is not None], self.env)
        if stop:
            self._preempt()
        step = self.step + 1
        # draws depend on (seed, step, data rank) alone, so that a checkpoint holds no generator
        torch.manual_seed(rng.seed_for(config.run.seed, "step", step, self.data_rank))
        lr = lr_at(config.schedule, step=step, steps=config.train.steps, lr=config.optim.lr)
        with self.meter.training():
            result = self.train_step(batches, tokens=int(tokens), lr=lr)
            pipeline.after_step(self.built.model, self.built.resolved)
        self.step = step
        # only now: ``_preempt`` above saves the state before the batch that it does not train
        self.data_state = self.batches.state()
        interval = config.validation.interval
        validates = step == config.train.steps or (interval and step % interval == 0)
        validation_loss = self._validate() if validates and self.validation_data is not None else None
        self._record_step(result, lr, validation_loss)
        if config.checkpoint.enabled and config.checkpoint.interval and step % config.checkpoint.interval == 0:
            self._save()

    def _validate(self) -> float:
        assert self.validation_data is not None
        return mean_loss(self.config, self.built, self.validation_data, env=self.env)

    def _record_step(self, result: StepResult, lr: float, validation_loss: float | None) -> None:
        """Log every ``train.log_every``-th step, validated steps and the last one."""
        step, config = self.step, self.config
        self.last_record = {"loss": result.loss}  # what ``fit`` returns if no record is due
        if validation_loss is None and step % config.train.log_every and step != config.train.steps:
            return
        record = {"step": step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
        record |= result.routing | self.meter.read(step)
        if validation_loss is not None:
            record["validation_loss"] = validation_loss
        self.last_record = record
        if self.trackers is not None:
            self.trackers.log(record)
        # once: the plan is of the configuration, and does not change with the step
        if self.env.is_main and step >= run_report.COMPARED_STEP and not self.plan_compared:
            self.plan_compared = True
            if comparison := run_report.compare_with_plan(config, self.env, record):
                self.run.write_status(plan=comparison)

    def _save(self) -> None:
        """Commit a checkpoint of this step, unless it is there already or saving is off."""
        if not self.config.checkpoint.enabled or self.checkpointer.is_saved(self.step):
            return
        data, mesh = self.data_state, asdict(self.built.context.dims)
        meta = {"position": data["position"], "data": data, "seed": self.config.run.seed, "mesh": mesh}
        self.checkpointer.save(self.step, setup.checkpoint_state(self.built.model, self.optimizer), meta)
        if self.env.is_main:
            self.run.write_status(step=self.step)

    def _preempt(self) -> None:
        self._save()
        self.close_trackers("preempted")
        outcome = "saved" if self.config.checkpoint.enabled else "nothing saved, since checkpoint=none"
        raise Preempted(f"asked to stop ({signals.requested() or 'by another rank'}) after step {self.step}; {outcome}")

    def close_trackers(self, state: str) -> None:
        """Tell the trackers how the run ended; the first call counts."""
        if self.trackers is not None:
            self.trackers.close(state)
            self.trackers = None

    def close(self) -> None:
        """Stop threads; safe to call after a failure anywhere."""
        self.profiler.close()
        self.close_trackers("failed")
        self.batches.close()
        gc.enable()
