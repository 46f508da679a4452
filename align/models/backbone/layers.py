"""The layers of a model: their number, the FLOPs of a token, the size of its cache, and a smaller model of some layers."""

import copy
import re
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


def flops_profile(backbone: Backbone, adapter: str | None) -> FlopsProfile:
    """Return all that the FLOPs of a token depend on, with `adapter` in use (None: the bare base)."""
    if isinstance(backbone, EncoderDecoderBackbone):
        return _encoder_decoder_profile(backbone, adapter)
    body = list(backbone.model.base_model.named_modules())
    if not isinstance(backbone, EncoderBackbone):
        matrices = matrices_of(body, adapter, _expert_share(backbone))
        return FlopsProfile(Stack(matrices, _attention(backbone, "decoder")), _vocabulary(backbone))
    body = [pair for pair in body if not pair[0].startswith("pooler")]  # it reads one token
    matrices, config = matrices_of(body, adapter), backbone.model.config
    if groups := getattr(config, "num_hidden_groups", None):  # ALBERT: layers of a group are one layer, applied again
        shared = matrices_of([pair for pair in body if "albert_layer_groups" in pair[0]], adapter)
        again = config.num_hidden_layers // groups - 1
        matrices = Matrices(matrices.trained + again * shared.trained, matrices.frozen + again * shared.frozen)
    return FlopsProfile(Stack(matrices, _attention(backbone, "encoder")), Matrices())


def _encoder_decoder_profile(backbone: EncoderDecoderBackbone, adapter: str | None) -> FlopsProfile:
    share, decoder = _expert_share(backbone), list(backbone.decoder.named_modules())
    # Keys and values of the attention to the prompt: names of T5 and of BART.
    cross = [pair for pair in decoder if re.search(r"(EncDecAttention\.[kv]|encoder_attn\.[kv]_proj)\b", pair[0])]
    of_prompt, both = matrices_of(cross, adapter), matrices_of(decoder, adapter, share)
    of_response = Matrices(both.trained - of_prompt.trained, both.frozen - of_prompt.frozen)
    encoder = Stack(matrices_of(backbone.encoder.named_modules(), adapter, share), _attention(backbone, "encoder"))
    return FlopsProfile(Stack(of_response, _attention(backbone, "decoder")), _vocabulary(backbone), encoder, of_prompt)


def cache_elements_per_token(backbone: Backbone) -> int:
    """Return the numbers that sampling keeps for each token: a key and a value in every layer."""
    config = backbone.model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # Falcon. Of its later form, transformers keeps a copy of shared keys and values for each query head.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    return int(2 * _attention(backbone, "decoder") * heads // config.num_attention_heads)


def _expert_share(backbone: Backbone) -> float:
    """Return the share of a layer's experts that a token uses; 1 if there are none."""
    config = backbone.model.config
    named = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in named if count), None)
    return getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0  # Switch: one


def _attention(backbone: Backbone, part: Literal["encoder", "decoder"]) -> int:
    """Layers times the heads of an attention layer times the width of a head (L H Q in PaLM's notation)."""
    config = backbone.model.config
    head = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    width = config.num_attention_heads * head if head else config.hidden_size
    named = (getattr(config, name, None) for name in (f"{part}_layers", f"num_{part}_layers"))
    layers = next((int(count) for count in named if count), int(config.num_hidden_layers))
    return int(layers * width)


def _vocabulary(backbone: Backbone) -> Matrices:
    matrix = backbone.model.get_output_embeddings()
    return matrices_of(matrix.named_modules(), None) if matrix is not None else Matrices()


def with_every_layer(model: PreTrainedModel, step: int) -> PreTrainedModel:
    """Return a copy of a model with its first layer and every `step`-th after it, of the encoder and of the decoder.

    The first is always kept: T5's holds the positions of all.
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
