"""Dropout off in every part of a model, and the check that nothing random is left in training mode."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone.contract import Backbone

PARTS_OF_NAMES = ("drop", "jitter")
"""Parts of the names of rates: dropout, layerdrop, attn_pdrop, drop_path_rate, router_jitter_noise."""


def is_dropout_rate(name: str, value: Any) -> bool:
    """Whether a setting of a config, or an attribute of a module, is the rate of something random in training."""
    return isinstance(value, float) and any(part in name for part in PARTS_OF_NAMES)


def disable_dropout(module: nn.Module) -> None:
    """Set every rate in `module` to 0: of dropout modules, of functional dropout, of layers and routers, and in configs.

    PPO needs the same log-probs each time a text is read (the N implementation details). Evaluation mode is not enough:
    gradient checkpointing needs training mode, and an adapter that is added later brings new dropout modules.
    """
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        config = getattr(part, "config", None)
        for owner in (part, config) if isinstance(config, PreTrainedConfig) else (part,):
            for name, value in list(vars(owner).items()):
                if is_dropout_rate(name, value):
                    setattr(owner, name, 0.0)


@torch.no_grad()
def require_deterministic(backbone: Backbone, adapter: str | None = None) -> None:
    """Read one text twice in training mode, which must give the same states.

    Args:
        adapter: the adapter to compute with; None: the bare base.

    Raises:
        UserError: if the states differ.
    """
    model = backbone.model
    was_training = model.training
    size = model.config.vocab_size
    prompt, response = (Padded.from_lists([[(size // 2 + token) % size for token in row]]) for row in ([5, 6, 7], [8, 9]))
    prompt, response = prompt.to(backbone.device), response.to(backbone.device)
    model.train()
    try:
        with backbone.adapter(adapter):
            first, second = (backbone.summary(prompt, response).float() for _ in range(2))
    finally:
        model.train(was_training)
    change, largest = float((first - second).abs().max()), max(1.0, float(first.abs().max()))
    if not change <= 1e-3 * largest:  # far more than atomic sums on a GPU, less than one dropped unit
        raise UserError(
            f"gradient_checkpointing: model type '{model.config.model_type}' is random in training mode (a text read twice "
            f"differs by {change:.3g}); set gradient_checkpointing to false"
        )
