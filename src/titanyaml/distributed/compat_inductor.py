"""Choices of Inductor that are taken back; private API like ``compat.py``'s, apart as importing it takes seconds."""

from __future__ import annotations

import os
from typing import Any

from torch._inductor import config, virtualized
from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import MixOrderReduction


class Choices(InductorChoices):
    """Two sums over rows stay apart. Such a sum is the gradient of a norm's weight.

    Inductor puts it into the kernel of its norm's backward, which reads the same tensors (mix order reduction). But if
    two norms of a graph read one tensor, as those of a block read the residual stream, and fewer than 64 operations
    apart, it prefers to put their sums together: the earlier one then waits for the later, holds three activations
    (two gradients, the output of attention) through the backward of attention, and reads them once more.
    """

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if all(MixOrderReduction.is_split_reduction(node) for node in (node1, node2)):
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        """For the key of the compile cache."""
        return "titanyaml sums apart"


def keep_row_sums_apart() -> None:
    """Use ``Choices`` from now on, in this process, unless somebody else has chosen."""
    if config.inductor_choices_class is None and hasattr(MixOrderReduction, "is_split_reduction"):
        config.inductor_choices_class = Choices  # a part of the cache's key
        virtualized.V.set_choices_handler(Choices())  # this thread may have compiled before


def launch_triton_kernels_statically() -> None:
    """Start own Triton kernels in a graph as Inductor starts those that it makes, without Triton's Python launcher.

    There are 36 in a float8 block, and the host is what a step of short kernels waits for. An environment variable of
    Inductor's that says otherwise goes first.
    """
    name = "static_launch_user_defined_triton_kernels"
    if hasattr(config, name) and f"TORCHINDUCTOR_{name.upper()}" not in os.environ:
        setattr(config, name, True)
