"""A two-layer model with a tied weight, and plugins that behave well or badly. Found by dotted path, as real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titanyaml.distributed.mesh import ParallelDims
from titanyaml.errors import Problem
from titanyaml.models.protocol import BlockLayout, ModelFacts
from titanyaml.pipeline.protocol import Change, Context

FACTS = ModelFacts(
    blocks=("0", "1"),
    embedding="0",
    head="1",
    final_norm="1",
    num_params=16,
    num_active_params=16,
    num_embedding_params=16,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    dim=4,
    ffn_dim=4,
    vocab_size=4,
    max_seq_len=8,
    tied=True,
    layouts=(BlockLayout(entries=(), attention="", column=(), row=(), stream_norms=()),) * 2,
)


def context(**changes: Any) -> Context:
    """One CPU rank in float32."""
    values = {
        "dims": ParallelDims(),
        "mesh": None,
        "device": torch.device("cpu"),
        "param_dtype": torch.float32,
        "compute_dtype": torch.float32,
        "reduce_dtype": torch.float32,
        "facts": FACTS,
        "seq_len": 8,
        "local_batch": 1,
        "accumulation": 1,
    }
    return Context(**(values | changes))


def model() -> nn.Module:
    """Layers "0" and "1", which share their weight."""
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    layers[1].weight = layers[0].weight
    return layers


def target(cls: type, **keys: Any) -> dict[str, Any]:
    """A plugin node for a class of this file."""
    return {"_target_": f"{__name__}.{cls.__name__}", **keys}


class Mark:
    """Well-behaved: writes its tag on the first layer. Lacks requires, conflicts, after and before."""

    stage = "model"

    def __init__(self, *, tag: str = "mark", bad: bool = False) -> None:
        self.tag, self.bad = tag, bad

    def check(self, ctx: Context) -> list[Problem]:
        return [Problem("pipeline.plugins.mark.bad", "is true", hint="bad=false")] if self.bad else []

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        model[0].tags = [*getattr(model[0], "tags", []), self.tag]
        return model, Change(f"marked with {self.tag}", ["0"], {"1": "not the first", "2": "not the first"})


class Late(Mark):
    stage = "fsdp"


class Early(Mark):
    stage = "quant"


class Needy(Mark):
    requires = ("friend",)
    conflicts = ("foe",)


class After(Mark):
    stage = "quant"
    after = ("late", "absent")


class Before(Mark):
    stage = "final"
    before = ("mark", "absent")


class Idle(Mark):
    def reason_off(self, ctx: Context) -> str:
        return f"nothing to do on {ctx.device.type}"


class Asks(Mark):
    """Refuses unless it sees the active nodes."""

    def check(self, ctx: Context) -> list[Problem]:
        return [] if ctx.active == ("asks", "late") else [Problem("", f"sees {ctx.active}")]


class Nothing(Mark):
    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        return model, Change("found no layer", [], {"0": "too small"})


class Untie(Mark):
    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        model[1].weight = nn.Parameter(model[0].weight.detach().clone())
        return model, Change("copied", ["1"])


class Rename(Mark):
    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        return nn.Sequential(model), Change("wrapped", ["*"])


class Forgetful(Mark):
    def apply(self, model: nn.Module, ctx: Context) -> Any:
        return model


class Crashes(Mark):
    def apply(self, model: nn.Module, ctx: Context) -> Any:
        raise RuntimeError("boom")


class Checked(Mark):
    """Has something to say after the first step."""

    def verify(self, model: nn.Module, ctx: Context) -> Change:
        return Change(f"tags are {model[0].tags}", ["0"])


class Failing(Mark):
    def verify(self, model: nn.Module, ctx: Context) -> Change:
        from titanyaml.errors import PipelineError

        raise PipelineError(f"{self.tag} found nothing", key=self.tag)


class NoStage:
    def check(self, ctx: Context) -> list[Problem]:
        return []

    def apply(self, model: nn.Module, ctx: Context) -> tuple[nn.Module, Change]:
        return model, Change("nothing", ["*"])


class NoPlugin:
    stage = "model"


class StringAfter(Mark):
    after = "late"


class Picky(Mark):
    def __init__(self, *, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size is {size}")
