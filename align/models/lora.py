"""The settings of a new LoRA adapter: from a run's settings, or a `LoraConfig` of PEFT."""

import copy
import os
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import PreTrainedModel

from align.core.errors import UserError, first_line
from align.core.settings import ModelConfig, Settings, option
from align.models.adapters import ALL_LINEAR, adapter_parameters, copy_adapter, delete_added_adapters
from align.models.backbone import adapter_settings, linear_layers
from align.runtime.environment import console

Config = TypeVar("Config", bound=ModelConfig)

START_ADAPTER = "start"
"""The name of the frozen copy of the adapter that training starts from."""
RESERVED_NAMES = (START_ADAPTER, "value", "reference", "reward", "selection")
"""Beginnings of names that further adapters on the policy's base have."""
SUPPORTED = frozenset(
    {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_rslora", "use_dora"}
    | {"lora_bias", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern"}
    | {"eva_config", "corda_config", "lora_ga_config", "loftq_config"}  # of initializations
    | {"alpha_pattern", "trainable_token_indices", "ensure_weight_tying", "bias"}
    | {"task_type", "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"}
)
"""Fields of `LoraConfig` that may have any value, within the checks of `checked`."""
INITIALIZATIONS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is and need no data."""


@dataclass(kw_only=True)
class LoraSettings(Settings):
    """Further fields of PEFT's `LoraConfig`, under its names."""

    use_rslora: bool = option(False, "multiply updates by alpha / sqrt(rank) (rank-stabilized LoRA, arXiv 2312.03732)")
    use_dora: bool = option(False, "train the magnitude of each weight apart from its direction (DoRA, arXiv 2402.09353)")
    modules_to_save: list[str] = option([], "modules that are trained whole and saved with the adapter, such as lm_head")
    exclude_modules: list[str] = option([], "modules that get no adapter although lora_target_modules names them")
    layers_to_transform: list[int] = option([], "numbers of the layers that get adapters, from 0; empty: all", ge=0)


def new_lora_config(config: ModelConfig, model: PreTrainedModel, base: str) -> LoraConfig:
    """Return PEFT's settings of a new adapter on `model` as a run's settings describe it.

    Args:
        base: name or folder of the model.

    Raises:
        UserError: for fields that exclude each other.
    """
    by_default = linear_layers(model) or ALL_LINEAR
    targets = by_default if config.lora_target_modules == ALL_LINEAR else config.lora_target_modules.split(",")
    further = {name: value for name, value in vars(config.lora).items() if value} if config.lora else {}
    own = adapter_settings(model)
    own["modules_to_save"] = [*own.get("modules_to_save", ()), *further.pop("modules_to_save", ())] or None
    try:
        return LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT divides by it: a float is as good
            target_modules=targets,
            base_model_name_or_path=base,
            **own,
            **further,
        )
    except ValueError as error:
        raise UserError(f"lora: {first_line(error)}; name the modules in lora_target_modules") from error


def require_supported(given: PeftConfig, is_new: bool = True) -> LoraConfig:
    """Return PEFT's settings if training here implements them.

    Args:
        is_new: whether an adapter will be made with them; its initialization must not change the base.

    Raises:
        UserError: for anything but LoRA, and for a field that training here does not implement.
    """
    if type(given) is not LoraConfig:
        raise UserError(f"peft_config is a {type(given).__name__}: only LoRA adapters are trained; give a LoraConfig")
    if given.bias != "none":
        raise UserError(f"peft_config: bias {given.bias} trains biases of the base, which is the reference; set it to none")
    if is_new and given.init_lora_weights not in INITIALIZATIONS:
        raise UserError(
            f"peft_config: init_lora_weights {given.init_lora_weights} changes the base, which is the reference, or needs "
            f"data; set it to one of {', '.join(map(str, INITIALIZATIONS))}"
        )
    for name, value, default in _values(given):
        if name not in SUPPORTED and value != default and value:
            raise UserError(f"peft_config: {name} is {value!r}, which is not supported; leave it out")
    return given


def checked(given: PeftConfig, is_new: bool = True) -> LoraConfig:
    """Return a copy of PEFT's settings as training uses them, without dropout; arguments as for `require_supported`."""
    settings = copy.copy(require_supported(given, is_new))
    settings.inference_mode = False
    if settings.lora_dropout:
        _print(f"lora_dropout {settings.lora_dropout:g} is set to 0: with dropout, the ratio of unchanged weights is not 1")
        settings.lora_dropout = 0.0
    return settings


def _values(given: LoraConfig) -> Iterable[tuple[str, Any, Any]]:
    """Yield the name, the value and the default of each field."""
    for item in fields(given):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        yield item.name, getattr(given, item.name), default


def _print(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        console.print(line, highlight=False, markup=False)


def prepared_lora_config(given: PeftConfig, model: PreTrainedModel, base: str) -> LoraConfig:
    """Return checked settings of a new adapter on `model`; the kind of the model decides its task."""
    settings, own = checked(given), adapter_settings(model)
    settings.modules_to_save = [*own.get("modules_to_save", ()), *(settings.modules_to_save or ())] or None
    settings.task_type, settings.base_model_name_or_path = own["task_type"], base
    return settings


def with_lora_settings(config: Config, given: PeftConfig, is_new: bool, model_type: str) -> Config:
    """Return a run's settings with the fields of a `LoraConfig`, which the run's folder names and a resumed run compares.

    Args:
        is_new: see `require_supported`.
        model_type: of the base, which decides PEFT's own choice of modules.

    Raises:
        UserError: if the settings describe an adapter themselves.
    """
    if config.lora_r or config.lora:
        raise UserError("peft_config and the settings lora_r and lora describe one adapter: leave the settings at 0")
    settings = require_supported(given, is_new)
    modules = settings.target_modules or TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type, ALL_LINEAR)
    names = modules if isinstance(modules, str) else ",".join(sorted(modules))
    values = {item.name: _as_setting(getattr(settings, item.name)) for item in fields(LoraSettings)}
    further = LoraSettings(**{name: value for name, value in values.items() if value}) if any(values.values()) else None
    return replace(config, lora_r=settings.r, lora_alpha=float(settings.lora_alpha), lora_target_modules=names, lora=further)


def _as_setting(value: Any) -> Any:
    """Return the value of a field of `LoraConfig` as `LoraSettings` has it: PEFT also takes sets, a name or a number."""
    if value is None or isinstance(value, bool):
        return bool(value)
    return [value] if isinstance(value, str | int) else sorted(value)


def require_same_fields(config: ModelConfig, stored: PeftConfig) -> None:
    """Raise a UserError if the block `lora` differs from the settings of the adapter that training continues."""
    for name, value in vars(config.lora).items() if config.lora else ():
        actual = getattr(stored, name, None)
        if value and value != actual:
            raise UserError(
                f"model '{config.model}' is an adapter with {name} {actual}, which training continues; lora.{name} is "
                f"{value}: leave it out"
            )


def train_active_adapter(peft_model: PeftModel) -> str:
    """Make the active adapter of a PEFT model in memory trainable, add a frozen copy of it as the start, return its name.

    Raises:
        UserError: if several adapters are active, or the active one is not supported.
    """
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
    settings = checked(peft_model.peft_config[name], is_new=False)
    settings.base_model_name_or_path = peft_model.peft_config[name].base_model_name_or_path
    peft_model.peft_config[name] = settings
    copy_adapter(peft_model, name, START_ADAPTER)
    model = peft_model.get_base_model()
    model.requires_grad_(False)
    for weight in adapter_parameters(model, name).values():
        weight.requires_grad_(True)
    peft_model.set_adapter(name)
    for weight in adapter_parameters(model, START_ADAPTER).values():
        weight.requires_grad_(False)
    return name
