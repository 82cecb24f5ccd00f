"""The device: its option in ``conf/hardware/``, its peak FLOP/s, its memory in use."""

import re
import sys
from importlib import resources

import torch
from omegaconf import DictConfig, OmegaConf

from titanyaml.config import schema

GIB = 2**30

#: Option of conf/hardware -> pattern of the driver's device name. The peaks themselves are in the YAML files alone.
#: NVL cards of the same chip have other peaks and are not matched.
_NAME_PATTERNS = {
    "h100_sxm": r"H100 80GB HBM3|H100 SXM",
    "h200": r"H200(?! NVL)",
    "h100_pcie": r"H100 PCIe",
    "gh200": r"GH200 480GB",
    "a100_80gb": r"A100[- ](SXM4-)?80GB",
    "a100_40gb": r"A100[- ](SXM4-)?40GB|A100-PCIE-40GB",
    "b200": r"B200",
}


def detect(device: torch.device | str) -> str | None:
    """The option of ``conf/hardware/`` that describes the device; None for an unknown GPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_name(device)  # such as "NVIDIA H100 80GB HBM3"
    # whole words: an "H2000" is no H200
    matching = (option for option, words in _NAME_PATTERNS.items() if re.search(rf"\b({words})(?!\w)", name))
    return next(matching, None)


def peak_tflops(spec: schema.Hardware, device: torch.device | str) -> float | None:
    """Dense bf16 peak (TFLOP/s): as configured, else of the recognised device under ``hardware=auto``, else None."""
    # a named device without a peak has none: that of the device below would not be its own
    if spec.peak_bf16_tflops is not None or spec.name != "auto":
        return spec.peak_bf16_tflops
    option = detect(device)
    path = resources.files("titanyaml.conf") / "hardware" / f"{option}.yaml"
    if option is None or not path.is_file():
        return None
    node = OmegaConf.create(path.read_text())
    assert isinstance(node, DictConfig)
    peak: float | None = node.get("peak_bf16_tflops")
    return peak


def memory_stats(device: torch.device | str) -> dict[str, float]:
    """Peak memory in GiB since the process started or ``forget_peaks``.

    On a GPU ``reserved_gib`` and ``active_gib`` of the caching allocator; on a CPU only ``reserved_gib``, the largest
    resident set of the process.
    """
    device = torch.device(device)
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {f"{kind}_gib": stats[f"{kind}_bytes.all.peak"] / GIB for kind in ("reserved", "active")}
    import resource  # absent on Windows, where torch has no distributed training either

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB elsewhere
    return {"reserved_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


def forget_peaks(device: torch.device | str) -> None:
    """Free the allocator's unused memory and reset its peaks; a CPU process cannot reset its own."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has run everything queued; nothing is queued on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
