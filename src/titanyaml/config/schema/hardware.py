"""The device's and the network's keys. Import them from ``titanyaml.config.schema``."""

from __future__ import annotations

from dataclasses import dataclass

from titanyaml.config.keys import key

BASES = ["measured", "calibrated", "fitted", "datasheet", "given"]


_BASIS = (
    "where the rates come from, for a plan's range: measured in whole runs, by a calibration, fitted to "
    "published runs, shares of the datasheet, or given by you"
)


@dataclass
class Hardware:
    """The device: its peak for MFU, and the rates that ``runner=plan`` reckons with. What is unknown stays null."""

    name: str = key("auto", "auto: recognised by the device's own name")
    basis: str = key("given", _BASIS, choices=BASES)
    peak_bf16_tflops: float | None = key(None, "dense bf16 peak (TFLOP/s)", above=0)
    memory_gib: float | None = key(None, "device memory (GiB)", above=0)
    power_w: float | None = key(None, "power limit (watts), for the energy of a token budget", above=0)
    gemm_bf16_tflops: float | None = key(None, "large bf16 products, sustained within a step (TFLOP/s)", above=0)
    gemm_fp8_tflops: float | None = key(None, "large float8 products, the same; null: has none", above=0)
    gemm_bf16_shape: float = key(
        110.0, "s: a product with sides m, n, k takes 1 + s(1/m + 1/n + 1/k) times as long (elements)", low=0
    )
    gemm_fp8_shape: float | None = key(None, "the same of float8; null: as many times larger as its rate is", low=0)
    # the datasheet's figure, since memory_share was measured against it
    memory_tb_s: float | None = key(None, "memory bandwidth of the datasheet (TB/s)", above=0)
    memory_share: float = key(0.88, "of memory_tb_s, reached by kernels that only move data", above=0, high=1)
    cast_tensorwise_bytes: float | None = key(
        None, "moved to cast an element to float8, both layouts, one scale; null: as fitted (bytes)", above=0
    )
    cast_rowwise_bytes: float | None = key(
        None, "the same with a scale for each row and column; null: as fitted (bytes)", above=0
    )
    flash_forward_tflops: float | None = key(None, "FlashAttention, causal, long sequences (TFLOP/s)", above=0)
    flash_backward_tflops: float | None = key(None, "its backward pass (TFLOP/s)", above=0)
    cudnn_forward_tflops: float | None = key(None, "cuDNN attention, the same; null: not used here", above=0)
    cudnn_backward_tflops: float | None = key(None, "its backward pass (TFLOP/s)", above=0)
    # bounds the short kernels of small models, which no rate describes
    launch_us: float = key(3.0, "least time of a kernel (microseconds)", low=0)
    reserve_gib: float = key(1.5, "memory outside the allocator: CUDA context, NCCL (GiB)", low=0)
    price_per_hour: float | None = key(None, "price of one device for an hour, in any currency", above=0)
    calibrate: bool = key(
        False, "runner=bench measures these rates and those of the links, and writes them as options of both groups"
    )


@dataclass
class Cluster:
    """The links between devices, for ``runner=plan``."""

    name: str = key("none", "what the links are called")
    basis: str = key("given", "where the rates come from: as of hardware", choices=BASES)
    gpus_per_host: int = key(1, "devices that NVLink joins", low=1)
    nvlink_gb_s: float | None = key(None, "reached by large collectives within a host (GB/s per device)", above=0)
    rdma_gb_s: float | None = key(None, "reached between hosts (GB/s per device)", above=0)
    nvlink_latency_us: float = key(10.0, "before the first byte within a host (microseconds)", low=0)
    rdma_latency_us: float = key(15.0, "before the first byte, for each doubling of hosts (microseconds)", low=0)
