"""From a model's name to a backbone: folders, hub names, built-in models, LoRA adapters; never by pickle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from align.config import ModelConfig
from align.errors import UserError
from align.files import read_json
from align.models.backbone import Backbone, attention_kernel, model_class, task_type, wrap
from align.models.lora import speed_up
from align.models.zoo import resolve_model
from align.tokenization import Tokenization, first_line, load_tokenization


@dataclass(frozen=True)
class Loaded:
    """A model ready to be trained or sampled from.

    Attributes:
        adapter: the adapter that is trained, or None where all weights are.
        start_adapter: the frozen adapter that the training starts from; None: the bare base is the start.
        base: name or folder of the weights under the adapters.
    """

    backbone: Backbone
    tokenization: Tokenization
    base: str
    adapter: str | None = None
    start_adapter: str | None = None


def load(
    config: ModelConfig, dtype: torch.dtype, adapter: str = "policy", may_be_classifier: bool = False, layers: int = 0
) -> Loaded:
    """Load a model and its tokenizer, with a trainable adapter if the config asks for one.

    A checkpoint that is itself an adapter goes on as one: its weights are kept frozen as the start (PPO's reference)
    and copied into the adapter that is trained. Asked to train all weights, it is merged into its base.

    Args:
        adapter: what to call the trained adapter.
        may_be_classifier: whether a saved reward model, which has no vocabulary matrix, will do.
        layers: keep the first layers alone; 0: all.

    Raises:
        UserError: if the model cannot be had or its architecture is not supported.
    """
    source = str(resolve_model(config.model))
    base, start = base_of(source)
    model = load_weights(base, dtype, layers)
    if model.get_output_embeddings() is None and not may_be_classifier:
        raise UserError(f"model '{config.model}': it is a reward model, which has no vocabulary to speak with")
    tokenization = load_tokenization(source, config.chat_template)
    if start:
        peft_model = _with_adapter(model, source, "start" if config.lora_rank else "merged")
        if not config.lora_rank:
            merged = peft_model.merge_and_unload().requires_grad_(True)  # PEFT had frozen the base
            return _finish(config, Loaded(wrap(merged), tokenization, base))
        copy_adapter(peft_model, "start", adapter)
    elif config.lora_rank:
        targets = config.lora_targets if config.lora_targets == "all-linear" else config.lora_targets.split(",")
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT divides it: a float is as good
            target_modules=targets,
            task_type=task_type(model),
            base_model_name_or_path=base,
        )
        try:
            peft_model = get_peft_model(model, lora, adapter_name=adapter, autocast_adapter_dtype=False)
        except ValueError as error:
            raise UserError(f"lora_targets '{config.lora_targets}': {first_line(error)}") from error
    else:
        return _finish(config, Loaded(wrap(model), tokenization, base))
    backbone = wrap(model, speed_up(peft_model))
    return _finish(config, Loaded(backbone, tokenization, base, adapter, "start" if start else None))


def _finish(config: ModelConfig, loaded: Loaded) -> Loaded:
    if config.gradient_checkpointing:
        # transformers recomputes only in training mode, where an adapter made elsewhere would also drop out.
        for module in loaded.backbone.model.train().modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        settings: dict[str, Any] = {"use_reentrant": False}
        if loaded.adapter:
            settings["context_fn"] = loaded.backbone.recompute_contexts
        loaded.backbone.model.gradient_checkpointing_enable(settings)
        if loaded.adapter:
            loaded.backbone.model.enable_input_require_grads()
    return loaded


def base_of(source: str) -> tuple[str, bool]:
    """The folder or name of the whole weights, and whether `source` is an adapter on them."""
    if not (Path(source) / "adapter_config.json").exists():
        return source, False
    base = read_json(Path(source) / "adapter_config.json").get("base_model_name_or_path")
    if not base:
        raise UserError(f"{source}/adapter_config.json: base_model_name_or_path is empty; name the model under the adapter")
    if Path(base).exists() or Path(base).is_absolute():
        return str(resolve_model(base)), True
    # The adapter may have been trained in another working directory, with its base beside it: runs/sft, runs/reward.
    beside = (parent / base for parent in Path(source).resolve().parents)
    found = next((folder for folder in beside if (folder / "config.json").exists()), None)
    return str(found or resolve_model(base)), True


def load_config(source: str) -> PreTrainedConfig:
    """A model's config with dropout off in every part.

    PPO needs the same log-probs each time a text is read (the N implementation details); the others lose little by it.

    Raises:
        UserError: if there is no such model, or the hub cannot be reached.
    """
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"model '{source}': no such folder, and the hub did not give it ({first_line(error)})") from error
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("_pdrop")):
            setattr(config, key, 0.0)
    return config


def load_weights(source: str, dtype: torch.dtype, layers: int = 0) -> PreTrainedModel:
    """A transformers model in the class that fits it, from safetensors alone.

    Args:
        layers: keep the first layers alone, an encoder's where there is one; 0: all.

    Raises:
        UserError: if the weights are missing, broken, or only there as pickle, or have fewer layers.
    """
    config = load_config(source)
    if layers:
        if layers > config.num_hidden_layers:
            raise UserError(f"layers is {layers}, but model '{source}' has {config.num_hidden_layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    try:
        model, report = model_class(config).from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention_kernel(config),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model '{source}': its weights cannot be loaded ({first_line(error)})") from error
    except Exception as error:  # safetensors raises a type of its own for a broken file
        if type(error).__name__ == "SafetensorError":
            raise UserError(f"model '{source}': its weights are broken ({first_line(error)})") from error
        raise
    if report["missing_keys"]:  # transformers would make them up at random
        raise UserError(f"model '{source}': its weights lack '{min(report['missing_keys'])}'")
    return model


def _with_adapter(model: PreTrainedModel, folder: str, name: str) -> PeftModel:
    stored = _stored_names(folder)
    try:
        peft_model = PeftModel.from_pretrained(model, folder, adapter_name=name, autocast_adapter_dtype=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"adapter '{folder}': it does not fit its base ({first_line(error)})") from error
    _require_all(peft_model, folder, name, stored)
    return peft_model


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


def _require_all(peft_model: PeftModel, folder: str, name: str, stored: set[str]) -> None:
    """Refuse an adapter that lacks weights: PEFT only warns, and goes on with an adapter that does nothing.

    Raises:
        UserError: if a tensor that the adapter's config promises is not in its file.
    """
    expected = get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False)
    missing = sorted(expected.keys() - stored)
    if missing:
        raise UserError(
            f"adapter '{folder}': {len(missing)} of its {len(expected)} tensors are not in its file, '{missing[0]}' for one"
        )


def add_adapter(backbone: Backbone, folder: str, name: str) -> None:
    """Load a saved adapter, frozen, onto a backbone that carries adapters already.

    Raises:
        UserError: if it does not fit.
    """
    assert backbone.peft is not None
    stored = _stored_names(folder)
    try:
        backbone.peft.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"adapter '{folder}': it does not fit this model ({first_line(error)})") from error
    _require_all(backbone.peft, folder, name, stored)


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
