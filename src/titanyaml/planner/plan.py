"""One plan: time, memory, what it costs, what a reviewer would say, and what would make it fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from titanyaml.planner import memory, step
from titanyaml.planner.inputs import Job
from titanyaml.planner.memory import GIB, Memory
from titanyaml.planner.step import Step

#: Half width of the range, and why. docs/planner.md has the errors behind it.
_RANGES = (
    (lambda job: job.shape.mixture is not None, 0.30,
     "loads of experts are taken as even, which only a run can tell, and no mixture was measured"),
    (lambda job: job.mesh.tp > 1 or job.mesh.pp > 1 or job.quant != "none", 0.15,
     "tensor parallelism, pipelines and float8 are planned within 15 %"),
    (lambda job: True, 0.10, "runs without tensor parallelism, pipelines and float8 are planned within 10 %"),
)


@dataclass(frozen=True)
class Plan:
    """What is expected of a job.

    Args:
        job: what is planned. step, memory: of its fullest rank. changes: what would make it fit, the fastest first.
    """

    job: Job
    step: Step
    memory: Memory
    changes: list[tuple[str, float]] = field(default_factory=list)

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
        return next((width, why) for applies, width, why in _RANGES if applies(self.job))

    def record(self) -> dict[str, Any]:
        """The content of plan.json that does not depend on a budget."""
        width, why = self.range
        return {
            "fits": self.fits, "tps": self.tps, "tps_range": [self.tps * (1 - width), self.tps * (1 + width)],
            "range_reason": why, "step_s": self.step.seconds, "mfu": self.mfu, "world_size": self.job.mesh.world_size,
            "memory_gib": {
                "total": self.total_gib, "limit": self.limit_gib, "margin": self.limit_gib - self.total_gib,
                "lower_bound": self.memory.lower_bound,
                "parts": {name: size / GIB for name, size in self.memory.parts.items()},
                "stages": [size / GIB for size in self.memory.stages],
            },
            "time_s": self.step.classes, "comm": self.communication(),
            "mesh": asdict(self.job.mesh), "device": asdict(self.job.device), "network": asdict(self.job.network),
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
            rows.append({"axis": name, "op": op, "count": round(count), "bytes": size, "seconds": seconds,
                         "exposed_s": exposed})
        return rows


def plan(job: Job) -> Plan:
    """Plan a job; where it does not fit, with the changes that would make it fit."""
    made = Plan(job, step.plan_step(job), memory.plan_memory(job))
    return made if made.fits else replace(made, changes=fitting_changes(job))


def fitting_changes(job: Job, *, more_devices: bool = True) -> list[tuple[str, float]]:
    """(what to type, tokens/s with it) of the three fastest single changes after which the job fits."""
    found = []
    for typed, changed in _candidates(job):
        if not more_devices and changed.mesh.world_size > job.mesh.world_size:
            continue
        planned = Plan(changed, step.plan_step(changed), memory.plan_memory(changed))
        if planned.fits:
            found.append((typed, planned.tps))
    return sorted(found, key=lambda one: -one[1])[:3]


def _candidates(job: Job) -> list[tuple[str, Job]]:
    mesh, found = job.mesh, []
    for mode in ("selective_op", "full"):
        if mode != job.ac and job.ac != "full":
            found.append((f"ac={mode}", replace(job, ac=mode)))
    batch = job.local_batch
    while mesh.pp == 1 and batch % 2 == 0:
        batch //= 2
        times = job.local_batch // batch
        total = job.local_batch * job.accumulation * mesh.data_degree
        found.append((f"train.local_batch={batch} train.global_batch={total}",
                      replace(job, local_batch=batch, accumulation=job.accumulation * times)))
        if job.ac != "full":
            found.append((f"ac=full {found[-1][0]}", replace(found[-1][1], ac="full")))
    for shards in (2, 4, 8, 16, 32, 64):
        wider = replace(mesh, dp_shard=mesh.dp_shard * shards)
        if job.network.gpus_per_host >= wider.world_size or job.network.rdma_gb_s > 1.0:
            found.append((f"parallel.dp_shard={wider.dp_shard} ({wider.world_size} devices)", replace(job, mesh=wider)))
            if job.ac != "full":
                found.append((f"ac=full {found[-1][0]}", replace(found[-1][1], ac="full")))
    for tp in (2, 4, 8):
        if tp > mesh.tp and mesh.dp_shard % (tp // mesh.tp) == 0 and job.shape.num_kv_heads % tp == 0:
            split = replace(mesh, tp=tp, dp_shard=mesh.dp_shard // (tp // mesh.tp))
            found.append((f"parallel.tp={tp} parallel.dp_shard={split.dp_shard}", replace(job, mesh=split)))
    return found
