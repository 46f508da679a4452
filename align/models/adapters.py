"""LoRA adapters: loading them from disk whole or not at all, copying them, and comparing their settings."""

from pathlib import Path
from typing import cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from align.errors import UserError, first_line, reason
from align.models.backbone import Backbone, linear_layers
from align.runtime.gathering import whole_weights
from align.runtime.sharding import is_sharded
from align.settings import ModelConfig

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the output matrix."""


def load_adapter(model: PreTrainedModel, folder: str, name: str) -> PeftModel:
    """Put a saved adapter, frozen, onto a model that has none.

    Raises:
        UserError: if the adapter does not fit the model or lacks weights.
    """
    stored = _stored_names(folder)
    try:
        peft_model = PeftModel.from_pretrained(model, folder, adapter_name=name, autocast_adapter_dtype=False)
    except Exception as error:  # its config is of elsewhere, and PEFT checks little of it
        raise UserError(f"adapter '{folder}': it does not fit its base ({reason(error)})") from error
    _name_local_base(peft_model, name)
    _require_all_tensors(peft_model, folder, name, stored)
    return peft_model


def add_adapter(backbone: Backbone, folder: str, name: str) -> None:
    """Load a saved adapter, frozen, onto a backbone that carries adapters already.

    Raises:
        UserError: if it does not fit.
    """
    assert backbone.peft is not None
    stored = _stored_names(folder)
    try:
        backbone.peft.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    except Exception as error:  # its config is of elsewhere, and PEFT checks little of it
        raise UserError(f"adapter '{folder}': it does not fit this model ({reason(error)})") from error
    _name_local_base(backbone.peft, name)
    _require_all_tensors(backbone.peft, folder, name, stored)


def copy_adapter(peft_model: PeftModel, source: str, target: str) -> None:
    """Add the trainable adapter `target` with the shape and weights of `source`, which stays as it is, frozen."""
    lora: PeftConfig = peft_model.peft_config[source]
    lora.inference_mode = False
    peft_model.add_adapter(target, lora, autocast_adapter_dtype=False)
    weights = {key: value.clone() for key, value in get_peft_model_state_dict(peft_model, adapter_name=source).items()}
    set_peft_model_state_dict(peft_model, weights, adapter_name=target)
    for name, weight in peft_model.named_parameters():
        if f".{source}." in name or f".{target}." in name:
            weight.requires_grad_(f".{target}." in name)


def merge_adapter(peft_model: PeftModel) -> PreTrainedModel:
    """Add an adapter to its base's weights, one layer at a time where these are sharded; returns the base's model."""
    for layer in peft_model.modules():
        if isinstance(layer, BaseTunerLayer) and any(map(is_sharded, layer.get_base_layer().parameters())):
            with whole_weights(layer.get_base_layer().parameters(), changed=True):
                layer.merge()
    return cast(PreTrainedModel, peft_model.merge_and_unload())  # of layers that are merged already only the base is left


def require_lora_settings(config: ModelConfig, model: PreTrainedModel, stored: PeftConfig) -> None:
    """Refuse LoRA settings that differ from those of the adapter that training starts from: its shape cannot change.

    Args:
        model: with the adapter's layers inside.
        stored: the adapter's own settings.

    Raises:
        UserError: if the config's rank, alpha or targets differ.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if config.lora_targets == ALL_LINEAR:
        # Layers inside LoRA layers, and modules that the adapter holds whole.
        whole = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
        inside = tuple(f"{name}." for name in (*layers, *whole))
        linear = {name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))}
        wanted = {name for name in linear if not name.startswith(inside)} | layers.keys()
        wanted -= {name for name, module in model.named_modules() if module is model.get_output_embeddings()} - layers.keys()
        of_experts = linear_layers(model)
        wanted = wanted & (set(of_experts) | layers.keys()) if of_experts is not None else wanted
    else:
        targets = tuple(f".{target}" for target in config.lora_targets.split(","))
        wanted = {name for name, _ in model.named_modules() if f".{name}".endswith(targets)}
    values = {
        "lora_rank": (config.lora_rank, getattr(stored, "r", "none")),
        "lora_alpha": (config.lora_alpha, getattr(stored, "lora_alpha", "none")),
        "lora_targets": (
            config.lora_targets,
            config.lora_targets if wanted == layers.keys() else ",".join(sorted({n.rsplit(".", 1)[-1] for n in layers})),
        ),
    }
    for name, (given, actual) in values.items():
        if given != actual:
            raise UserError(
                f"model '{config.model}' is an adapter with {name} {actual}, which training continues; {name} is {given}: "
                f"set it to {actual}, or set lora_rank to 0 to merge the adapter and train all weights"
            )


def _name_local_base(peft_model: PeftModel, name: str) -> None:
    """Give an adapter the base that it is on: PEFT would look up the published one on the hub whenever it reads weights."""
    model = cast(PreTrainedModel, peft_model.get_base_model())
    peft_model.peft_config[name].base_model_name_or_path = model.config.name_or_path


def _stored_names(folder: str) -> set[str]:
    """The names of an adapter's tensors on disk.

    Raises:
        UserError: if its safetensors file is missing (PEFT would turn to a pickle) or broken.
    """
    path = Path(folder) / "adapter_model.safetensors"
    if not path.is_file():
        raise UserError(
            f"adapter '{folder}': {path.name} is missing (weights in any other form, such as .bin, are not read)"
        )
    try:
        with safe_open(path, framework="pt") as stored:
            return set(stored.keys())
    except Exception as error:  # safetensors raises a type of its own
        raise UserError(f"adapter '{folder}': {path.name} is broken ({first_line(error)})") from error


def _require_all_tensors(peft_model: PeftModel, folder: str, name: str, stored: set[str]) -> None:
    """Refuse an adapter that lacks weights or holds NaN: PEFT only warns, and continues with an adapter that does nothing.

    Raises:
        UserError: if a tensor that the adapter's config promises is not in its file, or is not finite.
    """
    expected = get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False)
    missing = sorted(expected.keys() - stored)
    for key, weight in expected.items():
        if not torch.isfinite(weight).all():
            raise UserError(f"adapter '{folder}': its weight '{key}' holds NaN or infinite numbers")
    if missing:
        raise UserError(
            f"adapter '{folder}': {len(missing)} of its {len(expected)} tensors are not in its file, '{missing[0]}' for one"
        )
