"""RMS norms by torch's kernel on a GPU.

transformers computes x / rms(x) * weight in seven steps that each read and write all states. torch has one kernel.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

EPSILONS = ("variance_epsilon", "eps")
"""Names of the epsilon attribute, which is added to the mean square."""


def fuse_norms(model: PreTrainedModel) -> None:
    """Let the RMS norms of a model use torch's kernel on a GPU. They are unchanged on a CPU."""
    kinds: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = _is_plain(module)
        if kinds[kind] and "forward" not in vars(module):
            module.forward = partial(norm_in_one_kernel, module, module.forward)


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in EPSILONS)
    return next((value for value in found if isinstance(value, float)), None)


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """Return whether a module computes x / rms(x) * weight, without bias, mean or 1 + weight (Gemma)."""
    epsilon = _epsilon(module)
    if epsilon is None or isinstance(module, nn.RMSNorm) or [*module.state_dict()] != ["weight"]:
        return False
    weight, states = (torch.tensor(row, device="cpu") for row in ([0.5, 2.0, -1.0, 3.0], [[1.0, -4.0, 2.0, 0.25]]))
    try:
        computed = functional_call(module, {"weight": weight}, (states,))
    except Exception:  # any module may have a weight and an epsilon
        return False
    return isinstance(computed, Tensor) and torch.allclose(computed, rms_norm(states, weight.shape, weight, epsilon))


def norm_in_one_kernel(module: Any, forward: Any, states: Tensor, *gate: Tensor | None) -> Tensor:
    """Return the output of an RMS norm: one kernel on CUDA, else the original `forward`, also with a gate (Falcon H1)."""
    if states.is_cuda and states.dtype == module.weight.dtype and not gate:
        return rms_norm(states, module.weight.shape, module.weight, _epsilon(module))
    plain: Tensor = forward(states, *gate)
    return plain
