"""Devices and networks of a plan, from configuration or from the shipped files by name."""

from importlib import resources
from typing import Any

import yaml

from titanyaml.config import schema
from titanyaml.errors import ConfigError
from titanyaml.planner.model.inputs import Device, Network

#: Keys of ``hardware`` without which nothing can be planned.
_REQUIRED = (
    *("peak_bf16_tflops", "memory_gib", "gemm_bf16_tflops", "memory_tb_s"),
    *("flash_forward_tflops", "flash_backward_tflops"),
)


def device(spec: schema.Hardware) -> Device:
    """The configured device.

    Raises:
        ConfigError: it has no rates.
    """
    rates = {name: getattr(spec, name) for name in _REQUIRED}
    if missing := [name for name, rate in rates.items() if rate is None]:
        problem = f"hardware={spec.name} does not say {', '.join(missing)}"
        hint = "hardware=h200 or hardware=h100_sxm or hardware=h100_500w"
        raise ConfigError(problem, key=f"hardware.{missing[0]}", hint=hint)
    cudnn = None
    if spec.cudnn_forward_tflops is not None and spec.cudnn_backward_tflops is not None:
        cudnn = (spec.cudnn_forward_tflops, spec.cudnn_backward_tflops)
    return Device(
        spec.name,
        peak_tflops=rates["peak_bf16_tflops"],
        memory_gib=rates["memory_gib"],
        bf16_tflops=rates["gemm_bf16_tflops"],
        fp8_tflops=spec.gemm_fp8_tflops,
        memory_tb_s=rates["memory_tb_s"],
        flash_tflops=(rates["flash_forward_tflops"], rates["flash_backward_tflops"]),
        cudnn_tflops=cudnn,
        launch_us=spec.launch_us,
        reserve_gib=spec.reserve_gib,
        bf16_shape=spec.gemm_bf16_shape,
        fp8_shape=spec.gemm_fp8_shape,
        memory_share=spec.memory_share,
        cast_bytes=(spec.cast_tensorwise_bytes, spec.cast_rowwise_bytes),
        basis=spec.basis,
    )


def network(spec: schema.Cluster, *, world_size: int) -> Network:
    """The configured links.

    Raises:
        ConfigError: there are more ranks than links are known for.
    """
    if world_size == 1:
        # rates of a single rank are divided by, but multiply no bytes
        return Network(spec.name, 1, 1.0, 1.0, 0.0, 0.0, spec.basis)
    if spec.nvlink_gb_s is None or (spec.rdma_gb_s is None and world_size > spec.gpus_per_host):
        problem = f"cluster={spec.name} does not say how fast its links are"
        raise ConfigError(problem, key="cluster.nvlink_gb_s", hint="cluster=hgx_400g")
    # within one host the network cards are never used; any rate will do
    rates = (spec.nvlink_gb_s, spec.rdma_gb_s or spec.nvlink_gb_s)
    return Network(spec.name, spec.gpus_per_host, *rates, spec.nvlink_latency_us, spec.rdma_latency_us, spec.basis)


def shipped(group: str, option: str) -> dict[str, Any]:
    """Values of ``conf/<group>/<option>.yaml``; {} where there is no such file."""
    path = resources.files("titanyaml.conf") / group / f"{option}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return values or {}


def shipped_device(option: str) -> tuple[schema.Hardware, schema.Cluster]:
    """A device of ``conf/hardware/`` with the cluster that its defaults list names."""
    values = dict(shipped("hardware", option))
    overrides = [entry for entry in values.pop("defaults", []) if isinstance(entry, dict)]
    name = next((option for entry in overrides for option in entry.values()), "none")
    return schema.Hardware(**values), schema.Cluster(**shipped("cluster", name))
