"""The policy's weights in vLLM's format: names of a plain checkpoint, with the adapter merged."""

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from align.core.errors import UserError
from align.models.backbone import Backbone
from align.models.quantization import quantization_of

BASE = ".base_layer."


def require_servable(backbone: Backbone, adapter: str | None) -> None:
    """Reject adapters that cannot be merged into the base weights.

    Raises:
        UserError: if the adapter is not plain LoRA, or adapts tied input and output embeddings.
    """
    model = backbone.model
    if quantization := quantization_of(model.config):
        raise UserError(
            f"engine: a quantized base ({quantization}) is not supported with vLLM; set engine transformers, or leave out "
            "load_in_4bit and load_in_8bit"
        )
    into, out = model.get_input_embeddings(), model.get_output_embeddings()
    tied = {id(_base(layer)) for layer in (into, out)} if _base(into).weight is _base(out).weight else set[int]()
    for path, layer in model.named_modules():
        whole = isinstance(layer, AuxiliaryTrainingWrapper)
        if not whole and (not isinstance(layer, BaseTunerLayer) or adapter not in getattr(layer, "r", {})):
            continue
        plain = isinstance(layer, LoraLayer) and adapter not in layer.lora_variant and not layer.lora_bias.get(adapter or "")
        if whole or not plain:
            raise UserError(f"engine: the adapter on '{path}' is not plain LoRA and cannot be merged for vLLM")
        if id(_base(layer)) in tied:
            raise UserError(
                f"engine: LoRA on '{path}', which is tied to another matrix, cannot be merged for vLLM; remove "
                "it from lora_target_modules"
            )


def _base(layer: nn.Module) -> nn.Module:
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


@torch.no_grad()
def served_weights(backbone: Backbone, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the policy, tied weights once.

    The base is not changed. PEFT merges by adding to the base in place and subtracting afterward. Each time, this would
    change a bfloat16 base, the reference of PPO's KL, by a rounding error.
    """
    for name, weight, layer in _weights_with_layers(backbone, adapter):
        whole = weight.data
        if layer is not None:
            whole = (weight.float() + layer.get_delta_weight(adapter).float()).to(weight.dtype)
        yield from _as_on_disk(backbone, name, whole)


def _as_on_disk(backbone: Backbone, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Map a weight to its checkpoint names. transformers renames GPT-NeoX's output and stacks experts on loading."""
    yield from revert_weight_conversion(backbone.model, {name: weight}).items()


def weight_layout(backbone: Backbone, adapter: str | None) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype and shape of each of `served_weights`, in order, as vLLM's server expects them."""
    return [
        (plain, str(shape.dtype).removeprefix("torch."), list(shape.shape))
        for name, weight, _ in _weights_with_layers(backbone, adapter)
        for plain, shape in _as_on_disk(backbone, name, weight.data.to("meta"))
    ]


def _weights_with_layers(backbone: Backbone, adapter: str | None) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield the base weights by model name, each with the layer whose adapter is added (or None)."""
    layers = {path: layer for path, layer in backbone.model.named_modules() if isinstance(layer, BaseTunerLayer)}
    adapter_weights = {
        id(weight)
        for layer in layers.values()
        for name, weight in layer.named_parameters()  # type: ignore[attr-defined]  # each is a module too
        if not name.startswith(BASE[1:])
    }
    for name, weight in backbone.model.named_parameters():
        if id(weight) in adapter_weights:
            continue
        path, inside, leaf = name.rpartition(BASE)
        layer = layers.get(path) if inside and leaf == "weight" else None
        yield name.replace(BASE, "."), weight, layer if adapter in getattr(layer, "r", {}) else None
