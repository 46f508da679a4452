"""Sources of randomness and of batch-dependent rounding in a model, which are disabled in all roles.

PPO needs the same log-probs in each forward pass (the N implementation details).
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedConfig, PreTrainedModel


def is_dropout_rate(name: str, value: Any) -> bool:
    """Return whether a config setting, or an attribute of a module, is a rate of randomness in training."""
    # dropout, layerdrop, attn_pdrop, drop_path_rate, router_jitter_noise
    return isinstance(value, float) and ("drop" in name or "jitter" in name)


def disable_dropout(module: nn.Module) -> None:
    """Set every rate in `module` to 0: dropout modules, functional dropout, layerdrop, router jitter, and configs.

    Evaluation mode is not enough: gradient checkpointing needs training mode, and adapters bring new dropout modules.
    """
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        config = getattr(part, "config", None)
        for owner in (part, config) if isinstance(config, PreTrainedConfig) else (part,):
            for name, value in list(vars(owner).items()):
                if is_dropout_rate(name, value):
                    setattr(owner, name, 0.0)


class Router(NamedTuple):
    """A module that sends tokens to experts."""

    name: str
    module: nn.Module
    output: int
    """Index of the logits in its outputs."""


def routers_of(model: PreTrainedModel) -> list[Router]:
    """Return the routers of a model, as transformers finds them; empty without experts."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    known = {
        recorder.target_class: recorder.index
        for part in parts
        for name, recorder in (getattr(type(part), "_can_record_outputs", None) or {}).items()
        if name == "router_logits" and hasattr(recorder, "target_class")
    }
    found = ((name, module) for name, module in model.named_modules() if type(module) in known)
    return [Router(name, module, known[type(module)]) for name, module in found]


def compute_routers_in_float32(model: PreTrainedModel) -> None:
    """Let the routers of a model in bfloat16 multiply in float32 (Switch Transformers, arXiv 2101.03961, section 2.4).

    A product rounded to 8 bits could route a token to another expert in another batch. Switch's router already uses float32.
    """
    for router in routers_of(model):
        module = router.module
        if isinstance(getattr(module, "weight", None), nn.Parameter) and "forward" not in vars(module):
            module.forward = partial(_in_float32, router, module.forward)


def _in_float32(router: Router, forward: Any, states: Tensor, *more: Any) -> Any:
    """Return the outputs of a router for `states`, computed in float32; its logits stay in float32."""
    weights = {name: weight.float() for name, weight in router.module.named_parameters(recurse=False)}
    with _reparametrize_module(router.module, weights):
        outputs = forward(states.float(), *more)
    if isinstance(outputs, Tensor):
        return outputs
    return tuple(
        part.to(states.dtype) if number != router.output and part.is_floating_point() else part
        for number, part in enumerate(outputs)
    )
