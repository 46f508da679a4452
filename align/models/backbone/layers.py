"""The layers of a model: how many, and a smaller model of some."""

import copy
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from align.core.errors import UserError

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Names in configs for the number of layers of a decoder, of an encoder, or of each."""
LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Config fields with an entry for each layer."""


def layer_count(config: PreTrainedConfig, part: Literal["encoder", "decoder"]) -> int:
    """Return the number of layers of a model, or of one of its two halves."""
    named = (getattr(config, name, None) for name in (f"{part}_layers", f"num_{part}_layers"))
    return next((int(count) for count in named if count), int(config.num_hidden_layers))


def with_every_layer(model: PreTrainedModel, step: int) -> PreTrainedModel:
    """Return a copy of a model with its first layer and every `step`-th after it, of the encoder and of the decoder.

    The first is always kept: T5's holds the positions of all.

    Raises:
        UserError: if only one layer would be left, or the architecture's layers cannot be told apart.
    """
    stacks = _stacks(model)
    if not stacks:
        raise UserError(f"layers of a {model.config.model_type} cannot be left out: name a smaller model as the student")
    shortest = min(len(layers) for layers in stacks.values())
    if shortest < 2:
        raise UserError("the teacher has a single layer: there is none to leave out; name a smaller model as the student")
    left_out = [layer for layers in stacks.values() for number, layer in enumerate(layers) if number % step]
    smaller = copy.deepcopy(model, {id(layer): layer for layer in left_out})  # these are not copied
    for name in stacks:
        layers = nn.ModuleList(list(cast(nn.ModuleList, smaller.get_submodule(name)))[::step])
        smaller.set_submodule(name, layers)
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if isinstance(getattr(module, "layer_idx", None), int):  # its place in the cache of keys and values
                    module.layer_idx = number  # type: ignore[assignment]
    configs = (getattr(module, "config", None) for module in smaller.modules())
    for config in {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values():
        _shorten_config(config, step)
    return smaller


def _stacks(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Return the lists of layers by their names: one of a decoder, two of an encoder-decoder."""
    counts = {getattr(model.config, name, None) for name in LAYER_COUNTS}
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)  # T5's blocks hold lists, too
        if isinstance(module, nn.ModuleList) and len(module) in counts and not inside:
            found[name] = module
    return found


def _shorten_config(config: PreTrainedConfig, step: int) -> None:
    """Set the config's number of layers, and shorten its lists with an entry for each layer."""
    stored = config.to_dict()
    for name in LAYER_COUNTS:
        if isinstance(stored.get(name), int):
            setattr(config, name, -(-stored[name] // step))
    for name in LAYER_LISTS:
        if isinstance(stored.get(name), list):
            setattr(config, name, stored[name][::step])
