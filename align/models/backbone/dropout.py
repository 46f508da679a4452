"""Dropout and other randomness of training, which is off in all roles."""

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

PARTS_OF_NAMES = ("drop", "jitter")
"""Parts of the names of rates: dropout, layerdrop, attn_pdrop, drop_path_rate, router_jitter_noise."""


def is_dropout_rate(name: str, value: Any) -> bool:
    """Return whether a setting of a config, or an attribute of a module, is the rate of something random in training."""
    return isinstance(value, float) and any(part in name for part in PARTS_OF_NAMES)


def disable_dropout(module: nn.Module) -> None:
    """Set every rate in `module` to 0: dropout modules, functional dropout, layerdrop, router jitter, and configs.

    PPO needs the same log-probs each time a text is read (the N implementation details). Evaluation mode is not enough:
    gradient checkpointing needs training mode, and adapters bring new dropout modules.
    """
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        config = getattr(part, "config", None)
        for owner in (part, config) if isinstance(config, PreTrainedConfig) else (part,):
            for name, value in list(vars(owner).items()):
                if is_dropout_rate(name, value):
                    setattr(owner, name, 0.0)
