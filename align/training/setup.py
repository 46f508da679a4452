"""The setup that all stages share: the engine, names of data in the settings, and hints."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from torch import nn

from align.batches.mixtures import TrainingData, data_name
from align.core.errors import UserError
from align.core.settings import RunConfig
from align.models.backbone import Backbone
from align.runtime.distributed import broadcast_trainable_weights, zero_stage
from align.training.engine import TrainEngine
from align.training.optimizer import ParamGroup
from align.training.run import Run


def warn_if_prompts_are_reread(run: Run, backbone: Backbone, responses: Iterable[int]) -> None:
    """Warn if the model recomputes a prompt for each of its responses; `responses` is their number per prompt."""
    if not backbone.shares_prompts and max(responses, default=0) > 1:
        run.print("the model cannot process several responses in one row: each prompt is recomputed, which is slower")


def build_engine(
    run: Run, module: nn.Module, total_steps: int, groups: Sequence[ParamGroup] = (), average_decay: float = 0.0
) -> TrainEngine:
    """Build the engine of a run, with DeepSpeed if the launcher requested it. For arguments, see `TrainEngine`.

    New weights (adapters, heads) are broadcast from the first process.

    Raises:
        UserError: if `average_decay` is set with ZeRO-3.
    """
    run.print(run.optimization.without_effect_warning())
    run.print(lora_rate_hint(run))
    broadcast_trainable_weights(module, run.accelerator)
    if run.accelerator.state.deepspeed_plugin is None:
        return TrainEngine(run, module, total_steps, groups, average_decay)
    if average_decay and zero_stage(run.accelerator) == 3:
        raise UserError("ema_decay is not supported with ZeRO-3: set it to 0, or use ZeRO-1 or 2")
    from align.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(run, module, total_steps, groups, average_decay)


def lora_rate_hint(run: Run) -> str:
    """Return a hint if an adapter is trained with the default learning rate of full fine-tuning, else ""."""
    default = next(item.default for item in fields(run.optimization) if item.name == "learning_rate")
    if not run.model_config.lora_r or run.optimization.learning_rate != default:
        return ""
    return f"learning_rate {default:g} is the default for training all weights; adapters usually need 10 to 100 times that"


Config = TypeVar("Config", bound=RunConfig)


def with_data_names(config: Config, **data: TrainingData) -> Config:
    """Return the settings with the names of data passed to a trainer: a file name, or the number of records."""
    return replace(config, **{name: data_name(value) for name, value in data.items()})  # type: ignore[arg-type]
