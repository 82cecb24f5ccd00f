"""Devices and networks of a plan, from configuration or from the shipped files by name."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from titanyaml.config import schema
from titanyaml.errors import ConfigError
from titanyaml.planner.model.inputs import Device, Network


def device(spec: schema.Hardware) -> Device:
    """The configured device.

    Raises:
        ConfigError: it has no rates.
    """
    needed = (
        "peak_bf16_tflops",
        "memory_gib",
        "gemm_bf16_tflops",
        "memory_tb_s",
        "flash_forward_tflops",
        "flash_backward_tflops",
    )
    missing = [name for name in needed if getattr(spec, name) is None]
    if missing:
        raise ConfigError(
            f"hardware={spec.name} does not say {', '.join(missing)}",
            key=f"hardware.{missing[0]}",
            hint="hardware=h200 or hardware=h100_sxm or hardware=h100_500w",
        )
    cudnn = (spec.cudnn_forward_tflops, spec.cudnn_backward_tflops)
    return Device(
        spec.name,
        spec.peak_bf16_tflops,
        spec.memory_gib,
        spec.gemm_bf16_tflops,
        spec.gemm_fp8_tflops,
        spec.memory_tb_s,
        (spec.flash_forward_tflops, spec.flash_backward_tflops),
        None if None in cudnn else cudnn,
        spec.launch_us,
        spec.reserve_gib,
        spec.gemm_bf16_shape,
        spec.gemm_fp8_shape,
        spec.memory_share,
        (spec.cast_tensorwise_bytes, spec.cast_rowwise_bytes),
        spec.basis,
    )


def network(spec: schema.Cluster, *, world_size: int) -> Network:
    """The configured links; one rank has none.

    Raises:
        ConfigError: more ranks than links are known for.
    """
    if world_size == 1:
        return Network(spec.name, 1, 1.0, 1.0, 0.0, 0.0, spec.basis)
    if spec.nvlink_gb_s is None or (spec.rdma_gb_s is None and world_size > spec.gpus_per_host):
        raise ConfigError(
            f"cluster={spec.name} does not say how fast its links are",
            key="cluster.nvlink_gb_s",
            hint="cluster=hgx_400g",
        )
    return Network(
        spec.name,
        spec.gpus_per_host,
        spec.nvlink_gb_s,
        spec.rdma_gb_s or spec.nvlink_gb_s,
        spec.nvlink_latency_us,
        spec.rdma_latency_us,
        spec.basis,
    )


def shipped(group: str, option: str) -> dict[str, Any]:
    """Values of ``conf/<group>/<option>.yaml``; {} where there is no such file."""
    path = resources.files("titanyaml.conf") / group / f"{option}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return values or {}


def shipped_device(option: str) -> tuple[schema.Hardware, schema.Cluster]:
    """A device of ``conf/hardware/`` with the cluster that it brings."""
    values = dict(shipped("hardware", option))
    chosen = [entry for entry in values.pop("defaults", []) if isinstance(entry, dict)]
    name = next((option for entry in chosen for option in entry.values()), "none")
    return schema.Hardware(**values), schema.Cluster(**shipped("cluster", name))
