"""Kernels run on the GPU where there is one, else in Triton's interpreter (tests/conftest.py turns it on)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

#: What the interpreter calls a dtype, and what PyTorch does.
NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@pytest.fixture
def device(monkeypatch) -> torch.device:
    """Where kernels run; the test is skipped where they run nowhere."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton cannot be imported")
    if torch.cuda.is_available():
        return torch.device("cuda")
    # the interpreter cuts bits off where hardware rounds to nearest even
    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(source) != "fp32" or str(target) not in NARROW:
            return original(data, source, target, rounding)
        narrow = torch.from_numpy(data.view("float32").copy()).to(NARROW[str(target)])
        bits = torch.uint16 if narrow.itemsize == 2 else torch.uint8
        return narrow.view(bits).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    return torch.device("cpu")
