"""Learning rates by layer and gradual unfreezing, as in ULMFiT (Howard and Ruder 2018, sections 3.2 and 3.3)."""

from dataclasses import dataclass

from torch import nn

from align.core.errors import UserError, counted
from align.core.settings import Settings, option
from align.models.backbone import Backbone
from align.models.backbone.layers import layer_lists
from align.training.optimizer import ParamGroup


@dataclass(kw_only=True)
class LayerwiseConfig(Settings):
    """Layer-wise learning rates and gradual unfreezing."""

    help_title = "layer-wise training"

    layer_lr_decay: float = option(
        1.0, "Learning rate decay from each layer to the one below (ULMFiT: 0.385, that is 1/2.6).", gt=0, le=1
    )
    unfreeze_steps: int = option(
        0,
        "Number of updates between unfreezing one layer and the next below (ULMFiT: one epoch). 0 trains all "
        "layers from the start.",
        ge=0,
    )


def layer_groups(
    config: LayerwiseConfig, peak: float, backbone: Backbone, module: nn.Module, total_steps: int
) -> list[ParamGroup]:
    """Divide the trained weights below the top layer into groups by their distance from it.

    The top layer and all weights above it (norm, heads) train at `peak` from the start. A layer has the rate of the layer
    above times `layer_lr_decay`, and starts `unfreeze_steps` updates later, with a separate warm-up. Embeddings are the
    layer below the first. An encoder and a decoder are both counted from their top.

    Args:
        module: module that the engine trains; contains the backbone.

    Raises:
        UserError: if no weight below the top layer is trained, or the run ends before all layers are.
    """
    if config.layer_lr_decay == 1 and not config.unfreeze_steps:
        return []
    distances = distances_from_top(backbone)
    names: dict[int, set[str]] = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad and distances.get(id(weight), 0):
            names.setdefault(distances[id(weight)], set()).add(name)
    if not names:
        raise UserError("layer_lr_decay, unfreeze_steps: no weight below the top layer is trained; leave them at 1 and 0")
    last = config.unfreeze_steps * max(names)
    if last >= total_steps:
        had = f"the lowest layer would be trained after {counted(last, 'update')}, and the run has {total_steps}"
        raise UserError(f"unfreeze_steps is {config.unfreeze_steps}: {had}; lower it, or raise num_train_epochs")
    return [
        ParamGroup(
            f"{distance}_below_top",
            frozenset(names[distance]),
            peak * config.layer_lr_decay**distance,
            config.unfreeze_steps * distance,
        )
        for distance in sorted(names)
    ]


def distances_from_top(backbone: Backbone) -> dict[int, int]:
    """Return the number of layers above each weight of a layer or embedding in its stack, by the weight's `id`.

    Weights that embeddings share with the output layer count as embeddings.

    Raises:
        UserError: if the layers of the architecture are not found.
    """
    model = backbone.model
    stacks = layer_lists(model)
    if not stacks:
        raise UserError(
            f"layer_lr_decay, unfreeze_steps: the layers of {model.config.model_type} are unknown; leave them off"
        )
    distances: dict[int, int] = {}
    for layers in stacks.values():
        for number, layer in enumerate(layers):
            distances |= {id(weight): len(layers) - 1 - number for weight in layer.parameters()}
    below = max(map(len, stacks.values()))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "embed" in name:
            for weight in module.parameters():
                distances.setdefault(id(weight), below)
    return distances
