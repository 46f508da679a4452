"""The layers of a model: their number, the FLOPs of a token, the size of its cache, and a smaller model of some layers."""

import copy
import re
from collections.abc import Sequence
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from align.core.errors import UserError
from align.models.backbone.contract import Backbone
from align.models.backbone.encoder import EncoderBackbone
from align.models.backbone.encoder_decoder import EncoderDecoderBackbone
from align.runtime.flops import FlopsProfile, Matrices, Stack, matrices_of

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Names in configs for the number of layers of a decoder, of an encoder, or of each."""
LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Config fields with an entry for each layer."""
Modules = Sequence[tuple[str, nn.Module]]
"""Modules with their names."""


def flops_profile(backbone: Backbone, adapter: str | None) -> FlopsProfile:
    """Return the FLOPs profile of a token with `adapter` in use (the base without adapters if None)."""
    if isinstance(backbone, EncoderDecoderBackbone):
        return _encoder_decoder_profile(backbone, adapter)
    if not isinstance(backbone.model, PreTrainedModel):  # only the matrices of a user's module are known
        return FlopsProfile(Stack(matrices_of(backbone.model.named_modules(), adapter), 0), Matrices())
    base = backbone.model.base_model
    body, below = list(base.named_modules()), _layers_below(cast(PreTrainedModel, base), adapter)
    if not isinstance(backbone, EncoderBackbone):
        return FlopsProfile(_stack(backbone, body, "decoder", adapter, below), _vocabulary(backbone))
    body = [pair for pair in body if not pair[0].startswith("pooler")]  # it reads one token
    stack, config = _stack(backbone, body, "encoder", adapter, below), backbone.model.config
    if groups := getattr(config, "num_hidden_groups", None):  # ALBERT: layers of a group are one layer, applied again
        shared = matrices_of([pair for pair in body if "albert_layer_groups" in pair[0]], adapter)
        again, (trained, frozen, _) = config.num_hidden_layers // groups - 1, stack.matrices
        matrices = Matrices(trained + again * shared.trained, frozen + again * shared.frozen)
        stack = Stack(matrices, stack.attention)
    return FlopsProfile(stack, Matrices())


def _encoder_decoder_profile(backbone: EncoderDecoderBackbone, adapter: str | None) -> FlopsProfile:
    # The gradient of an encoder passes through every layer of the decoder.
    below = () if _first_trained(backbone.encoder, adapter) else _layers_below(backbone.decoder, adapter)
    encoder, decoder = (list(stack.named_modules()) for stack in (backbone.encoder, backbone.decoder))
    # Keys and values of the attention to the prompt: names of T5 and of BART.
    cross = [pair for pair in decoder if re.search(r"(EncDecAttention\.[kv]|encoder_attn\.[kv]_proj)\b", pair[0])]
    rest = [pair for pair in decoder if pair not in cross]
    return FlopsProfile(
        _stack(backbone, rest, "decoder", adapter, below),
        _vocabulary(backbone),
        _stack(backbone, encoder, "encoder", adapter, _layers_below(backbone.encoder, adapter)),
        _matrices(backbone, cross, adapter, below),
    )


def _stack(
    backbone: Backbone, modules: Modules, part: Literal["encoder", "decoder"], adapter: str | None, below: tuple[str, ...]
) -> Stack:
    """Return a stack of layers. The backward pass does not reach the layers `below`."""
    matrices = _matrices(backbone, modules, adapter, below)
    return Stack(matrices, _attention(backbone, part), _attention(backbone, part, len(below)))


def _matrices(backbone: Backbone, modules: Modules, adapter: str | None, below: tuple[str, ...]) -> Matrices:
    share = _expert_share(backbone)
    trained, frozen, _ = matrices_of(modules, adapter, share)
    forward_only = matrices_of([pair for pair in modules if pair[0].startswith(below)], adapter, share).frozen
    return Matrices(trained, frozen - forward_only, forward_only)


def _layers_below(stack: PreTrainedModel, adapter: str | None) -> tuple[str, ...]:
    """Return the names, each with a trailing dot, of the layers below the first trained weight, or all without one."""
    layers = [f"{name}.{number}." for name, found in layer_lists(stack).items() for number in range(len(found))]
    first = _first_trained(stack, adapter)
    lowest = next((number for number, layer in enumerate(layers) if first and first.startswith(layer)), 0)
    return tuple(layers[:lowest] if first else layers)


def _first_trained(stack: nn.Module, adapter: str | None) -> str | None:
    """Return the name of the first weight that is trained while `adapter` is in use, or None."""
    for name, weight in stack.named_parameters():
        parts = name.split(".")
        of_other_adapter = any(part.startswith("lora_") for part in parts) and adapter not in parts
        if weight.requires_grad and not of_other_adapter:
            return name
    return None


def cache_elements_per_token(backbone: Backbone) -> int:
    """Return the number of cached elements per token in sampling: a key and a value in every layer."""
    config = backbone.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # Falcon. For its later form, transformers caches a copy of shared keys and values for each query head.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    return int(2 * _attention(backbone, "decoder") * heads // config.num_attention_heads)


def _expert_share(backbone: Backbone) -> float:
    """Return the fraction of a layer's experts that a token uses. 1 without experts."""
    config = backbone.model.config
    named = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in named if count), None)
    return getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0  # Switch: one


def _attention(backbone: Backbone, part: Literal["encoder", "decoder"], some_layers: int | None = None) -> int:
    """Return layers times the heads of an attention layer times the width of a head (L H Q in PaLM's notation).

    Args:
        some_layers: overrides the number of layers.
    """
    config = backbone.model.config
    head = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    width = config.num_attention_heads * head if head else config.hidden_size
    named = (getattr(config, name, None) for name in (f"{part}_layers", f"num_{part}_layers"))
    layers = next((int(count) for count in named if count), int(config.num_hidden_layers))
    return int((layers if some_layers is None else some_layers) * width)


def _vocabulary(backbone: Backbone) -> Matrices:
    matrix = backbone.model.get_output_embeddings()
    return matrices_of(matrix.named_modules(), None) if matrix is not None else Matrices()


def with_every_layer(model: PreTrainedModel, step: int) -> PreTrainedModel:
    """Return a copy of a model with its first layer and every `step`-th after it, of the encoder and of the decoder.

    The first is always kept, because T5's first layer holds the positions of all layers.
    """
    stacks = layer_lists(model)
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
                if isinstance(getattr(module, "layer_idx", None), int):  # its index in the key-value cache
                    module.layer_idx = number  # type: ignore[assignment]
    configs = (getattr(module, "config", None) for module in smaller.modules())
    for config in {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values():
        _shorten_config(config, step)
    return smaller


def layer_lists(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Return the layer lists of a model by name: one, or one each for encoder and decoder."""
    counts = {getattr(model.config, name, None) for name in LAYER_COUNTS}
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)  # T5's blocks contain lists, too
        if isinstance(module, nn.ModuleList) and len(module) in counts and not inside:
            found[name] = module
    return found


def _shorten_config(config: PreTrainedConfig, step: int) -> None:
    stored = config.to_dict()
    for name in LAYER_COUNTS:
        if isinstance(stored.get(name), int):
            setattr(config, name, -(-stored[name] // step))
    for name in LAYER_LISTS:
        if isinstance(stored.get(name), list):
            setattr(config, name, stored[name][::step])
