"""LoRA adapters: loading, copying and merging them, and a faster LoRA layer."""

import copy
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from align.core.errors import UserError, first_line, reason
from align.models.backbone import Backbone
from align.models.backbone.determinism import disable_dropout
from align.models.backbone.kinds import has_separate_encoder
from align.models.quantization import quantization_of
from align.runtime.sharding import gathered_parameters, is_sharded

ADDED = "adapters_of_align"
"""Attribute of a PEFT model with the names of the adapters that this package added."""


def load_adapter(model: PreTrainedModel, folder: str, name: str) -> PeftModel:
    """Load a saved adapter, frozen, onto a model without one. Raise a UserError if it does not fit or lacks weights."""
    stored = _stored_names(folder)
    try:
        peft_model = PeftModel.from_pretrained(model, folder, adapter_name=name, autocast_adapter_dtype=False)
    except Exception as error:  # an external config, of which PEFT checks little
        raise UserError(f"adapter '{folder}': it does not fit its base ({reason(error)})") from error
    _finish_loading(peft_model, folder, name, stored)
    return peft_model


def add_adapter(backbone: Backbone, folder: str, name: str) -> None:
    """Load a saved adapter, frozen, onto a backbone with adapters. For errors, see `load_adapter`."""
    assert backbone.peft is not None
    stored = _stored_names(folder)
    try:
        backbone.peft.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    except Exception as error:  # an external config, of which PEFT checks little
        raise UserError(f"adapter '{folder}': it does not fit this model ({reason(error)})") from error
    vars(backbone.peft).setdefault(ADDED, set()).add(name)
    _finish_loading(backbone.peft, folder, name, stored)
    disable_dropout(backbone.model)


def adapter_parameters(model: torch.nn.Module, adapter: str) -> dict[str, torch.nn.Parameter]:
    """Return the weights of one adapter by their names in `model`, in the order of its layers.

    Names do not identify them: PEFT writes `lora_A.policy.weight` but `lora_embedding_A.policy`, and a layer of the base
    may be called `value`.
    """
    own: set[int] = set()
    for module in model.modules():
        if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            continue
        for attribute in module.adapter_layer_names:
            by_adapter = attrgetter(attribute)(module)
            if adapter in by_adapter:
                part = by_adapter[adapter]
                own.update(map(id, part.parameters() if isinstance(part, torch.nn.Module) else [part]))
    return {name: weight for name, weight in model.named_parameters() if id(weight) in own}


def match_dtype(peft_model: PeftModel, adapter: str) -> None:
    """Convert an adapter on a quantized base to the base's dtype. PEFT leaves it in float32."""
    model = cast(PreTrainedModel, peft_model.get_base_model())
    if quantization_of(model.config):
        for weight in adapter_parameters(model, adapter).values():
            weight.data = weight.data.to(model.dtype)


def copy_adapter(peft_model: PeftModel, source: str, target: str) -> None:
    """Add the trainable adapter `target` with the shape and weights of the frozen adapter `source`."""
    settings: PeftConfig = copy.copy(peft_model.peft_config[source])
    settings.inference_mode = False
    initialization = getattr(settings, "init_lora_weights", None)
    if isinstance(settings, LoraConfig):
        settings.init_lora_weights = True  # others, such as pissa, subtract the new adapter from the base's weights
    peft_model.add_adapter(target, settings, autocast_adapter_dtype=False)
    vars(peft_model).setdefault(ADDED, set()).add(target)
    copies = adapter_parameters(peft_model, target).values()
    for original, weight in zip(adapter_parameters(peft_model, source).values(), copies, strict=True):
        if weight.dtype != original.dtype:  # PEFT adds them in the base's format
            weight.data = weight.data.to(original.dtype)
    if isinstance(settings, LoraConfig):
        settings.init_lora_weights = initialization  # type: ignore[assignment]
    stored = get_peft_model_state_dict(peft_model, adapter_name=source, save_embedding_layers=False)
    weights = {key: value.clone() for key, value in stored.items()}
    set_peft_model_state_dict(peft_model, weights, adapter_name=target)
    peft_model.set_requires_grad(source, requires_grad=False)
    peft_model.set_requires_grad(target)
    disable_dropout(peft_model)


def delete_added_adapters(peft_model: PeftModel, kept: str) -> None:
    """Delete the adapters that an earlier trainer added to a PEFT model, except `kept`."""
    for name in sorted((vars(peft_model).pop(ADDED, set()) & peft_model.peft_config.keys()) - {kept}):
        peft_model.delete_adapter(name)


def merge_adapter(peft_model: PeftModel, folder: str) -> PreTrainedModel:
    """Add an adapter to its base's weights, one layer at a time if they are sharded; return the base's model."""
    model = cast(PreTrainedModel, peft_model.get_base_model())
    was_tied, tied = model.config.tie_word_embeddings, dict(model.all_tied_weights_keys)  # PEFT may change both
    _untie_adapted_weights(model, folder)
    try:
        for layer in peft_model.modules():
            if isinstance(layer, BaseTunerLayer) and any(map(is_sharded, layer.get_base_layer().parameters())):
                with gathered_parameters(layer.get_base_layer().parameters(), changed=True):
                    layer.merge()
        merged = cast(PreTrainedModel, peft_model.merge_and_unload())  # merged layers have only a base
    except (RuntimeError, ValueError, NotImplementedError) as error:  # B has a bias and the base none; kinds of adapters
        raise UserError(f"adapter '{folder}': PEFT cannot merge it into its base ({reason(error)})") from error
    embedding, vocabulary = merged.get_input_embeddings(), merged.get_output_embeddings()
    weights = dict(merged.named_parameters(remove_duplicate=False))
    for name, source in tied.items():  # T5's encoder and decoder share an embedding; only the vocabulary matrix may differ
        apart = name in weights and weights[name] is not weights.get(source)
        if apart and merged.get_submodule(name.rpartition(".")[0]) is not vocabulary:
            raise UserError(
                f"adapter '{folder}': it cannot be merged, because it has a whole copy of a weight that its base shares "
                f"between {name} and {source}"
            )
    if vocabulary is not None and was_tied and vocabulary.weight is not embedding.weight:
        # Encoder and decoder also share their embedding through this setting, and UMT5 scales states by it.
        merged.config.tie_word_embeddings = has_separate_encoder(merged.config)
        merged.all_tied_weights_keys = {}
    return merged


def _untie_adapted_weights(model: PreTrainedModel, folder: str) -> None:
    """Give each adapted layer a copy of a shared weight, such as an embedding tied to the vocabulary matrix.

    An adapter changes only one of the layers. Merged into the shared weight, it would change the others too.
    """
    holders = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        for name, weight in base.named_parameters(recurse=False):
            if holders[id(weight)] < 2:
                continue
            if holders[id(weight)] > 2 or is_sharded(weight):  # T5 finds its embedding under four names
                where = ", under ZeRO-3" if is_sharded(weight) else ""
                raise UserError(
                    f"adapter '{folder}': it adapts one of {holders[id(weight)]} layers that share a weight and cannot be "
                    f"merged{where}; train an adapter on other layers, without the embedding and the vocabulary matrix"
                )
            setattr(base, name, torch.nn.Parameter(weight.detach().clone(), weight.requires_grad))


def changes_base(settings: PeftConfig) -> bool:
    """Return whether loading an adapter changes weights of its base, by biases or by its initialization."""
    initialization = getattr(settings, "init_lora_weights", True)
    plain = isinstance(initialization, bool) or initialization in ("gaussian", "eva")
    return not plain or getattr(settings, "bias", "none") != "none" or bool(getattr(settings, "kasa_config", None))


def _stored_names(folder: str) -> set[str]:
    """Return the names of an adapter's tensors on disk. Reject a missing safetensors file: PEFT would read a pickle."""
    path = Path(folder) / "adapter_model.safetensors"
    if not path.is_file():
        raise UserError(
            f"adapter '{folder}': {path.name} is missing (weights in any other form, such as .bin, are not read)"
        )
    try:
        with safe_open(path, framework="pt") as stored:
            return set(stored.keys())
    except Exception as error:  # safetensors raises a custom exception type
        raise UserError(f"adapter '{folder}': {path.name} is broken ({first_line(error)})") from error


def _finish_loading(peft_model: PeftModel, folder: str, name: str, stored: set[str]) -> None:
    """Record the loaded base in an adapter. Raise a UserError if the adapter lacks tensors or contains NaN.

    PEFT would look up the published base on the hub, and only warns of missing tensors.
    """
    base = cast(PreTrainedModel, peft_model.get_base_model())
    peft_model.peft_config[name].base_model_name_or_path = base.config.name_or_path
    match_dtype(peft_model, name)
    expected = get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False)
    for key, weight in expected.items():
        if not torch.isfinite(weight).all():
            raise UserError(f"adapter '{folder}': its weight '{key}' holds NaN or infinite numbers")
    if missing := sorted(expected.keys() - stored):
        raise UserError(
            f"adapter '{folder}': {len(missing)} of its {len(expected)} tensors are not in its file, '{missing[0]}' for one"
        )


class LoraLinear(Linear):
    """PEFT's `Linear`, W x + scale * B A x, in another order: the scale multiplies the output of A.

    On a CPU, this saves two of five passes over memory.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[.., in] -> [.., out]; anything but plain LoRA with one adapter is left to PEFT."""
        names = self.active_adapters
        name = names[0] if len(names) == 1 else ""
        plain = name in self.lora_A and name not in self.lora_variant and not (args or kwargs)
        plain = plain and not self.lora_bias[name]  # PEFT scales the bias of B as well
        if not plain or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        result: Tensor = self.base_layer(x)
        # Call the modules, which gather their weights under ZeRO-3.
        into, out = self.lora_A[name], self.lora_B[name]
        low = into(self.lora_dropout[name](x.to(cast(Tensor, into.weight).dtype)))
        return result.add_(out(low * self.scaling[name]))


def faster_lora(model: PeftModel) -> PeftModel:
    """Replace the class of the LoRA layers of `model` with `LoraLinear`. Names, weights and files are unchanged."""
    for layer in model.modules():
        if type(layer) is Linear:
            layer.__class__ = LoraLinear
    return model
