"""The layers of a model: how many, which weights are in which, and a smaller model of some."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

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
    with _shortened(model, stacks, step):  # so that what is left out is not copied either
        smaller = copy.deepcopy(model)
    for layers in _stacks_of(smaller, list(stacks)):
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if isinstance(getattr(module, "layer_idx", None), int):  # its place in the cache of keys and values
                    module.layer_idx = number  # type: ignore[assignment]
    for config in _configs(smaller):
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


def _stacks_of(model: PreTrainedModel, names: list[str]) -> Iterator[nn.ModuleList]:
    for name in names:
        layers = model.get_submodule(name)
        assert isinstance(layers, nn.ModuleList)
        yield layers


@contextmanager
def _shortened(model: PreTrainedModel, stacks: dict[str, nn.ModuleList], step: int) -> Iterator[None]:
    """Inside, the model has only the layers that stay."""

    def put(name: str, layers: nn.ModuleList) -> None:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layers)

    for name, layers in stacks.items():
        put(name, nn.ModuleList(list(layers)[::step]))
    try:
        yield
    finally:
        for name, layers in stacks.items():
            put(name, layers)


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs of the model and of its parts."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def _shorten_config(config: PreTrainedConfig, step: int) -> None:
    """Set the config's number of layers, and shorten its lists with an entry for each layer."""
    stored = config.to_dict()
    for name in LAYER_COUNTS:
        if isinstance(stored.get(name), int):
            setattr(config, name, -(-stored[name] // step))
    for name in LAYER_LISTS:
        if isinstance(stored.get(name), list):
            setattr(config, name, stored[name][::step])
