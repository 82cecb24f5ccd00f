"""One plan: step time, memory, and how far off both may be."""

from dataclasses import asdict, dataclass
from typing import Any

from titanyaml.planner.model import uncertainty
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import GIB, Memory, plan_memory
from titanyaml.planner.model.step import Step, plan_step

#: Axes over which FSDP and HSDP communicate.
_SHARD_AXES = ("shard", "expert_shard", "dp_replicate")


@dataclass(frozen=True)
class Plan:
    """What a job is expected to take."""

    job: Job
    step: Step
    memory: Memory

    @property
    def tps(self) -> float:
        """Tokens per second and device."""
        return self.job.tokens_per_step / self.step.seconds / self.job.mesh.world_size

    @property
    def mfu(self) -> float:
        """Share of the dense bf16 peak, by the convention of published figures."""
        return self.tps * self.job.shape.flops_per_token(self.job.seq_len) / (self.job.device.peak_tflops * 1e12)

    @property
    def total_gib(self) -> float:
        """Peak reserved memory of the fullest rank."""
        return self.memory.total / GIB

    @property
    def limit_gib(self) -> float:
        """Memory that the allocator can have."""
        return self.job.device.memory_gib - self.job.device.reserve_gib

    @property
    def fits(self) -> bool:
        """The fullest rank fits; a pipeline by its lower bound."""
        return self.total_gib <= self.limit_gib

    def record(self) -> dict[str, Any]:
        """The content of plan.json that depends on the job alone."""
        width, reasons = uncertainty.relative_range(self.job)
        return {
            "fits": self.fits,
            "tps": self.tps,
            "tps_range": [self.tps * (1 - width), self.tps * (1 + width)],
            "range_reason": reasons,
            "step_s": self.step.seconds,
            "mfu": self.mfu,
            "world_size": self.job.mesh.world_size,
            "memory_gib": {
                "total": self.total_gib,
                "limit": self.limit_gib,
                "margin": self.limit_gib - self.total_gib,
                "lower_bound": self.memory.lower_bound,
                "parts": {name: size / GIB for name, size in self.memory.parts.items()},
                "stages": [size / GIB for size in self.memory.stages],
            },
            "time_s": self.step.classes,
            "comm": self.communication(),
            "mesh": asdict(self.job.mesh),
            "device": asdict(self.job.device),
            "network": asdict(self.job.network),
        }

    def budget(self, tokens: float, *, power_w: float | None, price_per_hour: float | None) -> dict[str, Any]:
        """What training on ``tokens`` takes at the planned speed, without validation, checkpoints and restarts.

        Energy is null without the power limit of a device, and cost without its price.
        """
        ranks = self.job.mesh.world_size
        tokens_per_s = self.tps * ranks
        device_hours = tokens / tokens_per_s / 3600 * ranks
        return {
            "token_budget": tokens,
            "tokens_per_day": tokens_per_s * 86400,
            "days": tokens / tokens_per_s / 86400,
            "gpu_hours": device_hours,
            "energy_mwh": None if power_w is None else device_hours * power_w / 1e6,
            "cost": None if price_per_hour is None else device_hours * price_per_hour,
        }

    def communication(self) -> list[dict[str, Any]]:
        """A row per axis and collective of one step."""
        comm = self.step.times.comm
        # the compute stream waits for the network stream, not for one axis: waits are shared out by duration
        waited = self.step.times.seconds.get("exposed_shard", 0.0)
        sharding = sum(record[2] for (axis, _), record in comm.items() if axis in _SHARD_AXES)
        names = {"shard": "dp_shard_cp" if self.job.mesh.cp > 1 else "dp_shard"}
        rows = []
        for (axis, op), (count, size, seconds, exposed) in sorted(comm.items()):
            if axis in _SHARD_AXES:
                exposed = waited * seconds / sharding
            row = {"axis": names.get(axis, axis), "op": op, "count": round(count), "bytes": size}
            rows.append(row | {"seconds": seconds, "exposed_s": exposed})
        return rows


def plan_job(job: Job) -> Plan:
    return Plan(job, plan_step(job), plan_memory(job))
