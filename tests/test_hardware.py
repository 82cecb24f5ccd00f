from __future__ import annotations

from importlib import resources

import pytest
import torch

from titanyaml import hardware
from titanyaml.config.schema import Hardware


@pytest.mark.parametrize(
    ("driver", "option"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H20", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_devices_are_recognised_by_the_drivers_name(
    driver: str, option: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: driver)
    assert hardware.detect("cuda:0") == option
    peak = hardware.peak_tflops(Hardware(), "cuda:0")
    assert (peak is None) == (option is None)
    if option == "h200":
        assert peak == 989.0


def test_every_device_has_its_option() -> None:
    folder = resources.files("titanyaml.conf") / "hardware"
    assert not [option for option in (*hardware._NAME_PATTERNS, "cpu") if not (folder / f"{option}.yaml").is_file()]


def test_what_is_configured_goes_before_what_is_there() -> None:
    assert hardware.detect("cpu") == "cpu"
    assert hardware.peak_tflops(Hardware(), "cpu") is None
    assert hardware.peak_tflops(Hardware(peak_bf16_tflops=2.5), "cpu") == 2.5
    assert hardware.peak_tflops(Hardware(name="own"), "cpu") is None
    assert hardware.peak_tflops(Hardware(name="b200", peak_bf16_tflops=1.0), "cpu") == 1.0


def test_memory_of_a_cpu_is_the_peak_resident_set() -> None:
    before = hardware.memory_stats("cpu")
    block = torch.ones(2**28 // 4)  # 0.25 GiB, touched
    after = hardware.memory_stats("cpu")
    assert set(after) == {"reserved_gib"}
    assert 0.05 < before["reserved_gib"] <= after["reserved_gib"] < 64
    del block


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_gpu_comes_from_the_allocator() -> None:
    block = torch.empty(2**26, device="cuda")
    stats = hardware.memory_stats("cuda")
    assert stats["reserved_gib"] >= stats["active_gib"] >= 0.25
    hardware.synchronize("cuda")
    del block
