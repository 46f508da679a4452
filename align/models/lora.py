"""LoRA settings: from a run's settings or PEFT's `LoraConfig`, and compared with a saved adapter."""

import copy
import os
from collections import Counter
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from align.core.errors import UserError, first_line
from align.core.settings import ModelConfig, Settings, option
from align.models.adapters import adapter_parameters, copy_adapter, delete_added_adapters
from align.models.backbone.kinds import adapter_settings, linear_layers
from align.runtime.progress import console

Config = TypeVar("Config", bound=ModelConfig)

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers except the output matrix."""
START_ADAPTER = "start"
"""Name of the frozen copy of the initial adapter."""
RESERVED_NAMES = (START_ADAPTER, "value", "reference", "reward", "selection")
"""Name prefixes of further adapters on the policy's base."""
SUPPORTED = frozenset(
    {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_rslora", "use_dora"}
    | {"lora_bias", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern"}
    | {"eva_config", "corda_config", "lora_ga_config", "loftq_config"}  # of initializations
    | {"alpha_pattern", "trainable_token_indices", "ensure_weight_tying", "bias"}
    | {"task_type", "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"}
)
"""Fields of `LoraConfig` that may have any value, within the checks of `checked`."""
INITIALIZATIONS = {"true": True, "false": False, "gaussian": "gaussian", "orthogonal": "orthogonal"}
"""Values of `init_lora_weights` that do not change the base and need no data."""


@dataclass(kw_only=True)
class LoraSettings(Settings):
    """Further fields of PEFT's `LoraConfig`, with the same names."""

    use_rslora: bool = option(False, "Scale updates by lora_alpha / sqrt(lora_r) (rank-stabilized LoRA, arXiv 2312.03732).")
    use_dora: bool = option(False, "Train the magnitude and direction of weights separately (DoRA, arXiv 2402.09353).")
    lora_bias: bool = option(False, "Add a bias to the LoRA B matrices.")
    init_lora_weights: Literal["true", "false", "gaussian", "orthogonal"] = option(
        "true", "Initialization of the adapter. true is LoRA's default."
    )
    modules_to_save: list[str] = option([], "Modules to train fully and save with the adapter, such as lm_head.")
    exclude_modules: list[str] = option([], "Modules to exclude from lora_target_modules.")
    layers_to_transform: list[int] = option([], "Indices of the layers to adapt, from 0. Default: all.", ge=0)
    rank_pattern: list[str] = option([], "Rank overrides, each MODULE=RANK.")
    alpha_pattern: list[str] = option([], "Alpha overrides, each MODULE=ALPHA.")


def _as_setting(value: Any) -> Any:
    """Convert a value of `LoraConfig` to `LoraSettings`: PEFT also accepts sets, a name or a number."""
    if isinstance(value, dict):
        return sorted(f"{module}={number:g}" for module, number in value.items())
    if value is None or isinstance(value, bool):
        return bool(value)
    return [value] if isinstance(value, str | int) else sorted(value)


def _peft_fields(settings: LoraSettings | None) -> dict[str, Any]:
    """Return the settings that are not at their defaults as fields of `LoraConfig`."""
    found = {name: value for name, value in vars(settings).items() if value} if settings else {}
    if found:
        found["init_lora_weights"] = INITIALIZATIONS[found["init_lora_weights"]]
    for name, kind in (("rank_pattern", int), ("alpha_pattern", float)):
        if name not in found:
            continue
        entries = found[name]
        try:
            found[name] = {module: kind(number) for module, _, number in (entry.rpartition("=") for entry in entries)}
        except ValueError:
            found[name] = {}
        if not (found[name] and all(found[name]) and min(found[name].values()) > 0):
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"lora.{name} is {', '.join(entries)}, but each must be MODULE=NUMBER, {wanted} above 0")
    return found


def new_lora_config(config: ModelConfig, model: PreTrainedModel, base: str) -> LoraConfig:
    """Return PEFT's settings of a new adapter on `model`, with name or folder `base`, from a run's settings."""
    by_default = linear_layers(model) or ALL_LINEAR
    targets = by_default if config.lora_target_modules == ALL_LINEAR else config.lora_target_modules.split(",")
    further, own = _peft_fields(config.lora), adapter_settings(model)
    own["modules_to_save"] = [*own.get("modules_to_save", ()), *further.pop("modules_to_save", ())] or None
    shape: dict[str, Any] = {"r": config.lora_r, "lora_alpha": config.lora_alpha, "target_modules": targets}
    try:
        return LoraConfig(**shape, base_model_name_or_path=base, **own, **further)
    except ValueError as error:
        raise UserError(f"lora: {first_line(error)}; name the modules in lora_target_modules") from error


def tied_adapter_warning(model: PreTrainedModel) -> str:
    """Return a line for an adapter on one of several layers that share a weight, such as a tied vocabulary matrix, or ""."""
    holders = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    adapted = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer) and any(holders[id(each)] > 1 for each in layer.get_base_layer().parameters())
    ]
    if not adapted:
        return ""
    return (
        f"warning: {adapted[0]} has an adapter and shares its weight with another layer. PEFT's merge_and_unload would "
        "change both: merge the trained adapter by `align model merge`"
    )


def require_supported(given: PeftConfig, is_new: bool = True) -> LoraConfig:
    """Return PEFT's settings if training here implements them.

    Args:
        is_new: whether a new adapter will be created, whose initialization must not change the base.
    """
    if type(given) is not LoraConfig:
        raise UserError(f"peft_config is a {type(given).__name__}: only LoRA adapters are trained; give a LoraConfig")
    if given.bias != "none":
        raise UserError(f"peft_config: bias {given.bias} trains biases of the base, which is the reference; set it to none")
    if is_new and given.init_lora_weights not in INITIALIZATIONS.values():
        raise UserError(
            f"peft_config: init_lora_weights {given.init_lora_weights} changes the base, which is the reference, or needs "
            f"data; set it to one of {', '.join(map(str, INITIALIZATIONS.values()))}"
        )
    for item in fields(given):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        value = getattr(given, item.name)
        if item.name not in SUPPORTED and value and value != default:
            raise UserError(f"peft_config: {item.name} is {value!r}, which is not supported; leave it out")
    return given


def checked(given: PeftConfig, is_new: bool = True) -> LoraConfig:
    """Return a copy of PEFT's settings for training, without dropout. Arguments are as for `require_supported`."""
    settings = copy.copy(require_supported(given, is_new))
    settings.inference_mode = False
    if settings.lora_dropout:
        line = f"lora_dropout {settings.lora_dropout:g} is set to 0: with dropout, the ratio of unchanged weights is not 1"
        if os.environ.get("RANK", "0") == "0":
            console.print(line)
        settings.lora_dropout = 0.0
    return settings


def prepared_lora_config(given: PeftConfig, model: PreTrainedModel, base: str) -> LoraConfig:
    """Return checked settings of a new adapter on `model`, whose kind determines the task."""
    settings, own = checked(given), adapter_settings(model)
    settings.modules_to_save = [*own.get("modules_to_save", ()), *(settings.modules_to_save or ())] or None
    settings.task_type, settings.base_model_name_or_path = own["task_type"], base
    return settings


def with_lora_settings(config: Config, given: PeftConfig, is_new: bool, model_type: str) -> Config:
    """Return a run's settings with the fields of a `LoraConfig`, which the run's folder stores and a resumed run compares.

    Args:
        is_new: see `require_supported`.
        model_type: model type of the base, which determines PEFT's default modules.
    """
    if config.lora_r or config.lora:
        raise UserError("peft_config and the settings lora_r and lora describe one adapter: leave the settings at 0")
    settings = require_supported(given, is_new)
    modules = settings.target_modules or TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type, ALL_LINEAR)
    names = modules if isinstance(modules, str) else ",".join(sorted(modules))
    values = {item.name: _as_setting(getattr(settings, item.name)) for item in fields(LoraSettings)}
    # An existing adapter has no initialization.
    values["init_lora_weights"] = str(settings.init_lora_weights).lower() if is_new else "true"
    further = LoraSettings(**{name: value for name, value in values.items() if value})
    lora = None if further == LoraSettings() else further
    return replace(config, lora_r=settings.r, lora_alpha=float(settings.lora_alpha), lora_target_modules=names, lora=lora)


def require_same_lora(config: ModelConfig, model: PreTrainedModel, stored: PeftConfig) -> None:
    """Raise a UserError if LoRA settings differ from `stored`, the settings of the adapter to continue training."""
    start, merge = f"model '{config.model}' is an adapter with", "set lora_r to 0 to merge the adapter and train all weights"
    layers = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    adapted = config.lora_target_modules
    if _wanted_layers(model, adapted) != layers:
        adapted = ",".join(sorted({name.rsplit(".", 1)[-1] for name in layers}))
    rank, alpha = (getattr(stored, name, "none") for name in ("r", "lora_alpha"))
    for name, actual in (("lora_r", rank), ("lora_alpha", alpha), ("lora_target_modules", adapted)):
        given = getattr(config, name)
        if given != actual:
            raise UserError(
                f"{start} {name} {actual}, which training continues; {name} is {given}: set it to {actual}, or {merge}"
            )
    if (bias := getattr(stored, "bias", "none")) != "none":
        raise UserError(
            f"{start} bias {bias}, which holds biases of its base; only adapters with bias none can be continued: {merge}"
        )
    for name, value in vars(config.lora).items() if config.lora else ():
        if name == "init_lora_weights" or value == getattr(LoraSettings(), name):  # an adapter that exists has its weights
            continue
        actual = getattr(stored, name, None)
        if _as_setting(value) != _as_setting(actual):
            raise UserError(f"{start} {name} {actual}, which training continues; lora.{name} is {value}: leave it out")


def _wanted_layers(model: PreTrainedModel, targets: str) -> set[str]:
    if targets != ALL_LINEAR:
        endings = tuple(f".{target}" for target in targets.split(","))
        return {name for name, _ in model.named_modules() if f".{name}".endswith(endings)}
    layers = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    # Layers inside LoRA layers, and full modules in the adapter.
    whole = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    inside = tuple(f"{name}." for name in (*layers, *whole))
    linear = {name: module for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))}
    vocabulary, of_experts = model.get_output_embeddings(), linear_layers(model)
    found = {name for name, module in linear.items() if module is not vocabulary and not name.startswith(inside)}
    return (found if of_experts is None else found & set(of_experts)) | layers


def train_active_adapter(peft_model: PeftModel) -> str:
    """Make the active adapter of a PEFT model trainable, keep a frozen copy as the initial model, and return its name."""
    active = peft_model.active_adapters
    if len(active) != 1:
        raise UserError(
            f"the PEFT model has {len(active)} active adapters ({', '.join(active)}): activate one by set_adapter"
        )
    name = active[0]
    if name.startswith(RESERVED_NAMES):
        raise UserError(
            f"the PEFT adapter is called '{name}', a name of this package's own: give it another, such as default"
        )
    delete_added_adapters(peft_model, kept=name)
    if START_ADAPTER in peft_model.peft_config:
        raise UserError(
            f"the PEFT model has an adapter '{START_ADAPTER}', a name of this package's own: give it another, or delete it"
        )
    peft_model.peft_config[name] = checked(peft_model.peft_config[name], is_new=False)
    copy_adapter(peft_model, name, START_ADAPTER)
    model = peft_model.get_base_model()
    trained = adapter_parameters(model, name).values()
    model.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    peft_model.set_adapter(name)
    for weight in adapter_parameters(model, START_ADAPTER).values():
        weight.requires_grad_(False)
    return name
