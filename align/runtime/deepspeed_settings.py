"""DeepSpeed settings of a run: the launcher's settings, with the keys that the run sets.

Each key in the launcher's file is applied, rejected, or overridden with a line that names the setting to use instead.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin

from align.core.errors import UserError, reason

FILE_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Environment variable with the path of the DeepSpeed JSON file, set by accelerate."""
AUTO = "auto"
"""Value that transformers' Trainer fills in. Here, the run or DeepSpeed's default fills it in."""

INSTEAD = {
    "train_batch_size": "batch_size or rollout_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon",
    "scheduler": "lr_scheduler_type and warmup_ratio",
    "bf16": "dtype",
    "fp16": "dtype",
    "data_types": "",
    "activation_checkpointing": "gradient_checkpointing",
    "managed_gradient_accumulation": "",
    "steps_per_print": "",
}
"""Keys set by the run, and the run settings to use instead ("" if none)."""
APPLIED = frozenset(
    {"zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type"}
    | {"prescale_gradients", "gradient_predivide_factor", "disable_allgather", "disable_python_gc", "aio"}
    | {"wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "log_level"}
    | {"tensorboard", "wandb", "csv_monitor", "comet", "timers", "nebula"}
)
"""Keys that change only speed, memory, logging or rounding."""
REFUSED_IN_ZERO = frozenset(
    {"zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zenflow"}
    | {"ignore_unused_parameters", "compute_grad_norm", "load_from_fp32_weights"}
)
"""Keys of `zero_optimization` that change results."""
SAVE_16BIT = "stage3_gather_16bit_weights_on_model_save"


def run_settings(dtype: torch.dtype, max_grad_norm: float) -> dict[str, Any]:
    """Return the DeepSpeed settings that the run sets.

    Micro-batches are limited by tokens and losses are divided by global counts, so the engine must not divide gradients.
    Gradients are accumulated in float32, as in `TrainEngine`. In bfloat16, sums are 6 % off after 192 micro-batches.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        # Accumulation must end with the step. Otherwise it ends with the last backward pass. With offload, the optimizer
        # would then read stale gradients of weights that are not part of this pass, such as a separate critic before ptx.
        "managed_gradient_accumulation": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def read_settings(file: str) -> dict[str, Any]:
    """Read a DeepSpeed JSON file. Raise a UserError if it is invalid."""
    try:
        stored = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the launcher's DeepSpeed file cannot be read ({reason(error)})") from error
    if not isinstance(stored, dict):
        raise UserError(f"{file}: the launcher's DeepSpeed file must contain a JSON object")
    return stored


def complete_settings(
    stored: Mapping[str, Any], dtype: torch.dtype, max_grad_norm: float, where: str
) -> tuple[dict[str, Any], str]:
    """Return the DeepSpeed settings of a run, and a line that lists overridden keys ("" if none).

    Args:
        stored: settings of the launcher.
        dtype: dtype of the model.
        max_grad_norm: gradient clipping threshold.
        where: name of the launcher's file, for errors.

    Raises:
        UserError: If a key is not supported, or the ZeRO stage is not 1, 2 or 3.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    run_values, launcher_values = run_settings(dtype, max_grad_norm), _without_auto(stored)
    unknown = sorted(
        key for key, value in launcher_values.items() if key not in INSTEAD and key not in APPLIED and _is_on(value)
    )
    if unknown:
        raise UserError(f"{where}: {unknown[0]} is not supported; remove it")
    zero = dict(launcher_values.get("zero_optimization") or {})
    for name in sorted(REFUSED_IN_ZERO & zero.keys()):
        if zero[name] != DeepSpeedZeroConfig.model_fields[name].default:
            raise UserError(f"{where}: zero_optimization.{name} changes results and is not supported; remove it")
    if zero.get("stage", 0) not in (1, 2, 3):
        raise UserError(
            f"{where}: zero_optimization.stage is {zero.get('stage', 'missing')}; set 1, 2 or 3, or launch without "
            "DeepSpeed (configs/accelerate/ddp.yaml)"
        )
    overridden = [
        key for key in INSTEAD if key in launcher_values and not _agrees(launcher_values[key], run_values.get(key))
    ]
    if zero["stage"] == 3:  # otherwise a trained model could not be saved
        zero[SAVE_16BIT] = True
    for name in ("offload_optimizer", "offload_param"):  # pinned memory, which accelerate's files cannot request
        if isinstance(zero.get(name), dict) and zero[name].get("device") == "cpu":
            zero[name] = {"pin_memory": True} | zero[name]
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise UserError(f"{where}: {name}: {first['msg']}; correct or remove it") from error
    # Gradients are reduced across processes in float32, as in `TrainEngine`.
    settings = (
        {"communication_data_type": "fp32"}
        | {key: value for key, value in launcher_values.items() if key in APPLIED}
        | run_values
    )
    return settings | {"zero_optimization": zero}, _line(overridden, where)


def _line(overridden: list[str], where: str) -> str:
    parts = [f"{key} (set {INSTEAD[key]})" if INSTEAD[key] else key for key in overridden]
    return f"{where}: ignored, because the run sets it: {', '.join(parts)}" if parts else ""


def _without_auto(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without `auto` values."""
    kept = {key: item for key, item in value.items() if item != AUTO and item is not None}
    return {key: _without_auto(item) if isinstance(item, dict) else item for key, item in kept.items()}


def _is_on(value: Any) -> bool:
    """Return whether a value enables a feature."""
    return bool(value.get("enabled", value)) if isinstance(value, dict) else bool(value)


def _agrees(given: Any, own: Any) -> bool:
    """Return whether a launcher's value is compatible with the run's."""
    if isinstance(given, dict):
        own = own if isinstance(own, dict) else {}
        is_off = not _is_on(given) and not own.get("enabled")
        return is_off or all(own.get(key) == each for key, each in given.items())
    return bool(given == own)


def make_plugin(dtype: torch.dtype, max_grad_norm: float) -> tuple[DeepSpeedPlugin, str]:
    """Create accelerate's DeepSpeed plugin from the launcher's settings. Also return a line that lists overridden keys.

    Raises:
        UserError: If settings cannot be applied.
    """
    file = os.environ.get(FILE_VARIABLE, "none")
    try:
        if file == "none":
            plugin, where = DeepSpeedPlugin(), "the launcher's DeepSpeed settings"
            stored: dict[str, Any] = {"zero_optimization": plugin.deepspeed_config["zero_optimization"]}
            if plugin.gradient_accumulation_steps not in (AUTO, 1):
                stored["gradient_accumulation_steps"] = plugin.gradient_accumulation_steps
            settings, line = complete_settings(stored, dtype, max_grad_norm, where)
        else:
            settings, line = complete_settings(read_settings(file), dtype, max_grad_norm, file)
            plugin = DeepSpeedPlugin(hf_ds_config=settings)
    except ValueError as error:  # accelerate's settings contradict the DeepSpeed file
        raise UserError(f"the launcher's DeepSpeed settings: {reason(error)}") from error
    plugin.deepspeed_config |= settings  # override the values set by accelerate
    return plugin, line
