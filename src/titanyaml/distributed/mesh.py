"""Degrees of parallelism and the DeviceMesh built from them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanyaml.config import schema
from titanyaml.config.degrees import MESH_AXES, Degrees, resolve_degrees
from titanyaml.distributed import compat


@dataclass(frozen=True)
class ParallelDims(Degrees):
    """Degrees, with the meshes of this process that follow from them."""

    @classmethod
    def resolve(cls, parallel: schema.Parallel, world_size: int) -> ParallelDims:
        """The configured degrees, -1 derived from the number of ranks; ConfigError if none fit."""
        return cls(**resolve_degrees(parallel, world_size=world_size))

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh for FSDP: one axis dp_shard*cp, over which it shards, behind dp_replicate if that is above 1."""
        # cp ranks hold different tokens, so their gradients are summed like those of data ranks. One axis does both: a
        # second reduction of full gradients would cost memory and time.
        axes = [axis for axis in ("dp_shard", "cp") if getattr(self, axis) > 1] or ["dp_shard"]
        if len(axes) == 1:
            return mesh[axes[0]] if self.dp_replicate == 1 else mesh["dp_replicate", axes[0]]
        return compat.flat_mesh(mesh, outer="dp_replicate" if self.dp_replicate > 1 else None, axes=axes)

    def build(self, device_type: str) -> DeviceMesh:
        """The mesh with the axes pp, dp_replicate, dp_shard, cp, tp, outermost first; after ``env.start``."""
        assert self.world_size > 1, "one rank alone has no mesh"
        return init_device_mesh(device_type, tuple(getattr(self, axis) for axis in MESH_AXES), mesh_dim_names=MESH_AXES)

    def build_experts(self, device_type: str) -> DeviceMesh | None:
        """The same ranks as a mesh for experts: axes pp, dp_replicate, expert_shard, ep; None without ep."""
        # Of the dp_shard*cp*tp ranks the innermost ep divide the experts among themselves: they lie on the fastest
        # links. expert_shard runs over the groups of them, which hold equal experts; FSDP shards those over it.
        if self.ep == 1:
            return None
        num_groups, remainder = divmod(self.dp_shard * self.cp * self.tp, self.ep)
        assert remainder == 0, "ep divides dp_shard*cp*tp"
        sizes = (self.pp, self.dp_replicate, num_groups, self.ep)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"))

    def data_rank(self, mesh: DeviceMesh | None) -> int:
        """Index of the batch part that this rank reads, 0 .. data_degree-1; the same for its cp, tp and pp peers."""
        if mesh is None:
            return 0
        return mesh.get_local_rank("dp_replicate") * self.dp_shard + mesh.get_local_rank("dp_shard")

    def adds_loss(self, mesh: DeviceMesh | None) -> bool:
        """Whether this rank's loss is summed. tp and pp peers have equal ones: the first's counts."""
        return mesh is None or mesh.get_local_rank("tp") == mesh.get_local_rank("pp") == 0

    def counts_batch(self, mesh: DeviceMesh | None) -> bool:
        """Whether this rank's tokens are counted. Its cp, tp and pp peers read the same: the first counts."""
        return self.adds_loss(mesh) and (mesh is None or mesh.get_local_rank("cp") == 0)
