"""AdamW by our Triton kernel (``kernels.adamw``)."""

import torch
from torch import Tensor

from titanyaml.kernels.adamw import Factors, adamw_
from titanyaml.kernels.master_weights import is_split
from titanyaml.optim.adamw import ParameterState, PerParameterAdamW, TrainedParameters, local_shard


class TritonAdamW(PerParameterAdamW):
    """The update, state and checkpoints of ``AdamW``; masters are float32 or split."""

    def describe(self) -> str:
        """See ``AdamW``."""
        return f"fused{self._split_note()}{self._accumulation_note()}"

    def _update_one(self, state: ParameterState, grad: Tensor, clip: Tensor, factors: Factors) -> None:
        moments = local_shard(state.moments["exp_avg"]), local_shard(state.moments["exp_avg_sq"])
        stored = None if state.master is None else local_shard(state.parameter)
        adamw_(stored, local_shard(state.weight), grad.contiguous(), *moments, clip, factors)


def kernel_supports(params: TrainedParameters) -> bool:
    """Whether all weights are float32 or split masters, and all shards contiguous: the kernel addresses flat memory."""
    with torch.no_grad():
        stored = [local_shard(parameter.detach()) for parameter in params.named.values()]
        weights = [local_shard(params.masters.get(name, p.detach())) for name, p in params.named.items()]
    supported_dtypes = all(weight.dtype == torch.float32 or is_split(weight) for weight in weights)
    return supported_dtypes and all(tensor.is_contiguous() for tensor in [*weights, *stored])
