"""Degrees of parallelism and the DeviceMesh that they make."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanyaml.config import schema
from titanyaml.config.degrees import MESH_AXES, Degrees, resolve_degrees
from titanyaml.distributed import compat


@dataclass(frozen=True)
class ParallelDims(Degrees):
    """Degrees, and the meshes of devices that they make."""

    @classmethod
    def resolve(cls, parallel: schema.Parallel, world_size: int) -> ParallelDims:
        """The configured degrees, -1 derived from the number of ranks.

        Raises:
            ConfigError: no degrees fit ``world_size`` ranks.
        """
        return cls(**resolve_degrees(parallel, world_size=world_size))

    def shard_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The data axes, flat: shards over dp_shard*cp, under dp_replicate where there is more than one copy."""
        axes = [axis for axis in ("dp_shard", "cp") if getattr(self, axis) > 1] or ["dp_shard"]
        if len(axes) == 1:
            return mesh[axes[0]] if self.dp_replicate == 1 else mesh["dp_replicate", axes[0]]
        return compat.flat_mesh(mesh, outer="dp_replicate" if self.dp_replicate > 1 else None, axes=axes)

    def build(self, device_type: str) -> DeviceMesh:
        """The mesh with the axes pp, dp_replicate, dp_shard, cp, tp, outermost first, those of size 1 too.

        A mesh is made of process groups: ``dist.env.start`` comes first, and one rank alone has none.
        """
        assert self.world_size > 1, "one rank alone has no mesh"
        return init_device_mesh(device_type, tuple(getattr(self, axis) for axis in MESH_AXES), mesh_dim_names=MESH_AXES)

    def build_experts(self, device_type: str) -> DeviceMesh | None:
        """The same ranks as experts are spread over them: axes pp, dp_replicate, expert_shard, ep; None without ep.

        The innermost ``ep`` of the dp_shard*cp*tp ranks share out the experts; ``expert_shard`` counts the groups of
        them, which hold the same experts and over which FSDP shards those.
        """
        if self.ep == 1:
            return None
        shards, rest = divmod(self.dp_shard * self.cp * self.tp, self.ep)
        assert rest == 0, "ep divides dp_shard*cp*tp"
        return init_device_mesh(
            device_type,
            (self.pp, self.dp_replicate, shards, self.ep),
            mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"),
        )

    def data_rank(self, mesh: DeviceMesh | None) -> int:
        """Which part of the batch this rank reads, 0 .. data_degree-1; the same for its cp, tp and pp peers."""
        if mesh is None:
            return 0
        return mesh.get_local_rank("dp_replicate") * self.dp_shard + mesh.get_local_rank("dp_shard")

    def adds_loss(self, mesh: DeviceMesh | None) -> bool:
        """Whether this rank's loss is added up: of tp and pp peers, who know the same, the first's is."""
        return mesh is None or mesh.get_local_rank("tp") == mesh.get_local_rank("pp") == 0

    def counts_batch(self, mesh: DeviceMesh | None) -> bool:
        """Whether the tokens of this rank's batch are counted: its cp, tp and pp peers read the same batch."""
        return self.adds_loss(mesh) and (mesh is None or mesh.get_local_rank("cp") == 0)
