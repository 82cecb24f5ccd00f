"""Private API of Inductor: one fusion forbidden, one faster launch. Apart since Inductor takes seconds to import."""

import os
from typing import Any

from torch._inductor import config, virtualized
from torch._inductor.choices import InductorChoices
from torch._inductor.scheduler import MixOrderReduction

from titanyaml.distributed import compat

#: First and last release that this file was run with: 2.11 on GPUs, 2.13 on CPUs.
TRIED_TORCH = ("2.11", "2.13")


class SeparateRowSums(InductorChoices):
    """Inductor's choices, except that two sums over rows are never fused. Such a sum is a norm weight's gradient."""

    # Inductor fuses it into the backward kernel of its norm, which reads the same tensors (mix order reduction). But if
    # two norms of a graph read one tensor, as a block's two norms read the residual stream, and fewer than 64
    # operations lie between them, it prefers to fuse their two sums. The earlier one then waits for the later one,
    # holds three activations (two gradients, attention's output) through the backward of attention, and reads them
    # once more.

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        if all(MixOrderReduction.is_split_reduction(node) for node in (node1, node2)):
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        return "titanyaml sums apart"


def keep_row_sums_apart() -> None:
    """Use ``SeparateRowSums`` from now on in this process, unless other choices were installed."""
    if config.inductor_choices_class is None and hasattr(MixOrderReduction, "is_split_reduction"):
        compat.warn_if_untried("the order of gradient sums in compiled blocks", TRIED_TORCH)
        # monkeypatch: Inductor's choices. May go when it leaves a norm's sum with the norm.
        config.inductor_choices_class = SeparateRowSums  # also a part of the cache's key
        virtualized.V.set_choices_handler(SeparateRowSums())  # this thread may have compiled before


def launch_triton_kernels_statically() -> None:
    """Start our Triton kernels in a graph as Inductor starts its own, without Triton's Python launcher."""
    # A float8 block has 36 of them, and the host is what a step of short kernels waits for. Inductor's own environment
    # variable wins over this.
    name = "static_launch_user_defined_triton_kernels"  # not every release has it
    if hasattr(config, name) and f"TORCHINDUCTOR_{name.upper()}" not in os.environ:
        setattr(config, name, True)
