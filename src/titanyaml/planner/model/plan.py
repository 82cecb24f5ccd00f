"""One plan: time, memory, how far off it may be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from titanyaml.planner.model import memory_of_kept, step, uncertainty
from titanyaml.planner.model.inputs import Job
from titanyaml.planner.model.memory import GIB, Memory
from titanyaml.planner.model.step import Step


@dataclass(frozen=True)
class Plan:
    """What is expected of a job.

    Args:
        job: what is planned. step, memory: of its fullest rank.
    """

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
        """Peak reserved memory."""
        return self.memory.total / GIB

    @property
    def limit_gib(self) -> float:
        """What the allocator can have."""
        return self.job.device.memory_gib - self.job.device.reserve_gib

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits."""
        return self.total_gib <= self.limit_gib

    @property
    def range(self) -> tuple[float, str]:
        """(share by which tokens/s may be off either way, why)."""
        return uncertainty.of(self.job)

    def record(self) -> dict[str, Any]:
        """The content of plan.json that does not depend on a budget."""
        width, why = self.range
        return {
            "fits": self.fits,
            "tps": self.tps,
            "tps_range": [self.tps * (1 - width), self.tps * (1 + width)],
            "range_reason": why,
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

    def communication(self) -> list[dict[str, Any]]:
        """A row per axis and collective and step. What FSDP's transfers expose is shared out by their duration."""
        rows = []
        entries = self.step.times.comm
        waited = self.step.times.seconds.get("exposed_shard", 0.0)
        fsdp = ("shard", "expert_shard", "dp_replicate")
        sharding = sum(entry[2] for (axis, _), entry in entries.items() if axis in fsdp)
        for (axis, op), (count, size, seconds, exposed) in sorted(entries.items()):
            if axis in fsdp:
                exposed = waited * seconds / sharding
            name = {"shard": "dp_shard_cp" if self.job.mesh.cp > 1 else "dp_shard"}.get(axis, axis)
            rows.append(
                {"axis": name, "op": op, "count": round(count), "bytes": size, "seconds": seconds, "exposed_s": exposed}
            )
        return rows


def plan(job: Job) -> Plan:
    """Plan a job."""
    return Plan(job, step.plan_step(job), memory_of_kept.plan_memory(job))
