"""Reference model of TRL 0.4 to 0.11."""

import copy
from typing import TypeVar

from torch import nn

from align.trl.config import InvalidArgumentError

Model = TypeVar("Model", bound=nn.Module)

LAYERS = (
    *("transformer.h.{layer}.", "model.decoder.layers.{layer}.", "gpt_neox.layers.{layer}.", "model.layers.{layer}."),
    *("decoder.block.{layer}.",),
)
"""Names of layers in common architectures."""


def create_reference_model(model: Model, num_shared_layers: int | None = None, pattern: str | None = None) -> Model:
    """Return a frozen copy of a model in evaluation mode.

    Args:
        model: policy.
        num_shared_layers: number of first layers to freeze in the policy as well, with all weights before them. Default: no
            layers.
        pattern: name of a layer, with `{layer}` as its number. Default: the names of common architectures.

    Raises:
        InvalidArgumentError: If the model has no layer with that number.
    """
    if num_shared_layers is not None:
        _freeze_before(model, [pattern] if pattern else list(LAYERS), num_shared_layers)
    return copy.deepcopy(model).requires_grad_(False).eval()


def _freeze_before(model: nn.Module, patterns: list[str], layer: int) -> None:
    weights = list(model.named_parameters())
    first = [pattern.format(layer=layer) for pattern in patterns]
    start = next((index for index, (name, _) in enumerate(weights) if any(each in name for each in first)), None)
    if start is None:
        raise InvalidArgumentError(
            f"num_shared_layers is {layer}, but the model has no weight of layer {layer}; lower it, or set pattern"
        )
    for _, weight in weights[:start]:
        weight.requires_grad_(False)
