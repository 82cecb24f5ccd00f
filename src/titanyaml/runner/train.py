"""The training loop, to be read in one sitting."""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict
from itertools import chain
from typing import Any

import torch

from titanyaml import optim, tracker
from titanyaml.config.schema import Config
from titanyaml.data.loader import Batches
from titanyaml.distributed import comm, replica_checks, rng, signals
from titanyaml.distributed.env import Env, set_timeout
from titanyaml.errors import NonFiniteError, Preempted
from titanyaml.kernels.square_sum import square_sum
from titanyaml.models.moe import expert_biases
from titanyaml.optim.schedule import lr_at
from titanyaml.pipeline import resolve as pipeline
from titanyaml.rundir import RunDir
from titanyaml.runner import auto_ac, plan_vs_measured, run_report, setup
from titanyaml.runner.evaluate import mean_loss
from titanyaml.runner.meter import Meter
from titanyaml.runner.profiler import Profiler
from titanyaml.runner.routing import Routing
from titanyaml.runner.startup_clock import Startup
from titanyaml.runner.train_step import TrainStep, valid_tokens

log = logging.getLogger("titanyaml")


def train(config: Config, run: RunDir, env: Env) -> dict[str, Any]:
    """Train ``config`` in ``run``, from its newest checkpoint or from step 0.

    Returns:
        ``metric`` (validation loss where there is one, else the last loss), ``loss``, ``validation_loss``, ``step``.

    Raises:
        NonFiniteError, DataError, CheckpointError, Preempted: see ``titanyaml.errors``.
    """
    trainer = Trainer(config, run, env)
    try:
        return trainer.fit()
    except NonFiniteError as error:
        run.event("non_finite", str(error), rank=env.rank, step=trainer.step)
        raise
    finally:
        trainer.close()


class Trainer:
    """Everything one run holds; ``fit`` is the loop."""

    def __init__(self, config: Config, run: RunDir, env: Env, *, startup: Startup | None = None) -> None:
        """``startup``: clock of what was done before; None: nothing was."""
        self.startup = startup or Startup()
        self.run, self.env = run, env
        self.last: dict[str, Any] = {}
        self.told = False  # whether plan and measurement were compared
        asked = config  # what checkpoints and records are known by
        config, self.recompute = auto_ac.settle(config, env)
        auto_ac.tell(self.recompute, run, env)
        self.config = config
        setup.set_determinism(config)
        tokenizer = setup.build_tokenizer(config, env)
        train_data = setup.build_data(config, env, tokenizer, split="train")
        self.validation_data = (
            setup.build_data(config, env, tokenizer, split="validation") if config.validation.batches else None
        )
        self.startup.lap("data")
        self.built = setup.build_model(config, env, lap=self.startup.lap)
        dims = self.built.context.dims
        self.data_rank = dims.data_rank(self.built.context.mesh)
        self.counts_batch = dims.counts_batch(self.built.context.mesh)
        self.global_batch = setup.global_batch(config, dims)
        self.optimizer = optim.build(
            config.optim,
            dict(self.built.model.named_parameters()),
            masters=self.built.masters,
            device=setup.storage(config, env),
            elsewhere=getattr(self.built.model, "elsewhere", None),
            fused=setup.fused_optimizer(config, self.built.context),
            one_backward=self.built.context.accumulation == 1 and dims.pp == 1,
            compiled=config.compile.backend if config.compile.optimizer else "",
        )
        moe = config.model.moe
        routing = moe.num_experts and Routing(
            self.built.model, moe, self.built.context.facts, mesh=self.built.context.mesh, env=env
        )
        self.train_step = TrainStep(
            self.built.model,
            self.optimizer,
            loss_fn=setup.loss_function(config, self.built.context),
            max_norm=config.train.max_norm,
            documents=config.model.document_mask,
            env=env,
            adds_loss=dims.adds_loss(self.built.context.mesh),
            routing=routing or None,
            square_sum=square_sum if setup.fused_optimizer(config, self.built.context) else None,
        )
        self.checkpointer = setup.checkpointer(asked, run, env)
        self.step, data_state = self._restore()
        self._check_ranks()
        self.batches = Batches(
            train_data,
            seed=config.run.seed,
            global_batch=self.global_batch,
            local_batch=config.train.local_batch,
            data_rank=self.data_rank,
            data_degree=dims.data_degree,
            prefetch=config.data.prefetch,
            shuffle=config.data.shuffle,
            state=data_state,
        )
        self.data_state = self.batches.state()
        self.meter = Meter(config, self.built.context, env, global_batch=self.global_batch)
        self.profiler = Profiler(config.profile, run, env)
        self.trackers: tracker.Trackers | None = None
        if env.is_main:
            run_report.start(
                config,
                run,
                env,
                self.built,
                train_data,
                global_batch=self.global_batch,
                first_step=self.step + 1,
                kernels=setup.kernels(config, self.built.context, self.optimizer),
            )
            self.trackers = tracker.build(config, run)
        self.startup.lap("other")

    def fit(self) -> dict[str, Any]:
        """Train to ``train.steps``; validate, log and save on the way."""
        gc.collect()
        gc.disable()  # collections at the same step on all ranks: one rank's pause is everybody's
        first = self.step + 1
        while self.step < self.config.train.steps:
            self.one_step()
            if self.step == first:
                self.after_first_step()
            self.profiler.step(self.step)
            if self.step % self.config.train.gc_every == 0:
                gc.collect()
        if not self.last and self.validation_data is not None:
            # the run was killed between its last checkpoint and its end: the step's record is there already
            self.last = {"validation_loss": self._validate()}
        self._save()
        metric = self.last.get("validation_loss", self.last.get("loss"))
        result = {
            "metric": metric,
            "step": self.step,
            **{k: self.last[k] for k in ("loss", "validation_loss", "tps") if k in self.last},
        }
        self.close_trackers("done")
        if self.env.is_main:
            run_report.finish(self.run, result, saved=self.config.checkpoint.enabled)
        return result

    def after_first_step(self) -> None:
        """What can be known only now: whether compilation and recomputation really happened; then short time-outs."""
        verified = pipeline.verify(self.built.model, self.built.resolved, self.built.context)
        self.startup.lap("first_step")
        if self.env.is_main:
            run_report.verified(self.run, verified)
            log.info("%s", self.startup.sentence())
            self.run.write_status(startup_s=self.startup.record())
        set_timeout(self.config.launch.step_timeout_s)

    def one_step(self) -> None:
        """Fetch, train, and whatever falls due at this step."""
        config = self.config
        with self.meter.waiting_for_data():
            batches = next(self.batches)
        # one reduction tells the global token count and whether any rank was asked to stop
        mine = valid_tokens(batches) if self.counts_batch else 0
        tokens, stop = comm.sum_scalars([mine, signals.requested() is not None], self.env)
        if stop:
            self._preempt()
        step = self.step + 1
        torch.manual_seed(rng.seed_for(config.run.seed, "step", step, self.data_rank))
        lr = lr_at(config.schedule, step=step, steps=config.train.steps, lr=config.optim.lr)
        with self.meter.training():
            result = self.train_step(batches, tokens=int(tokens), lr=lr)
            pipeline.after_step(self.built.model, self.built.resolved)
        self.step = step
        self.data_state = self.batches.state()
        due = step == config.train.steps or (config.validation.interval and step % config.validation.interval == 0)
        validation_loss = self._validate() if due and self.validation_data is not None else None
        self._log(result, lr, validation_loss)
        if config.checkpoint.enabled and config.checkpoint.interval and step % config.checkpoint.interval == 0:
            self._save()

    def _validate(self) -> float:
        return mean_loss(self.config, self.built, self.validation_data, env=self.env)

    def _log(self, result: Any, lr: float, validation_loss: float | None) -> None:
        """One record per logged step; the last step and validated steps are always logged."""
        step, config = self.step, self.config
        self.last = {"loss": result.loss}
        if validation_loss is None and step % config.train.log_every and step != config.train.steps:
            return
        record = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            **result.routing,
            **self.meter.read(step),
        }
        if validation_loss is not None:
            record["validation_loss"] = validation_loss
        self.last = record
        self._log_record(record)
        if self.env.is_main and step >= plan_vs_measured.STEP and not self.told:
            self.told = True
            if said := plan_vs_measured.compare(config, self.env, record):
                self.run.write_status(plan=said)

    def _log_record(self, record: dict[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.log(record)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds. Split masters are copies in it: ``optimizer.load`` takes them back."""
        return {
            "model": self.optimizer.weights() | expert_biases(self.built.model),
            "optim": self.optimizer.state_tensors(),
        }

    def _save(self) -> None:
        """Commit a checkpoint of this step, unless it is there already or saving is off."""
        if not self.config.checkpoint.enabled or self.checkpointer.has(self.step):
            return
        meta = {
            "position": self.data_state["position"],
            "data": self.data_state,
            "seed": self.config.run.seed,
            "mesh": asdict(self.built.context.dims),
        }
        self.checkpointer.save(self.step, self._state(), meta)
        if self.env.is_main:
            self.run.write_status(step=self.step)

    def _restore(self) -> tuple[int, dict[str, Any] | None]:
        """Load the checkpoint that ``checkpoint.resume`` names: its step, and where it stood in the data."""
        path = setup.resume_path(self.config, self.checkpointer)
        step, data_state = 0, None
        if path is not None:
            state = self._state()
            meta = self.checkpointer.load(path, state)
            self.optimizer.load(state["model"])
            step, data_state = meta["step"], meta["data"]
        if self.env.is_main:
            self.run.truncate_metrics(step)
        return step, data_state

    def _check_ranks(self) -> None:
        """Copies of weights, buffers and moments are equal; random streams follow the data."""
        # one after the other: the master of a split parameter is a copy
        masters = ((name, self.optimizer.master(name)) for name in self.optimizer.names)
        moments = (
            (f"{name}.{kind}", tensor)
            for name, state in self.optimizer.state_tensors().items()
            for kind, tensor in state.items()
        )
        replica_checks.check_replicas_match(chain(masters, self.built.model.named_buffers(), moments), self.env)
        replica_checks.check_random_streams(self.config.run.seed, self.data_rank, self.env)

    def _preempt(self) -> None:
        self._save()
        self.close_trackers("preempted")
        kept = "saved" if self.config.checkpoint.enabled else "nothing saved, since checkpoint=none"
        raise Preempted(f"asked to stop ({signals.requested() or 'by another rank'}) after step {self.step}; {kept}")

    def close_trackers(self, state: str) -> None:
        if self.trackers is not None:
            self.trackers.close(state)
            self.trackers = None

    def close(self) -> None:
        """Stop threads; safe to call after a failure anywhere."""
        self.profiler.close()
        self.close_trackers("failed")
        self.batches.close()
        gc.enable()
